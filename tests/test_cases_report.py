"""Faults from the field, kinds REPORT and SHARD: what a report must say where others said nothing, less, or 0.

Each test is named after its symptom; the values are by hand. What needs a GPU's or a TPU's compiler compiles for absent devices.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from test_compile import target_of

from remat_kit.analysis.differences import difference
from remat_kit.analysis.dump import Dump, read_dump
from remat_kit.analysis.report import explain_memory
from remat_kit.analysis.summary import headline
from remat_kit.analysis.work import count_work
from remat_kit.compile.compiler import analysed_memory
from remat_kit.compile.topology import devices_for
from remat_kit.errors import CompileError
from remat_kit.explanation import Explanation
from remat_kit.findings import FindingKind
from remat_kit.memory import PeakKind
from remat_kit.records import Status
from remat_kit.report.explain_markdown import explanation_markdown
from remat_kit.trace.residuals import residual_report
from remat_kit.verbs.explain import explain

STACK = "tests.explain_steps:stack"
_scratch = tempfile.TemporaryDirectory(prefix="remat-kit-test-")


def dumped(fn, *args, options=()) -> Dump:
    with tempfile.TemporaryDirectory() as folder:
        given = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, **dict(options)}
        jax.jit(fn).lower(*args).compile(compiler_options=given)
        return read_dump(Path(folder))


@functools.cache
def explained(target: str, policy: str, **options) -> Explanation:
    target_of(target)  # or a skip
    return explain(STACK, policy=policy, target=target, options=options, cache_dir=_scratch.name, most_checks=0)


# REPORT: FLOPs of a scanned, rematted stack lower than physically possible (the loop's body is counted once).

LAYERS, ROWS, SIDE = 16, 128, 256


def _scan(body, x, weights):
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, weights)[0]


def _loop(body, x, weights):
    for index in range(LAYERS):
        x = body(x, weights[index])
    return x


def _nested(body, x, weights):
    halves = weights.reshape(4, LAYERS // 4, SIDE, SIDE)
    return jax.lax.scan(lambda x, w: (_scan(body, x, w), None), x, halves)[0]


def _layer(x, w):
    return jnp.tanh(x @ w)


@pytest.mark.parametrize("text", ["cpu", pytest.param("v5e", marks=[pytest.mark.slow, pytest.mark.long])])
@pytest.mark.parametrize("run", [_scan, _loop, _nested])
def test_a_loop_s_flops_count_every_iteration(run, text):
    target = target_of(text)
    sharding = jax.sharding.SingleDeviceSharding(devices_for(target)[0])
    x, weights = (jax.ShapeDtypeStruct(shape, "float32", sharding=sharding) for shape in ((ROWS, SIDE), (LAYERS, SIDE, SIDE)))
    once = 2 * ROWS * SIDE * SIDE * LAYERS
    assert count_work(dumped(functools.partial(run, _layer), x, weights).module).matmul_flops == pytest.approx(once, rel=0.01)

    def loss(layer):
        return lambda x, weights: run(layer, x, weights).sum()

    plain, full = (
        # With its value: in a gradient alone the last layer's forward pass is dead outside of a loop, 63 matmuls instead of 64.
        count_work(dumped(jax.value_and_grad(loss(layer), argnums=(0, 1)), x, weights).module)
        for layer in (_layer, jax.checkpoint(_layer, prevent_cse=run is _loop))
    )
    assert plain.matmul_flops == pytest.approx(3 * once, rel=0.01)
    if text != "cpu" or run is not _loop:  # XLA:CPU drops the barriers that keep recomputation outside loops apart
        assert full.matmul_flops / plain.matmul_flops == pytest.approx(4 / 3, rel=0.001)


# REPORT: a residual is listed as "output of jit/scan/shard_map" instead of by its tag.

TAGGED, LOOP = (64, 128), 3


def _tagged(x, w):
    y = checkpoint_name(x @ w, "tag")
    return y * y


def _mesh():
    return Mesh(np.array(jax.devices()[:8]), ("data",))


def _in_shards(x, w):
    spec = PartitionSpec("data")
    return jax.shard_map(_tagged, mesh=_mesh(), in_specs=(spec, PartitionSpec()), out_specs=spec)(x, w)


WRAPPED = {
    "jit": (jax.jit(_tagged), 1, 1),
    "scan": (lambda x, w: jax.lax.scan(lambda x, _: (_tagged(x, w), None), x, None, length=LOOP)[0], LOOP, 1),
    "shard_map": (_in_shards, 1, 8),
    "vmap": (lambda x, w: jax.vmap(_tagged, in_axes=(0, None))(x.reshape(4, -1, TAGGED[1]), w), 1, 1),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_a_residual_is_listed_by_its_tag(wrapper):
    fn, num_layers, num_devices = WRAPPED[wrapper]
    over = NamedSharding(_mesh(), PartitionSpec("data")) if num_devices > 1 else None
    whole = NamedSharding(_mesh(), PartitionSpec()) if num_devices > 1 else None
    x = jax.ShapeDtypeStruct(TAGGED, "float32", sharding=over)
    w = jax.ShapeDtypeStruct((TAGGED[1], TAGGED[1]), "float32", sharding=whole)

    def gradient(x, w):
        return jax.grad(lambda x: fn(x, w).sum())(x)

    (kept,) = (each for each in residual_report(gradient, x, w).residuals if each.names)
    device_bytes = 4 * num_layers * TAGGED[0] * TAGGED[1] // num_devices
    assert (kept.names, kept.num_layers, kept.num_bytes) == (("tag",), num_layers, device_bytes * num_devices)
    assert kept.device_bytes == device_bytes
    if wrapper == "scan":
        report = explain_memory(dumped(gradient, x, w), residuals=residual_report(gradient, x, w).residuals)
        (line,) = (line for line in report.peak_classes if line.name == "tag")
        assert (line.layers, line.logical_bytes) == (num_layers, device_bytes)


# REPORT: an ahead-of-time compile of what is too large raises instead of giving numbers.


@pytest.mark.slow
@pytest.mark.long
def test_a_refused_step_is_explained_and_its_largest_residual_named():
    sizes = {"depth": 16, "width": 2048, "batch": 32, "seq": 1024}
    found = explained("v5e", "save(up)", **sizes)
    assert found.compiled.refused is not None and "RESOURCE_EXHAUSTED" in found.compiled.refused
    assert (found.row.status, found.row.fits) == (Status.OVER_BUDGET, False)
    assert sum(line.bytes for line in found.memory.peak_classes) == found.memory.peak_bytes == found.row.total_bytes
    largest = max((line for line in found.memory.peak_classes if line.kind is PeakKind.RESIDUALS), key=lambda line: line.bytes)
    assert (largest.name, largest.layers) == ("up", 16)
    assert largest.logical_bytes == 2 * 16 * 32 * 1024 * 4 * 2048
    assert headline(found).startswith("Does not fit: needs ")
    other = sum(line.bytes for line in found.memory.peak_classes if line.kind is PeakKind.OTHER)
    assert other < 0.05 * found.memory.peak_bytes


# REPORT: memory and cost fields are zero, -1 or None on some backends.


def test_numbers_that_a_backend_does_not_give_are_not_zero():
    with pytest.raises(CompileError, match="reports no memory totals"):
        analysed_memory(SimpleNamespace(memory_analysis=lambda: None))  # pyright: ignore[reportArgumentType]
    found = explained("cpu", "full")
    assert found.compiled.host is None and found.row.host_bytes is None and found.memory.host is None
    assert found.floor.floor_s is None and found.row.budget_bytes is None
    assert any("host memory is not modelled on CPU" in note for note in found.notes)
    amounts = {change.what: (change.before, change.after) for change in difference(found, found).amounts}
    assert amounts["host_bytes"] == (None, None)
    text = explanation_markdown(found)
    assert "Step-time model: not available" in text and "has no budget" in text


# SHARD: unrolled layers need several times the temporaries of scanned ones, and more with each layer.

SCHEDULER = {"xla_gpu_enable_latency_hiding_scheduler": "true"}


def _temp_bytes(depth: int, *, is_unrolled: bool) -> int:
    found = _scheduled(depth, is_unrolled=is_unrolled)
    assert ("--xla xla_gpu_enable_latency_hiding_scheduler", "true") in found.flags
    return found.compiled.device.temp_bytes


@functools.cache
def _scheduled(depth: int, *, is_unrolled: bool) -> Explanation:
    target_of("h100:8")
    options = {"depth": depth, "is_unrolled": is_unrolled, "batch": 256}
    return explain(STACK, policy="full", target="h100:8", options=options, xla=SCHEDULER, cache_dir=_scratch.name, most_checks=0)


@pytest.mark.slow
@pytest.mark.long
def test_unrolled_layers_grow_with_depth_and_the_report_says_so():
    slopes = {way: (_temp_bytes(8, is_unrolled=way) - _temp_bytes(4, is_unrolled=way)) / 4 for way in (False, True)}
    gradient_bytes = 4 * 2 * 512 * 4 * 512 // 8
    layer_input_bytes = 2 * 256 * 64 * 512 // 8
    assert slopes[False] == pytest.approx(layer_input_bytes + gradient_bytes, rel=0.1)
    assert slopes[True] > slopes[False]
    kinds = {way: {finding.kind for finding in _scheduled(8, is_unrolled=way).findings} for way in (False, True)}
    assert FindingKind.UNROLLED_LAYERS in kinds[True] - kinds[False]


# SHARD: fine-grained tags made collectives run synchronously, unseen.


@pytest.mark.slow
@pytest.mark.long
def test_synchronous_collectives_are_counted_and_shown_per_policy():
    full, tagged = (explained("h100:8", policy) for policy in ("full", "save(up,down)"))
    amounts = {change.what: (change.before, change.after) for change in difference(full, tagged).amounts}
    gathers = {"up": 4, "down": 4}  # each layer's two weights, at least once in the forward pass
    assert amounts["num_async_collectives"][1] >= sum(gathers.values())
    assert amounts["num_sync_collectives"] == (0, 0)
    assert "| weight gather | forward | all-gather | yes | 8 |" in explanation_markdown(tagged)
    collectives = tuple(dataclasses.replace(each, is_async=False) for each in tagged.work.collectives)
    slowed = dataclasses.replace(tagged, work=dataclasses.replace(tagged.work, collectives=collectives))
    slower = {change.what: (change.before, change.after) for change in difference(full, slowed).amounts}
    assert slower["num_sync_collectives"] == (0, sum(each.count for each in collectives))


# SHARD: hybrid sharding without accumulation takes far more memory than the same tokens accumulated.


@pytest.mark.slow
def test_hybrid_sharding_of_equal_tokens_takes_equal_memory_or_named_buffers_say_why():
    width, depth, devices = 512, 4, 8
    once, twice = (explained("h100:8", "full", replicas=2, accumulate=parts, batch=256) for parts in (1, 2))
    changes = difference(once, twice)
    named = [change for group in (changes.appeared, changes.grew, changes.vanished, changes.shrank) for change in group]
    unnamed = [change for change in named if change.kind in (PeakKind.OTHER, PeakKind.HOLES)]
    added = twice.memory.peak_bytes - once.memory.peak_bytes
    assert sum(change.added_bytes for change in named) == added
    assert abs(added) <= 0.1 * once.memory.peak_bytes or abs(sum(change.added_bytes for change in unnamed)) <= 0.05 * abs(added)
    for found in (once, twice):
        kinds = {line.kind for line in found.memory.peak_classes}
        assert (
            sum(line.bytes for line in found.memory.peak_classes if line.kind is PeakKind.OTHER) < 0.01 * found.memory.peak_bytes
        )
        assert kinds & {PeakKind.GRADIENTS, PeakKind.UPDATES} and PeakKind.COLLECTIVES in kinds
        assert found.findings == ()
    (inputs,) = (line for line in twice.memory.peak_classes if line.name == "layer inputs")
    assert (inputs.layers, inputs.logical_bytes) == (2 * depth, 2 * depth * 128 * 64 * width // devices * 2)
    # Accumulated gradients lie split over all devices as the momentum does, in float32: of both weights, whole and of a part.
    split_bytes = 4 * 2 * depth * width * 4 * width // devices
    gradients = [line for line in twice.memory.peak_classes if line.kind is PeakKind.GRADIENTS and line.shape.startswith("f32")]
    assert sum(line.logical_bytes for line in gradients) == 2 * split_bytes
    assert {line.name for line in gradients} == {"weights['up']", "weights['down']"}
