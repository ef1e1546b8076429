"""Records of an explained step: everything that `explain` says of one step under one policy on one target, as plain data.

`verbs.explain` puts it together, `report` writes it down, a saved one is read again and held against another; no JAX. Bytes and
FLOPs are per device, times are seconds. A number that could not be had is None, and a note says why.
"""

from dataclasses import dataclass

from remat_kit.findings import Finding
from remat_kit.graph import ResidualReport
from remat_kit.memory import MemoryReport, PeakKind, StepPhase, WorkReport
from remat_kit.records import CompareRow, CompiledStep, StepTrace

EXPLAIN_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFlops:
    """Matmul FLOPs of one phase, counted twice: in the traced step, and in the compiled program.

    Attributes:
        phase: Which.
        trace_flops: Matmuls, convolutions and priced kernels of the traced step.
        hlo_flops: The same of the compiled program; kernels that it does not show inside have the trace's price per call.
        kernel_flops: That part of `hlo_flops`.
        reasons: Why the two differ by more than 1 % of the phase, a line each; () = they agree.
    """

    phase: StepPhase
    trace_flops: int
    hlo_flops: int
    kernel_flops: int
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFloor:
    """A roofline model of the step's time: each resource at its peak, all of them at once. A model, not a measurement.

    Attributes:
        compute_s: Matmul FLOPs at the peak rate; None = the target's peak is unknown.
        memory_s: Bytes that kernels read and write at the memory's rate, no cache in between; None = rate unknown.
        collectives_s: Bytes that collectives send over the links; None = rate unknown.
        host_s: Bytes that cross the host link, out and in; None = rate unknown.
        floor_s: The largest that is known; None = none is.
        bound: Which that is: `compute`, `memory`, `collectives` or `host link`; empty = none.
        notes: What is unknown, and why.
    """

    compute_s: float | None = None
    memory_s: float | None = None
    collectives_s: float | None = None
    host_s: float | None = None
    floor_s: float | None = None
    bound: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One step under one policy on one target, explained.

    Attributes:
        step: The factory, as spelled.
        options: Pairs of option and value, as given.
        flags: Pairs of compiler flag source and value that were in force.
        row: What `compare` says of it; its notes are in `notes`.
        trace: Of the step under the policy.
        baseline: Of the same step without rematerialization.
        compiled: What the compiler said.
        memory: Where the memory goes.
        work: What runs, from the compiled program alone.
        agreement: Matmul FLOPs of the trace and of the compiled program, by phase.
        residuals: What the trace keeps and what it recomputes.
        floor: A model of the step's time.
        findings: What is wrong and what to do, most valuable first.
        analysis_s: Seconds that reading and analysing took.
        notes: What a reader should know.
    """

    step: str
    options: tuple[tuple[str, str], ...]
    flags: tuple[tuple[str, str], ...]
    row: CompareRow
    trace: StepTrace
    baseline: StepTrace
    compiled: CompiledStep
    memory: MemoryReport
    work: WorkReport
    agreement: tuple[PhaseFlops, ...]
    residuals: ResidualReport
    floor: StepFloor
    findings: tuple[Finding, ...] = ()
    analysis_s: float
    notes: tuple[str, ...] = ()

    @property
    def policy(self) -> str:
        """As the user spelled it."""
        return self.row.policy

    @property
    def target(self) -> str:
        """As the user spelled it."""
        return self.row.target

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Pairs of component and version."""
        return self.compiled.versions


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassChange:
    """A line of the peak that two explanations do not share, or not with the same bytes.

    Attributes:
        kind: What the bytes hold.
        name: Which of the kind.
        source: `file:line`; may be empty.
        before_bytes: In the first; 0 = it is not there.
        after_bytes: In the second; 0 = it is not there.
    """

    kind: PeakKind
    name: str
    source: str
    before_bytes: int
    after_bytes: int

    @property
    def added_bytes(self) -> int:
        """How much more the second has."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AmountChange:
    """A number that two explanations differ in.

    Attributes:
        what: Which, with its unit as a suffix: `temp_bytes`, `recompute_flops`.
        before: In the first; None = not available.
        after: In the second.
    """

    what: str
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What two explanations differ in.

    Attributes:
        before: Words for the first.
        after: Words for the second.
        amounts: Totals of both.
        appeared: Lines of the peak that only the second has, largest first.
        vanished: Lines that only the first has.
        grew: Lines of both that are larger in the second, the largest growth first.
        shrank: Lines of both that are smaller.
        settings: What was compiled differently: (what, before, after), such as versions, flags, options.
        temps_grew_by: Growth of the temporaries over those of the first, 0.1 = 10 %; None = the first has none.
    """

    before: str
    after: str
    amounts: tuple[AmountChange, ...]
    appeared: tuple[ClassChange, ...]
    vanished: tuple[ClassChange, ...]
    grew: tuple[ClassChange, ...]
    shrank: tuple[ClassChange, ...]
    settings: tuple[tuple[str, str, str], ...]
    temps_grew_by: float | None
