"""Adapters on frozen weights: gradients by the chain rule, no state for what is frozen, 4 bits that are 4 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat_kit
from models.adapters import FACTORS, Frozen
from models.config import LLAMA3_TINY
from models.quantized import Quantized, dequantize, quantize
from models.training import split
from remat_kit import StepError
from remat_kit.trace import residuals
from tests.decoders import QUICK, make
from tests.model_oracles import assert_same_gradients, run, start

RANK, SCALE = 4, 16.0 / 4
PROJECTIONS = ("q", "k", "v", "attn_out", "up", "gate", "down")


@pytest.mark.parametrize("qtype", ["int4", "nf4"])
def test_4_bits_round_to_the_nearest_value(qtype):
    kernel = jax.random.normal(jax.random.key(0), (128, 6))
    stored = quantize(kernel, qtype)
    found = dequantize(stored, qtype, "float32")
    assert stored.codes.nbytes == kernel.size // 2
    assert stored.scales.shape == (2, 6)
    values = np.unique(np.round(np.asarray(found[:64, 0] / stored.scales[0, 0], np.float32), 2))
    assert len(values) <= 16
    nearest = np.abs(np.asarray(kernel[:64, :1] / stored.scales[0, 0].astype("float32")) - values).min(1)
    errors = np.abs(np.asarray((kernel - found)[:64, 0] / stored.scales[0, 0].astype("float32")))
    np.testing.assert_allclose(errors, nearest, atol=0.02)


def test_blocks_divide_any_width():
    assert quantize(jnp.ones((160, 4)), "int4").scales.shape == (5, 4)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", Frozen)
def test_adapters_follow_the_chain_rule(frozen):
    """Against the dense model with the adapters added to its weights: dA = s G B^T and dB = s A^T G."""
    adapted = make("llama3_tiny", "save(q)", lora_rank=RANK, frozen=frozen.value)
    state, batch = start("llama3_tiny", lora_rank=RANK, frozen=frozen.value)
    merged = _merged(state.params, frozen)
    loss, dense = jax.jit(jax.value_and_grad(make("llama3_tiny").evaluate), compiler_options=QUICK)(merged, batch)
    factors, rest = split(state.params, lambda names: names[-1] in FACTORS)

    def of(factors):
        whole = jax.tree.map(lambda a, b: b if a is None else a, factors, rest, is_leaf=lambda leaf: leaf is None)
        return adapted.evaluate(whole, batch)

    value, found = jax.jit(jax.value_and_grad(of), compiler_options=QUICK)(factors)
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    for name in PROJECTIONS:
        a, b = (jnp.asarray(state.params["layers"][name][factor]) for factor in FACTORS)
        gradient = dense["layers"][name]["kernel"]
        expected = {"lora_a": SCALE * gradient @ b.mT, "lora_b": SCALE * a.mT @ gradient}
        for factor in FACTORS:
            np.testing.assert_allclose(found["layers"][name][factor], expected[factor], rtol=1e-3, atol=1e-5)


def _merged(params, frozen):
    """Dense f32 parameters: the stored weights and what the adapters add."""

    def merge(projection):
        kernel = projection["kernel"]
        if isinstance(kernel, Quantized):
            restored = jnp.stack(
                [dequantize(Quantized(*map(jnp.asarray, layer)), frozen, "float32") for layer in zip(*kernel, strict=True)]
            )
        else:
            restored = jnp.asarray(kernel, jnp.float32)
        return {"kernel": restored + SCALE * projection["lora_a"] @ projection["lora_b"]}

    layers = {name: merge(part) if name in PROJECTIONS else part for name, part in params["layers"].items()}
    others = {name: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), part) for name, part in params.items()}
    return {**others, "layers": layers}


@pytest.mark.parametrize("frozen", [pytest.param("bf16", marks=pytest.mark.slow), "int4"])
def test_frozen_weights_go_through_and_have_no_state(frozen):
    before = start("llama3_tiny", lora_rank=RANK, frozen=frozen)[0]
    state, _, moments = run("llama3_tiny", "full", lora_rank=RANK, frozen=frozen)
    is_factor = [path[-1] in FACTORS for path in _paths(state.params)]
    same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before.params, state.params)), strict=True)]
    assert same == [not trains for trains in is_factor]
    assert [path[-1] in FACTORS for path in _paths(moments)] == [True] * 2 * len(PROJECTIONS)


def _paths(tree):
    return [
        [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


@pytest.mark.slow
def test_gradients_agree():
    assert_same_gradients("llama3_tiny", "full*1 | save(q,k,v)*1", lora_rank=RANK, frozen="nf4")


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "bits"), [("bf16", 16), ("int4", 4 + 16 / 32)])
def test_arguments_are_the_frozen_weights_and_three_times_the_adapters(frozen, bits):
    """What the compiler counts, against sizes alone; blocks are of 32 as the MLP's width is 160."""
    options = {"lora_rank": RANK, "frozen": frozen}
    (row,) = remat_kit.compare("models:llama3_tiny", policies=["full"], targets=["cpu"], options=options).rows
    config, sizes = LLAMA3_TINY, _projection_sizes()
    tables = 2 * config.vocab_size * config.d_model * 2
    norms = (2 * config.num_layers + 1) * config.d_model * 4
    per_block = {(a, b): 16 / np.gcd(a, 64) for a, b in sizes}
    weights = sum(a * b * (16 if frozen == "bf16" else 4 + per_block[a, b]) / 8 for a, b in sizes)
    adapters = sum((a + b) * RANK * 4 for a, b in sizes)
    batch, counters = 4 * 32 * 3 * 4, 3 * 4
    expected = tables + norms + config.num_layers * (weights + 3 * adapters) + batch
    assert row.argument_bytes == pytest.approx(expected, abs=counters)


def _projection_sizes():
    config = LLAMA3_TINY
    kv = config.num_kv_heads * config.head_dim
    d, f = config.d_model, config.d_ff
    return [(d, d), (d, kv), (d, kv), (d, d), (d, f), (d, f), (f, d)]


def test_no_dequantized_weight_waits_for_the_backward_pass():
    step = make("llama3_tiny", "none", lora_rank=RANK, frozen="nf4", dtype="bfloat16")
    shapes = {(a, b) for a, b in _projection_sizes()}
    kept = residuals(step.fn, *step.args)
    assert len(kept) > 5
    assert not [each for each in kept if each.origin == "operation" and tuple(each.shape[-2:]) in shapes]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frozen": "int8"}, "frozen='int8': choose from bf16, int4, nf4."),
        ({"frozen": "int4"}, "frozen=int4: weights are frozen only beside adapters; give lora_rank=16"),
        ({"lora_rank": -1}, "lora_rank=-1: it must be at least 1, or 0 to train the model itself."),
    ],
)
def test_bad_options_are_step_errors(options, message):
    with pytest.raises(StepError) as caught:
        make("llama3_tiny", **options)
    assert message in str(caught.value)
