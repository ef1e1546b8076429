"""Mixed plans over the layers of the decoders: one parameter tree, matmuls counted by hand, the same gradients."""

import jax
import numpy as np
import pytest

from tests.decoders import FAMILIES, gradients, largest, make, step_flops
from tests.test_models_remat import CONFIGS, matmul_flops

ALL = "q k v scores context attn_out mlp"

# Plan over four layers -> pairs of number of layers and the matmuls that run again in each of them.
MIXED = {
    "full*3 | none*1": [(3, ALL)],
    "full*2 | save(q,k,v)*2": [(2, ALL), (2, "scores context attn_out mlp")],
    "save(attn)*1 | dots_no_batch*2 | none*1": [(1, "q k v scores attn_out mlp"), (2, "scores context")],
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", MIXED)
def test_recomputes_what_the_table_says(family, plan):
    extra = step_flops(make(family, plan, layers=4)) - step_flops(make(family, "none", layers=4))
    assert extra == sum(
        layers * sum(matmul_flops(CONFIGS[family], name) for name in names.split()) for layers, names in MIXED[plan]
    )


@pytest.mark.parametrize("family", [FAMILIES[0], *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:])])
def test_same_tree_and_gradients(family):
    expected, full, mixed = (gradients(family, plan) for plan in ("none", "full", "full*1 | save(q,k,v)*1"))
    assert jax.tree.structure(mixed) == jax.tree.structure(expected)
    bound = 2e-6 * largest(expected)
    for a, b, c in zip(*map(jax.tree.leaves, (mixed, expected, full)), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= bound
        assert np.abs(np.asarray(a) - np.asarray(c)).max() <= bound
