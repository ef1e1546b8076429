"""Golden compiled steps of CPU, GPU and TPU, read again: bytes that sum, names, FLOPs by hand.

Expected numbers come from the sizes of the model and from the compiler's own totals, never from the readers under test.
"""

import functools

import pytest

from remat_kit.analysis.dataflow import index_dataflow
from remat_kit.analysis.liveness import buffers_of
from remat_kit.analysis.report import MAX_RESERVED_BYTES, explain_memory
from remat_kit.analysis.work import count_work
from remat_kit.memory import BufferKind, CollectiveMeaning, MemoryReport, PeakKind, Space, StepPhase, WorkReport
from tests.golden.read import STEPS, read_golden

golden = functools.cache(read_golden)


@functools.cache
def report(name: str) -> MemoryReport:
    step = golden(name)
    peak = step.facts["totals"].get("peak_memory_in_bytes")
    return explain_memory(step.dump, residuals=step.residuals, device=step.totals(), peak_memory_bytes=peak)


@functools.cache
def work(name: str) -> WorkReport:
    return count_work(golden(name).dump.module)


every_step = pytest.mark.parametrize("name", STEPS)
sharded_steps = pytest.mark.parametrize("name", [name for name in STEPS if "_8" in name or "v5p" in name])


def test_all_platforms_are_here():
    assert {name.split("-jax")[0] for name in STEPS} >= {"cpu", "h100", "v5e_1x1"}


@every_step
def test_classes_sum_to_the_peak(name):
    found = report(name)
    assert sum(line.bytes for line in found.peak_classes) == found.peak_bytes
    assert all(line.bytes > 0 for line in found.peak_classes)


@every_step
def test_totals_agree_with_the_compiler(name):
    found, totals = report(name), golden(name).totals()
    assert found.device.argument_bytes == totals.argument_bytes
    assert found.device.output_bytes == totals.output_bytes
    assert found.device.alias_bytes == totals.alias_bytes
    if not found.notes:
        assert found.device.arena_bytes + found.device.reserved_bytes == totals.temp_bytes
        assert found.device.reserved_bytes <= MAX_RESERVED_BYTES


@every_step
def test_peak_is_explained(name):
    found = report(name)
    by_kind = _by_kind(found)
    assert by_kind.get(PeakKind.OTHER, 0) < 0.01 * found.peak_bytes
    assert by_kind.get(PeakKind.HOLES, 0) == found.device.arena_bytes - found.device.live_bytes
    assert found.device.live_bytes > 0.9 * found.device.arena_bytes


@every_step
def test_peak_of_tpu_is_the_compilers_own(name):
    totals = golden(name).facts["totals"]
    if not name.startswith("v"):
        pytest.skip("peak_memory_in_bytes means something else on CPU and GPU")
    found = report(name).device
    ours = found.argument_bytes + found.output_bytes - found.alias_bytes + found.live_bytes
    assert ours == pytest.approx(totals["peak_memory_in_bytes"], abs=1 << 20)


@every_step
def test_arguments_are_split_by_role(name):
    sizes = golden(name).sizes
    n, by_kind = sizes["devices"], _by_kind(report(name))
    matrices = (
        sizes["layers"] * (4 * sizes["model"] ** 2 + 2 * sizes["model"] * sizes["ff"]) + 2 * sizes["vocab"] * sizes["model"]
    )
    weights = 4 * (matrices // n + 2 * sizes["layers"] * sizes["model"])
    assert by_kind[PeakKind.PARAMETERS] == weights
    assert by_kind[PeakKind.OPTIMIZER_STATE] == 2 * weights


@every_step
def test_saved_names_have_their_exact_bytes(name):
    sizes = golden(name).sizes
    tokens = sizes["layers"] * sizes["batch"] * sizes["seq"] // sizes["devices"]
    lines = {line.name: line for line in report(name).peak_classes if line.kind is PeakKind.RESIDUALS}
    for value in golden(name).facts["saved"]:
        width = sizes["ff"] if value == "mlp_up" else sizes["model"]
        assert lines[value].logical_bytes == 2 * tokens * width, value
        assert lines[value].layers == sizes["layers"]
        assert lines[value].source.startswith("tests/golden/make.py:")


@every_step
def test_gradients_are_named(name):
    if report(name).peak_phase is StepPhase.FORWARD:
        pytest.skip("this step peaks at the logits, before the first gradient")
    paths = {line.name for line in report(name).peak_classes if line.kind is PeakKind.GRADIENTS}
    assert {f"state['params']['layers']['{weight}']" for weight in ("up", "down")} <= paths


@every_step
def test_timeline_peaks_where_the_report_says(name):
    found = report(name)
    highest = max(found.timeline, key=lambda point: point.live_bytes)
    assert highest.live_bytes == found.peak_bytes - found.device.reserved_bytes - (
        found.device.arena_bytes - found.device.live_bytes
    )
    assert highest.instruction == found.peak_instruction
    assert found.peak_phase is not StepPhase.UPDATE
    assert {point.phase for point in found.timeline} >= {StepPhase.FORWARD, StepPhase.BACKWARD, StepPhase.RECOMPUTE}


@every_step
def test_buffers_fill_their_allocations(name):
    step = golden(name)
    found = buffers_of(step.dump, index_dataflow(step.dump.module))
    assert all(buffer.logical_bytes <= buffer.size_bytes for buffer in found)
    donated = {
        buffer.allocation: buffer.size_bytes for buffer in found if buffer.kind is BufferKind.DONATED and not buffer.offset_bytes
    }
    assert sum(donated.values()) == step.totals().alias_bytes
    temps = [buffer for buffer in found if buffer.kind is BufferKind.TEMP and buffer.space is Space.DEVICE]
    assert max(buffer.offset_bytes + buffer.size_bytes for buffer in temps) <= report(name).device.arena_bytes
    assert all(buffer.start is not None and buffer.end is not None for buffer in temps)


@every_step
def test_flops_are_those_of_the_model(name):
    sizes = golden(name).sizes
    tokens = sizes["batch"] * sizes["seq"] // sizes["devices"]
    projection, feed_forward = 2 * tokens * sizes["model"] ** 2, 2 * tokens * sizes["model"] * sizes["ff"]
    attention = 2 * tokens * sizes["seq"] * sizes["model"]
    layer = 4 * projection + 2 * attention + 2 * feed_forward
    head = 2 * tokens * sizes["model"] * sizes["vocab"]
    flops = {each.phase: each.matmul_flops for each in work(name).phases}
    assert flops[StepPhase.FORWARD] == pytest.approx(sizes["layers"] * layer + head, rel=0.01)
    assert flops[StepPhase.BACKWARD] == pytest.approx(2 * (sizes["layers"] * layer + head), rel=0.01)
    # Query, key, value and mlp_up are saved: scores, what they weigh and the projection behind are computed again.
    assert flops[StepPhase.RECOMPUTE] == pytest.approx(sizes["layers"] * (2 * attention + projection), rel=0.01)
    assert flops[StepPhase.UPDATE] == 0


@every_step
def test_loops_have_their_trip_counts(name):
    assert [count for _, count in work(name).loops] == [golden(name).sizes["layers"]] * 2


@sharded_steps
def test_weights_are_gathered_in_every_phase(name):
    layers = golden(name).sizes["layers"]
    gathers = [each for each in work(name).collectives if each.meaning is CollectiveMeaning.WEIGHT_GATHER]
    stacked = [each for each in gathers if each.parameter.startswith("state['params']['layers']")]
    forward = {each.parameter for each in stacked if each.phase is StepPhase.FORWARD}
    assert {f"state['params']['layers']['{weight}']" for weight in (*"qkvo", "up", "down")} == forward
    assert all(each.count == layers for each in stacked)
    again = [each for each in stacked if each.phase in (StepPhase.RECOMPUTE, StepPhase.BACKWARD)]
    assert len(again) >= 6
    assert all(each.group_size == golden(name).sizes["devices"] for each in stacked)


@sharded_steps
def test_gradients_are_reduced(name):
    reductions = [each for each in work(name).collectives if each.meaning is CollectiveMeaning.GRADIENT_REDUCTION]
    assert len({each.parameter for each in reductions}) >= 6
    assert all(each.phase in (StepPhase.BACKWARD, StepPhase.UPDATE) for each in reductions)


@pytest.mark.parametrize("name", [name for name in STEPS if name not in ("",) and "_8" not in name and "v5p" not in name])
def test_one_device_has_no_collectives(name):
    assert work(name).collectives == ()


def _by_kind(found: MemoryReport) -> dict[PeakKind, int]:
    kinds = {line.kind for line in found.peak_classes}
    return {kind: sum(line.bytes for line in found.peak_classes if line.kind is kind) for kind in kinds}
