"""GPT-2 in NNX against GPT-2 in Linen: one parameter tree, the same numbers to the bit, the same set of saved values."""

import jax
import numpy as np
import pytest

from remat_kit import StepError
from tests.decoders import QUICK, make, step_flops
from tests.model_oracles import kept_names, start

PLANS = (pytest.param("none", marks=pytest.mark.slow), "full*1 | save(q,k,v)*1")


@pytest.mark.parametrize("plan", PLANS)
def test_is_the_linen_model_to_the_bit(plan):
    args = start("gpt2_tiny")
    found, expected = (jax.jit(make(name, plan).fn, compiler_options=QUICK)(*args) for name in ("gpt2_nnx_tiny", "gpt2_tiny"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("plan", ["none", "full", "minimal", "save(attn)", "full*1 | save(q,k,v)*1"])
def test_keeps_and_recomputes_what_linen_does(plan):
    nnx, linen = make("gpt2_nnx_tiny", plan), make("gpt2_tiny", plan)
    assert step_flops(nnx) == step_flops(linen)
    assert "|" in plan or kept_names(nnx) == kept_names(linen)


@pytest.mark.slow
def test_its_own_parameters_are_a_gpt2s():
    states = [make(name).init(jax.random.key(0))[0].params for name in ("gpt2_nnx_tiny", "gpt2_tiny")]
    assert jax.tree.map(np.shape, states[0]) == jax.tree.map(np.shape, states[1])
    for mine, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        assert float(np.std(mine)) == pytest.approx(float(np.std(theirs)), rel=0.1)
    first, second = states[0]["layers"]["q"]["kernel"]
    assert not np.array_equal(first, second), "layers start from keys of their own"


def test_has_no_adapters():
    with pytest.raises(StepError, match="lora_rank: models in NNX have no adapters here"):
        make("gpt2_nnx_tiny", lora_rank=4)
