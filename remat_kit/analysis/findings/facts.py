"""What findings are made from: the step as it was declared, as it was traced and as it was compiled, in one record.

The verb fills it in, in the worker. Bytes and FLOPs are per device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from remat_kit.analysis.arguments import Argument
from remat_kit.findings import Remedy
from remat_kit.graph import Phase, ResidualReport, StepGraph, TracedOp
from remat_kit.memory import MemoryReport, PeakClass, PeakKind, WorkReport
from remat_kit.records import StepTrace

SMALL_SHARE = 0.01
"""Of the peak, or of the step's FLOPs: less is not worth a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """A run of equal layers, as the step declares it.

    Attributes:
        name: What plans call it.
        num_layers: How many layers.
        accepts_mixed: Whether its layers may follow different policies.
    """

    name: str
    num_layers: int
    accepts_mixed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step under a policy on a target.

    Attributes:
        policy: Text of the plan.
        platform: Of the target: `cpu`, `cuda`, `tpu`.
        budget_bytes: Memory that the step should fit into; None = no budget.
        stacks: Its stacks.
        donate: Positions of the arguments that it donates.
        num_leaves: Arrays in each of its arguments.
        offers: Changes that the step itself proposes to save memory.
        graph: Its traced operations.
        residuals: What the trace keeps and recomputes.
        trace: Totals of the trace.
        baseline: Totals of the same step without rematerialization.
        arguments: Of the compiled program.
        memory: Where the compiled program's memory goes.
        work: What it does.
    """

    policy: str
    platform: str
    budget_bytes: int | None
    stacks: tuple[StackFacts, ...]
    donate: tuple[int, ...]
    num_leaves: tuple[int, ...]
    offers: tuple[Remedy, ...] = ()
    graph: StepGraph
    residuals: ResidualReport
    trace: StepTrace
    baseline: StepTrace
    arguments: tuple[Argument, ...]
    memory: MemoryReport
    work: WorkReport


def makers_of(graph: StepGraph) -> Mapping[int, TracedOp]:
    """Value -> the operation that makes it."""
    return {value: op for op in graph.ops for value in op.outputs}


def live_ops(graph: StepGraph, *phases: Phase) -> Iterator[TracedOp]:
    """Operations that run in some of the phases, in all of them when none is given."""
    return (op for op in graph.ops if op.is_live and op.calls and (not phases or op.phase in phases))


def flops_of(graph: StepGraph, ops: Iterator[TracedOp] | list[TracedOp]) -> int:
    """FLOPs of operations in a step, per device; kernels without a price left out."""
    return sum((op.flops or 0) * op.calls for op in ops) // graph.num_devices


def peak_lines(facts: StepFacts, *kinds: PeakKind) -> list[PeakClass]:
    """Lines of the peak that are of some kinds."""
    return [line for line in facts.memory.peak_classes if line.kind in kinds]


def is_worth_saying(facts: StepFacts, num_bytes: int) -> bool:
    """Whether an amount of memory is more than a hundredth of the peak."""
    return num_bytes >= SMALL_SHARE * facts.memory.peak_bytes
