"""The step factories: sizes of the published models, shardings, what follows from the devices, bad options, steps on CPU."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import devices as on
from models.config import GPT2_SMALL, LLAMA3_8B
from models.sharding import make_layout
from remat_kit import StepError
from remat_kit.attention import Kernel
from remat_kit.plans import NO_REMAT
from tests.decoders import FAMILIES, QUICK, first_state, make, run

H100 = [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100", compute_capability="9.0")]
V100 = [SimpleNamespace(platform="gpu", device_kind="Tesla V100", compute_capability="7.0")]
V5E = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")]
CPU = [SimpleNamespace(platform="cpu", device_kind="cpu")]
TOO_OLD = "cuDNN flash attention needs compute capability 8.0, Tesla V100 has 7.0"


@pytest.mark.parametrize(
    ("factory", "count"),
    [
        ("gpt2_small", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
    ],
)
def test_has_as_many_parameters_as_published(factory, count):
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(make(factory).args[0].params)) == count


def test_llama3_8b_on_8_devices_holds_an_eighth():
    step = make("llama3_8b", devices=jax.devices("cpu")[:8])
    held = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.args))
    assert held / 2**30 == pytest.approx(11.22, abs=0.01)
    axes = {leaf.sharding.spec[0] for leaf in jax.tree.leaves(step.args[0].params["layers"])}
    assert axes == {None}, "the stacked layer dimension is never split"


def test_roles_and_stack_fit_the_arguments():
    step = make("gpt2_tiny")
    leaves = jax.tree.broadcast(step.roles, step.args)
    assert {"parameters", "optimizer_state", "batch", "other"} == set(jax.tree.leaves(leaves))
    assert [(stack.name, stack.num_layers) for stack in step.stacks] == [("layers", 2)]
    assert (step.knobs.batch, step.knobs.seq, step.knobs.depth) == ("batch", "seq", "layers")


def test_learns():
    step = make("llama3_tiny", "full")
    run = jax.jit(step.fn, compiler_options=QUICK, donate_argnums=step.donate)
    state, batch = step.init(jax.random.key(0))
    losses = []
    for _ in range(4):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < losses[0] - 0.01
    assert int(state.step) == 4
    assert run._cache_size() == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sharded_step_equals_one_device(family):
    step = make(family, "save(q,attn)", devices=jax.devices("cpu")[:8], mesh="data:2,fsdp:2,tensor:2")
    args = jax.device_put(first_state(family), jax.tree.map(lambda leaf: leaf.sharding, step.args))
    state, metrics = jax.jit(step.fn, compiler_options=QUICK)(*args)
    plain, expected = run(make(family, "save(q,attn)"), family)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(expected["grad_norm"]), rel=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.opt_state, plain.opt_state)
    stays = jax.tree.map(lambda new, old: new.sharding.is_equivalent_to(old.sharding, new.ndim), state, args[0])
    assert all(jax.tree.leaves(stays)), "a state that comes back elsewhere can't be donated"


def test_the_mesh_has_auto_axes():
    layout = make_layout(jax.devices("cpu")[:4], "data:2,fsdp:2")
    assert layout.mesh is not None
    assert layout.mesh.shape == {"data": 2, "fsdp": 2, "tensor": 1}
    assert set(layout.mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize(
    ("factory", "num_devices", "options", "message"),
    [
        ("gpt2_small", 1, {"seq": 2048}, "seq=2048: this model has 1024 learned positions; give seq=1024 or less."),
        ("gpt2_tiny", 8, {"batch": 9}, "batch=9 can't be split over data x fsdp = 8 devices; give a multiple of 8"),
        ("gpt2_tiny", 8, {"mesh": "fdsp:8"}, "'fdsp' is no axis, or stands twice; axes are data, fsdp, tensor. Did you mean"),
        ("gpt2_tiny", 8, {"mesh": "data:2,data:4"}, "'data' is no axis, or stands twice"),
        ("gpt2_tiny", 8, {"mesh": "fsdp:x"}, "fsdp needs a size of at least 1, like fsdp:2; not 'x'."),
        ("gpt2_tiny", 8, {"mesh": "fsdp:4"}, "mesh='fsdp:4' is 4 devices, the target has 8."),
        ("llama3_tiny", 8, {"mesh": "fsdp:2,tensor:4"}, "tensor:4 does not divide the model's key/value heads, 2"),
        ("gpt2_tiny", 1, {"attention": "splsh"}, "choose from auto, xla, cudnn, splash. Did you mean 'splash'?"),
        ("gpt2_tiny", 1, {"attention": "cudnn"}, "attention=cudnn: cuDNN runs on NVIDIA GPUs, not on cpu. Give attention=xla"),
        ("gpt2_tiny", 1, {"dtype": "bf16"}, "choose from auto, bfloat16, float16, float32. Did you mean 'bfloat16'?"),
        ("gpt2_tiny", 1, {"batch": 0}, "batch=0: it must be at least 1."),
        ("gpt2_tiny", 1, {"layers": 0}, "layers=0: it must be at least 1."),
    ],
)
def test_bad_options_are_step_errors(factory, num_devices, options, message):
    with pytest.raises(StepError) as caught:
        getattr(models, factory)(NO_REMAT, jax.devices("cpu")[:num_devices], **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("devices", "attention", "seq", "has_cudnn", "kernel", "note"),
    [
        (H100, "auto", 1024, True, Kernel.CUDNN, "attention: cuDNN flash"),
        (H100, "auto", 1024, False, Kernel.XLA, "attention: XLA (cuDNN is not installed: pip install remat-kit[gpu-cudnn])"),
        (H100, "xla", 1024, True, Kernel.XLA, "attention: XLA"),
        (V100, "auto", 1024, True, Kernel.XLA, f"attention: XLA ({TOO_OLD})"),
        (V5E, "auto", 1024, False, Kernel.SPLASH, "attention: splash"),
        (V5E, "auto", 1000, False, Kernel.XLA, "attention: XLA (splash needs seq to be a multiple of 128, not 1000)"),
        (CPU, "auto", 1024, True, Kernel.XLA, "attention: XLA"),
    ],
)
def test_attention_follows_the_devices(monkeypatch, devices, attention, seq, has_cudnn, kernel, note):
    monkeypatch.setattr(on, "is_cudnn_installed", lambda: has_cudnn)
    dtype = on.choose_dtype("auto", devices)
    assert on.choose_attention(attention, devices, config=GPT2_SMALL, seq=seq, dtype=dtype) == (kernel, (note,))


@pytest.mark.parametrize(
    ("devices", "attention", "message"),
    [
        (H100, "cudnn", "cuDNN is not installed: pip install remat-kit[gpu-cudnn]"),
        (V100, "cudnn", TOO_OLD),
        (V5E, "cudnn", "cuDNN runs on NVIDIA GPUs, not on tpu"),
        (H100, "splash", "splash runs on TPUs, not on gpu"),
        (V5E, "splash", "splash needs seq to be a multiple of 128, not 1000"),
    ],
)
def test_a_kernel_that_can_not_run_is_an_error(monkeypatch, devices, attention, message):
    monkeypatch.setattr(on, "is_cudnn_installed", lambda: False)
    with pytest.raises(StepError) as caught:
        on.choose_attention(attention, devices, config=LLAMA3_8B, seq=1000, dtype=jnp.dtype("bfloat16"))
    assert message in str(caught.value)


def test_the_dtype_follows_the_devices():
    found = [on.choose_dtype("auto", devices).name for devices in (H100, V100, V5E, CPU)]
    assert found == ["bfloat16", "float16", "bfloat16", "bfloat16"]
    with pytest.raises(StepError, match="Tesla V100 computes in float16 or float32"):
        on.choose_dtype("bfloat16", V100)
