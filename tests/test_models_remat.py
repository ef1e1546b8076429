"""The decoders under policies: same gradients, the saved set of a hand-written table, recomputed FLOPs counted by hand."""

import jax
import numpy as np
import pytest

import models
from models.config import GPT2_SMALL, GPT2_TINY, LLAMA3_TINY
from remat_kit.trace import residuals
from tests.decoders import BATCH, FAMILIES, SEQ, gradients, largest, make, step_flops

CONFIGS = {"gpt2_tiny": GPT2_TINY, "llama3_tiny": LLAMA3_TINY, "gpt2_small": GPT2_SMALL}

# Plan -> names that survive beside the block's input, and the matmuls of a block that run again. `down` is never needed.
TABLE = {
    "full": ((), "q k v scores context attn_out mlp"),
    "save(q,k,v)": (("q", "k", "v"), "scores context attn_out mlp"),
    "save(attn)": (("attn",), "q k v scores attn_out mlp"),
    "save(q,k,v,attn)": (("q", "k", "v", "attn"), "scores attn_out mlp"),
    "save(attn_out)": (("attn_out",), "q k v scores context mlp"),
    "save(block_in)": ((), "q k v scores context attn_out mlp"),
    "save(down)": ((), "q k v scores context attn_out mlp"),
    "minimal": (("q", "k", "v", "attn_out", "mlp"), "scores context"),
    "minimal_with_context": (("q", "k", "v", "attn", "attn_out", "mlp"), "scores"),
    "save_out_proj": (("attn_out",), "q k v scores context mlp"),
    "save_dot_except_mlp": (("q", "k", "v", "attn_out"), "scores context mlp"),
    "dots_no_batch": (None, "scores context"),
    "dots": (None, ""),
}


def matmul_flops(config, name, batch=BATCH, seq=SEQ):
    """FLOPs of one matmul of one block, from the sizes alone."""
    kv_width = config.num_kv_heads * config.head_dim
    unit = 2 * batch * seq * config.d_model
    by_name = {"q": config.d_model, "k": kv_width, "v": kv_width, "attn_out": config.d_model, "scores": seq, "context": seq}
    return unit * (config.d_ff * len(mlp_names(config)) if name == "mlp" else by_name[name])


def mlp_names(config):
    return ("gate", "up") if config.mlp == "swiglu" else ("up",)


@pytest.mark.filterwarnings("ignore:save.down.*never saved")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", TABLE)
def test_recomputes_what_the_table_says(family, plan):
    config = CONFIGS[family]
    extra = step_flops(make(family, plan)) - step_flops(make(family, "none"))
    assert extra == config.num_layers * sum(matmul_flops(config, name) for name in TABLE[plan][1].split())


@pytest.mark.filterwarnings("ignore:save.down.*never saved")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", [plan for plan, (names, _) in TABLE.items() if names is not None])
def test_saves_what_the_table_says(family, plan):
    config, step = CONFIGS[family], make(family, plan)
    expected = {"block_in"}.union(*(mlp_names(config) if name == "mlp" else (name,) for name in TABLE[plan][0]))
    stacked = [kept for kept in residuals(step.fn, *step.args) if kept.num_layers == config.num_layers and kept.names]
    assert {name for kept in stacked for name in kept.names} == expected
    assert len(stacked) == len(expected)


@pytest.mark.parametrize(("family", "plan"), [("gpt2_tiny", "save(q,attn)"), ("llama3_tiny", "minimal")])
def test_gradients_agree(family, plan):
    none, full, named = (gradients(family, policy) for policy in ("none", "full", plan))
    bound = 2e-6 * largest(none)
    assert bound > 0
    for plain, again in zip(jax.tree.leaves(none), jax.tree.leaves(full), strict=True):
        assert float(abs(plain - again).max()) <= bound
    jax.tree.map(np.testing.assert_array_equal, named, full)


@pytest.mark.slow
def test_bfloat16_gradients_agree():
    none, full = (gradients("llama3_tiny", plan, dtype="bfloat16") for plan in ("none", "full"))
    for plain, again in zip(jax.tree.leaves(none), jax.tree.leaves(full), strict=True):
        assert float(abs(plain - again).max()) <= 1e-2 * largest(none)


def test_full_recomputes_8_of_12_units_of_gpt2_small():
    """A unit is one d x d projection; the MLP's two matmuls are 4 each, and the second one is dead in the backward pass."""
    sizes = {"batch": 8, "seq": 1024}
    extra = step_flops(make("gpt2_small", "full", **sizes)) - step_flops(make("gpt2_small", "none", **sizes))
    unit = 2 * 8 * 1024 * 768 * 768
    attention = 2 * (2 * 8 * 12 * 1024 * 1024 * 64)
    assert extra == 12 * (8 * unit + attention)


def test_none_recomputes_nothing():
    """Every matmul three times: forward, and backward with respect to each operand; the head as well."""
    config = GPT2_SMALL
    forward = sum(matmul_flops(config, name, 8, 1024) for name in "q k v scores context attn_out mlp".split())
    forward += 2 * 8 * 1024 * config.d_model * config.d_ff
    head = 2 * 8 * 1024 * config.d_model * config.vocab_size
    assert step_flops(make("gpt2_small", "none", batch=8, seq=1024)) == 3 * (config.num_layers * forward + head)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameter_tree_does_not_depend_on_the_policy(family):
    trees = [jax.tree.structure(make(family, plan).args[0].params) for plan in ("none", "full", "minimal")]
    assert trees[0] == trees[1] == trees[2]


def test_a_single_layer_keeps_its_barrier():
    """XLA unrolls a loop of one, and would merge the recomputation with the forward pass."""
    assert _barriers(layers=1) > 0
    assert _barriers(layers=2) == 0


def _barriers(layers):
    step = make("llama3_tiny", "full", layers=layers)
    return jax.jit(step.fn).lower(*step.args).as_text().count("optimization_barrier")


def test_weights_are_kept_once_as_the_parameters_they_are():
    """Without remat too: neither their copies in the dtype of the computation nor gathered ones wait for the backward pass."""
    step = make("llama3_tiny", "none", dtype="bfloat16")
    shapes = {leaf.shape for leaf in jax.tree.leaves(step.args[0].params["layers"]) if leaf.ndim == 3}
    assert shapes
    assert not shapes & {kept.shape for kept in residuals(step.fn, *step.args) if kept.origin == "operation"}


def test_public_names_resolve():
    assert all(hasattr(models, name) for name in models.__all__)
