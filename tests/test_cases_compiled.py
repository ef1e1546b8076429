"""Faults that people reported of rematerialization policies, as only a compiler shows them: bytes of programs for absent chips.

The other halves of these rows are in `test_cases_policy.py` and `test_cases_structure.py`. Bytes are in carries: those of one
layer's input.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from test_compile import target_of

from remat_kit import RematWarning, _jax, remat, stack
from remat_kit.compile.compiler import compile_lowered
from remat_kit.compile.topology import devices_for

ROWS, WIDTH = 8192, 1024
CARRY = ROWS * WIDTH * 4
ON_BOTH = ["h100", pytest.param("v5e", marks=pytest.mark.slow)]


def block(w, x):
    """One matmul; keeps both results of tanh when nothing is recomputed. The sine of f32 takes a TPU's compiler minutes."""
    x = checkpoint_name(x, "in")
    h = checkpoint_name(jnp.tanh(x) @ w, "h")
    return checkpoint_name(x + jnp.tanh(h), "out")


def lower(text, loss, *, num_layers, rows=ROWS):
    sharding = jax.sharding.SingleDeviceSharding(devices_for(target_of(text))[0])
    w = jax.ShapeDtypeStruct((num_layers, WIDTH, WIDTH), jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32, sharding=sharding)
    return jax.jit(jax.grad(lambda w, x: loss(w, x).sum())).lower(w, x)


@functools.cache
def carries(text, plan, num_layers):
    """Temporaries on the device and in host memory."""
    step = compile_lowered(lower(text, lambda w, x: stack(block, w, x, plan), num_layers=num_layers), target=target_of(text))
    assert step.host is not None
    return step.device.temp_bytes / CARRY, step.host.temp_bytes / CARRY


@pytest.mark.parametrize("text", ON_BOTH)
def test_offloading_the_input_moves_every_carry_to_the_host(text):
    """openxla/xla#17541: host bytes are L carries, and the stack on the device is gone; naming the output moved nothing."""
    (full, no_host), (device, host) = carries(text, "full", 12), carries(text, "offload(in)", 12)
    assert no_host == 0
    assert host == pytest.approx(12, rel=0.02)
    assert full - device > 8  # a few carries are in flight


@pytest.mark.parametrize("text", ON_BOTH)
def test_one_layer_offloads_one_carry(text):
    """AI-Hypercomputer/maxtext#4530: a loop of one iteration was simplified away, and the slice of its stack with it."""
    assert carries(text, "offload(h)", 1)[1] == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("text", ["h100", pytest.param("v5e", marks=[pytest.mark.slow, pytest.mark.long])])
def test_unrolled_layers_need_the_barrier(text):
    """jax-ml/jax#24062, jax#6639, flax#1499: merged with the forward pass, full remat kept as much as none."""

    def thrice(w, x):
        return block(w, block(w, block(w, x)))

    def temp(policy, **options):
        def loss(w, x):
            run = remat(thrice, policy, **options)
            for layer in range(3):
                x = run(w[layer], x)
            return x

        return compile_lowered(lower(text, loss, num_layers=3), target=target_of(text)).device.temp_bytes

    with pytest.warns(RematWarning, match="prevent_cse=False and is not the body of a loop"):
        undone = temp("full", prevent_cse=False)
    none, full = temp("none"), temp("full")
    assert undone == pytest.approx(none, rel=0.1)
    assert none > 1.5 * full


def test_offloaded_layers_are_read_back_in_reverse_or_the_version_is_known():
    """openxla/xla#46231: the compiler notes where a loop's slices are; of a read in reverse it noted the first layer first."""
    target = target_of("h100")
    lowered = lower("h100", lambda w, x: stack(block, w, x, "offload(h)"), num_layers=4, rows=64)
    lines = lowered.compile(compiler_options=dict(target.compiler_options)).as_text().splitlines()
    reads = [line for line in lines if re.search(r"= f32\[1,64,1024\]\S* dynamic-slice\(", line) and "transpose(jvp" in line]
    strides = {int(stride) for line in reads for stride in re.findall(r'"byte_stride":"(-?\d+)"', line)} - {0}
    assert strides, "nothing is noted any more: the test has to look elsewhere"
    assert strides == {-64 * WIDTH * 4} if _jax.GPU_OFFLOAD_FAULT is None else 64 * WIDTH * 4 in strides


def test_a_scan_forward_takes_no_memory_for_depth_and_a_gradient_takes_its_carries():
    """marin#7219: forward only, 26 layers in a Python loop ran out of memory. Slopes of temporaries over depth, in carries."""
    target = target_of("cpu")

    def slope(run, *, gradient):
        temps = []
        for depth in (2, 6):
            sharding = jax.sharding.SingleDeviceSharding(devices_for(target)[0])
            w = jax.ShapeDtypeStruct((depth, 64, 64), jnp.float32, sharding=sharding)
            x = jax.ShapeDtypeStruct((1024, 64), jnp.float32, sharding=sharding)
            fn = jax.grad(lambda w, x: run(w, x).sum()) if gradient else run
            temps.append(compile_lowered(jax.jit(fn).lower(w, x), target=target).device.temp_bytes)
        return (temps[1] - temps[0]) / 4 / (1024 * 64 * 4)

    def loop(w, x):
        for layer in range(w.shape[0]):
            x = block(w[layer], x)
        return x

    scan = functools.partial(stack, block, plan="none")
    assert abs(slope(lambda w, x: scan(w, x=x), gradient=False)) < 0.2
    assert slope(loop, gradient=True) > 0.9
    assert 0.9 < slope(lambda w, x: stack(block, w, x, "full"), gradient=True) < 1.3


def test_a_chunked_loss_needs_a_scan_and_remat():
    """HomebrewML/Olmax#25, jax#35915: a Python loop over chunks held all logits; scan with remat holds about one chunk."""
    target = target_of("h100")
    num_chunks, chunk, width, vocabulary = 8, 512, 256, 32768
    logits = chunk * vocabulary * 4
    sharding = jax.sharding.SingleDeviceSharding(devices_for(target)[0])
    head = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32, sharding=sharding)
    x = jax.ShapeDtypeStruct((num_chunks, chunk, width), jnp.float32, sharding=sharding)

    def of_chunk(head, x):
        return jax.nn.logsumexp(x @ head, axis=-1).sum()

    def loop(run):
        return lambda head, x: sum(run(head, x[index]) for index in range(num_chunks))

    def scan(run):
        return lambda head, x: jax.lax.scan(lambda total, x: (total + run(head, x), None), jnp.float32(0), x)[0]

    def temp(loss):
        step = compile_lowered(jax.jit(jax.grad(loss, (0, 1))).lower(head, x), target=target)
        return (step.device.temp_bytes - width * vocabulary * 4) / logits  # the gradient of the head beside it

    unrolled, scanned, rematerialized = (
        temp(loop(of_chunk)),
        temp(scan(of_chunk)),
        temp(scan(remat(of_chunk, "full", prevent_cse=False))),
    )
    assert scanned > num_chunks - 1
    assert unrolled > num_chunks / 2 - 1
    assert rematerialized < 2.5


@pytest.mark.parametrize(("policy", "num_calls"), [("none", 1), ("full", 2), ("save(o)", 2), ("kernels", 1)])
def test_calls_of_cudnn_attention(policy, num_calls):
    """jax-ml/jax#26374, maxtext#1805: its output and its statistics have to be kept, or it runs again."""
    pytest.importorskip("nvidia.cudnn", reason="needs remat-kit[gpu-cudnn]")
    target = target_of("h100")
    sharding = jax.sharding.SingleDeviceSharding(devices_for(target)[0])
    qkv = [jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16, sharding=sharding)] * 3
    attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=True)
    run = remat(lambda *qkv: jnp.sin(checkpoint_name(attend(*(jnp.sin(each) for each in qkv)), "o")), policy)
    lowered = jax.jit(jax.value_and_grad(lambda *qkv: run(*qkv).astype(jnp.float32).sum(), (0, 1, 2))).lower(*qkv)
    text = lowered.compile(compiler_options=dict(target.compiler_options)).as_text()
    targets = re.findall(r'custom_call_target="(__cudnn\$fmha[^"]*)"', text)
    assert sum("Backward" not in name for name in targets) == num_calls
