"""`rematerialize` on Flax models of the `transformers` package, as they are: random weights, no file touched.

The package is needed by these tests only: `pip install 'transformers>=4.49,<4.58'`, the line that has Flax models. The slow test
compiles GPT-2 small for an H100 and a TPU v5e: residuals, and what is left of them in the compiler's own totals.
"""

import contextlib
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from apply_oracles import assert_close, assert_equal, num_matmuls, num_regions, residual_bytes, residual_names, residuals

from remat_kit.apply.paths import rematerialize
from remat_kit.errors import ApplyError
from tests.decoders import QUICK

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it announces the end of its Flax models
    transformers = pytest.importorskip("transformers", minversion="4.49", reason="pip install 'transformers>=4.49,<4.58'")
    gpt2 = pytest.importorskip(
        "transformers.models.gpt2.modeling_flax_gpt2", reason="pip install 'transformers<4.58'", exc_type=ImportError
    )
    llama = pytest.importorskip("transformers.models.llama.modeling_flax_llama", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch_dtype.*", "ignore::FutureWarning:transformers", "ignore::DeprecationWarning:transformers"
)

IDS = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)


@functools.cache
def gpt2_model():
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    return gpt2.FlaxGPT2LMHeadModel(config, seed=0)


@functools.cache
def llama_model():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    return llama.FlaxLlamaForCausalLM(config, input_shape=(1, 16), seed=0)


# (model, pattern of its layers, their number, a value inside them, matmuls of a layer that `full` runs again: all but the last)
FAMILIES = [
    pytest.param(gpt2_model, "transformer/h/*", 3, "*/mlp/c_fc", id="gpt2"),
    pytest.param(llama_model, "model/layers/*", 2, "*/mlp/up_proj", id="llama"),
]


def loss_of(model, ids=IDS, **options):
    def loss(params):
        logits = model(ids, params=params, **options).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(ids, -1, axis=1)).mean()

    return loss


@pytest.mark.parametrize(("make", "layers", "num_layers", "value"), FAMILIES)
def test_an_unmodified_model_is_rematerialized_by_path(make, layers, num_layers, value):
    model = make()
    loss = loss_of(model)
    full, saving = (rematerialize({layers: policy})(loss) for policy in ("full", f"save({value})"))
    wanted = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(model.params)
    for run in (full, saving):
        assert_close(jax.jit(jax.value_and_grad(run), compiler_options=QUICK)(model.params), wanted)
    assert num_regions(full, model.params) == num_layers
    assert num_matmuls(jax.grad(full), model.params) > num_matmuls(jax.grad(saving), model.params)
    saved = {name for name in residual_names(saving, model.params) if name.count("/") > layers.count("/")}
    assert saved == {f"{layers.replace('*', str(index))}{value[1:]}" for index in range(num_layers)}
    assert residual_bytes(full, model.params) < residual_bytes(saving, model.params) < residual_bytes(loss, model.params)


@pytest.mark.slow
def test_dropout_has_the_same_masks():
    model = gpt2_model()
    runs = [loss_of(model, dropout_rng=jax.random.key(seed), train=True) for seed in (1, 2)]
    plain, other = (run(model.params) for run in runs)
    assert plain != other
    assert_equal(rematerialize({"transformer/h/*": "save(*/c_fc)"})(runs[0])(model.params), plain)


def test_a_near_miss_is_pointed_out_with_the_modules_there_are():
    model = gpt2_model()
    with pytest.raises(ApplyError, match=r"Did you mean 'transformer/h/\*'\?.*transformer/h/\*/attn/c_attn, .*transformer/ln_f"):
        rematerialize({"transformers/h/*": "full"})(loss_of(model))(model.params)


@functools.cache
def gpt2_small():
    config = transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024)
    model = gpt2.FlaxGPT2LMHeadModel(config, _do_init=False)
    return model, jax.eval_shape(lambda key: model.init_weights(key, (1, 1)), jax.random.key(0))


def in_context(policy):
    return contextlib.nullcontext() if policy is None else rematerialize({"transformer/h/*": policy})


def test_residuals_of_gpt2_small_outside_the_loss_shrink_twentyfold():
    model, params = gpt2_small()
    ids = jax.ShapeDtypeStruct((4, 1024), jnp.int32)

    def outside_the_loss(policy):
        def run(params, ids):
            with in_context(policy):
                return loss_of(model, ids)(params)

        return sum(_size(shape) for _, shape in residuals(run, params, ids) if 50257 not in shape)

    assert outside_the_loss(None) >= 20 * outside_the_loss("full")


def _size(shape):
    return functools.reduce(lambda product, length: product * length, shape, 1)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("text", "factor"), [("h100", 4.5), ("v5e", 3.0)])
def test_gpt2_small_compiles_to_a_fraction_of_its_temporaries(text, factor):
    from remat_kit.compile.topology import devices_for
    from remat_kit.targets import load_rows, parse_target

    (device, *_) = devices_for(parse_target(text, load_rows()))
    sharding = jax.sharding.SingleDeviceSharding(device)
    model, shapes = gpt2_small()
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    args = (jax.tree.map(place, shapes), place(jax.ShapeDtypeStruct((4, 1024), jnp.int32)))
    options: dict[str, Any] = {"xla_gpu_autotune_level": 0} if text == "h100" else {}

    def temp_bytes(policy):
        with in_context(policy):
            lowered = jax.jit(jax.value_and_grad(lambda params, ids: loss_of(model, ids)(params))).lower(*args)
        compiled: Any = lowered.compile(compiler_options=options)
        return compiled.memory_analysis().temp_size_in_bytes

    assert temp_bytes(None) >= factor * temp_bytes("full")
