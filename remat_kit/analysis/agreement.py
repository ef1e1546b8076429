"""Matmul FLOPs of the traced step and of the compiled program, phase by phase, and why they differ where they do.

In: the step's graph and the `WorkReport` of its compiled program. Out: `PhaseFlops`. Both count matmuls, convolutions and
attention, independently; only kernels that HLO does not show inside (splash attention and other Pallas kernels) have the trace's
price for each call that the compiled program makes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from remat_kit.analysis.phases import phase_of
from remat_kit.explanation import PhaseFlops
from remat_kit.graph import Phase, StepGraph, TracedOp, is_kernel
from remat_kit.memory import CustomCall, StepPhase, WorkReport
from remat_kit.units import format_scaled

TOLERANCE = 0.01
"""Of a phase's FLOPs: a smaller difference is agreement."""

_NEGLIGIBLE = 1e-4
"""Of the step's FLOPs: a smaller difference is nobody's concern, in however small a phase."""

_SHOWN_KERNELS = ("cudnn_attention",)
"""Kernels whose matmuls a compiled program's text tells (see `matmuls`)."""

_OPAQUE_TARGETS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "triton_kernel_call")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """A phase that is counted differently, and what tells why."""

    phase: StepPhase
    flops: int
    unrolled_flops: int
    total_agrees: bool
    num_xla_remat: int
    num_devices: int


def agreement(graph: StepGraph, work: WorkReport) -> tuple[PhaseFlops, ...]:
    """Counts each phase's matmul FLOPs twice.

    Args:
        graph: The traced step.
        work: What its compiled program does.

    Returns:
        One of each phase, per device.
    """
    live = [op for op in graph.ops if op.is_live and op.calls]
    phases = {phase: [op for op in live if traced_phase(op) is phase] for phase in StepPhase}
    counted = [_count(phase, phases[phase], work, graph.num_devices) for phase in StepPhase]
    total = sum(each.trace_flops for each in counted)
    total_agrees = abs(sum(each.hlo_flops - each.trace_flops for each in counted)) <= TOLERANCE * total
    return tuple(
        PhaseFlops(
            phase=each.phase,
            trace_flops=each.trace_flops,
            hlo_flops=each.hlo_flops,
            kernel_flops=each.kernel_flops,
            reasons=tuple(_reasons(each, total, _difference(each, phases[each.phase], work, graph, total_agrees=total_agrees))),
        )
        for each in counted
    )


def traced_phase(op: TracedOp) -> StepPhase:
    """The phase of a traced operation, by the rule of compiled programs: what is not differentiated is the update."""
    if op.phase is not Phase.FORWARD:
        return StepPhase(op.phase.value)
    return StepPhase.UPDATE if phase_of(op.scope) is StepPhase.UPDATE else StepPhase.FORWARD


def _count(phase: StepPhase, ops: Sequence[TracedOp], work: WorkReport, num_devices: int) -> PhaseFlops:
    kernel_flops = _opaque_flops(phase, ops, work.custom_calls) // num_devices
    shown = sum(each.matmul_flops for each in work.phases if each.phase is phase)
    return PhaseFlops(
        phase=phase,
        trace_flops=sum((op.flops or 0) * op.calls for op in ops) // num_devices,
        hlo_flops=shown + kernel_flops,
        kernel_flops=kernel_flops,
    )


def _opaque_flops(phase: StepPhase, ops: Sequence[TracedOp], calls: Sequence[CustomCall]) -> int:
    """FLOPs over all devices of the calls that HLO can't price, by the mean price of the trace's kernels in that phase."""
    kernels = [op for op in ops if is_kernel(op) and op.flops is not None and op.name not in _SHOWN_KERNELS]
    targets = (*_OPAQUE_TARGETS, *(str(op.name) for op in kernels))
    unpriced = (call for call in calls if call.phase is phase and call.flops is None)
    num_calls = sum(call.count for call in unpriced if call.target.startswith(targets))
    num_traced = sum(op.calls for op in kernels)
    return num_calls * sum((op.flops or 0) * op.calls for op in kernels) // num_traced if num_traced else 0


def _difference(
    each: PhaseFlops, ops: Sequence[TracedOp], work: WorkReport, graph: StepGraph, *, total_agrees: bool
) -> _Difference:
    return _Difference(
        phase=each.phase,
        flops=each.hlo_flops - each.trace_flops,
        unrolled_flops=sum(op.flops or 0 for op in ops if op.calls == 1) // graph.num_devices,
        total_agrees=total_agrees,
        num_xla_remat=work.num_xla_remat,
        num_devices=graph.num_devices,
    )


def _reasons(each: PhaseFlops, total: int, found: _Difference) -> Iterator[str]:
    if abs(found.flops) <= max(TOLERANCE * max(each.trace_flops, each.hlo_flops), _NEGLIGIBLE * total):
        return
    amount = format_scaled(abs(found.flops), "FLOP")
    if found.total_agrees:
        yield f"{amount} of the {each.phase} phase stand in another one in the compiled program; the step's total agrees."
    elif found.flops < 0 and each.phase is StepPhase.RECOMPUTE:
        yield _lost_recompute(found, amount)
    elif found.flops < 0:
        yield f"the compiler removed {amount} of the {each.phase} phase: merged, hoisted out of a loop, or no matmul any more."
    elif found.num_xla_remat:
        yield f"XLA's own rematerialization pass added {found.num_xla_remat} instructions; {amount} more run here."
    elif found.num_devices > 1:
        yield f"{amount} more than a device's part: the partitioner has several devices do the same."
    else:
        yield f"the compiled program does {amount} more in this phase, for no reason that its text tells."


def _lost_recompute(found: _Difference, amount: str) -> str:
    if -found.flops <= found.unrolled_flops * (1 + TOLERANCE):
        return (
            f"CSE undid the remat: {amount} of recomputation outside loops were merged with the forward pass. "
            "Outside a loop, wrap with prevent_cse=True, or scan over the layers."
        )
    return f"dead recompute removed: the compiler found {amount} of recomputation that nothing needs."
