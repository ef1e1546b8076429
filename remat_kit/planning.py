"""What planning takes and gives: measurements and their log, decisions by name, the plan with its proof. Plain data.

The planner makes a `PlanResult` of blocks and compiles; `verbs.plan` puts it beside the step and the target it is for
(`StepPlan`), several targets beside each other (`PlanTable`); `report` writes them down.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from remat_kit.policy import Action


class Objective(StrEnum):
    """What a plan makes least of: predicted seconds, or recomputed FLOPs."""

    TIME = "time"
    FLOPS = "flops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step as compiled; per device.

    Attributes:
        total_bytes: The compiler's total of device memory.
        flops: Of the whole step.
        recompute_flops: The part that rematerialization adds.
        host_bytes: Total of host memory.
    """

    total_bytes: int
    flops: int
    recompute_flops: int
    host_bytes: int = 0


class Measure(Protocol):
    """Compiles a step under a plan."""

    def __call__(self, plan: str, depth: int | None, /) -> Measured:
        """Measures.

        Args:
            plan: Text of the plan; its counts add up to the layers of each stack at this depth.
            depth: Layers of every stack that has more; None = the whole step.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """A measurement that was made.

    Attributes:
        plan: Text of the plan.
        depth: Layers per stack; None = the whole step.
        predicted_bytes: What was expected by what had been measured before; None = nothing had.
        total_bytes: What the compiler said.
    """

    plan: str
    depth: int | None
    predicted_bytes: int | None
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a name.

    Attributes:
        stack: Stack that the name is in.
        name: The name.
        num_bytes: Traced bytes per layer and device.
        num_kept: Layers that keep it.
        num_layers: Layers of the stack.
        action: What happens to it in the layers that keep it; recompute when none does.
        is_live_at_peak: Whether keeping it raises the compiled total; None = no measured plan tells.
        recompute_flops: What keeping it spares a layer, or would spare it, given what else the layer keeps.
        recompute_s: The same in seconds; None = the target's rates are not known.
        flip: What would change the decision.
    """

    stack: str
    name: str
    num_bytes: int
    num_kept: int
    num_layers: int
    action: Action
    is_live_at_peak: bool | None
    recompute_flops: int
    recompute_s: float | None
    flip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the total.

    Attributes:
        label: What it is.
        num_bytes: By the model, corrected to add up to the compiled total.
    """

    label: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """Something to change when nothing fits.

    Attributes:
        text: What to change.
        total_bytes: The step's smallest total then, as compiled; None = `error` says why not.
        fits: Whether that is within the budget.
        error: Why it could not be measured.
    """

    text: str
    total_bytes: int | None
    fits: bool
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A plan and its proof, or the smallest plan and why it does not fit. Bytes and FLOPs are per device.

    Attributes:
        plan: Text of the plan.
        fits: Whether its compiled total is within the budget.
        budget_bytes: The budget.
        predicted_total_bytes: Total of this plan by the model as it was before any compile at full depth; None = there was none.
        compiled_total_bytes: The compiler's total.
        missing_bytes: What the budget is short of; 0 when it fits.
        host_bytes: Of host memory, as compiled.
        flops: Of the step.
        recompute_flops: The part that rematerialization adds.
        recompute_s: Predicted seconds of recomputation; None = the target's rates are not known.
        objective: What was made least of.
        full_compiles: Measurements of the whole step.
        compiles: All measurements.
        decisions: One row a name.
        parts: What fills the memory.
        ways_out: What would make it fit, when it does not.
        sentence: The plan in a sentence.
        log: Every measurement, in order.
        notes: What could not be told exactly.
    """

    plan: str
    fits: bool
    budget_bytes: int
    predicted_total_bytes: int | None
    compiled_total_bytes: int
    missing_bytes: int
    host_bytes: int
    flops: int
    recompute_flops: int
    recompute_s: float | None
    objective: Objective
    full_compiles: int
    compiles: int
    decisions: tuple[Decision, ...]
    parts: tuple[Part, ...]
    ways_out: tuple[WayOut, ...] = ()
    sentence: str
    log: tuple[LogEntry, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A plan for a training step on a target. Bytes, FLOPs and tokens are per device.

    Attributes:
        step: The factory, as spelled.
        options: Pairs of option and value, as given.
        target: As spelled.
        wraps: The plan as pairs of module pattern and policy, later ones win; () = it is for the stacks of the step.
        result: The plan and its proof.
        baseline_flops: Of the step without rematerialization.
        step_s: Predicted seconds of a step under the plan, a floor by the roofline; None = the target's rates are not known.
        bound: What bounds it: `compute`, `memory`, `collectives` or `host link`; empty = not known.
        tokens_per_s: By `step_s`; None = not known, or the step has no options for batch and sequence.
        cost_per_million_tokens: In the currency of the target's `price_per_hour`; None = no price, or no tokens.
        num_cached: Compiles that were remembered.
        program: Fingerprint of the step.
        versions: Pairs of component and version.
        notes: What a reader should know.
    """

    step: str
    options: tuple[tuple[str, str], ...]
    target: str
    wraps: tuple[tuple[str, str], ...] = ()
    result: PlanResult
    baseline_flops: int
    step_s: float | None
    bound: str
    tokens_per_s: float | None
    cost_per_million_tokens: float | None
    num_cached: int
    program: str
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A target of several.

    Attributes:
        target: As spelled.
        plan: Its plan; None = `error` says why there is none.
        error: Why there is none.
    """

    target: str
    plan: StepPlan | None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTable:
    """One step on several targets.

    Attributes:
        step: The factory, as spelled.
        options: Pairs of option and value, as given.
        rows: In the order asked for.
    """

    step: str
    options: tuple[tuple[str, str], ...]
    rows: tuple[PlanRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The best plan for a total.

    Attributes:
        plan: Its text.
        predicted_total_bytes: By the planner's model.
        cost: Predicted seconds or FLOPs of recomputation, as the objective says.
        compiled_total_bytes: The compiler's total; None = not compiled.
        recompute_flops: As traced; None = not compiled.
    """

    plan: str
    predicted_total_bytes: int
    cost: float
    compiled_total_bytes: int | None
    recompute_flops: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCurve:
    """The best plan at every budget.

    Attributes:
        step: The factory, as spelled.
        options: Pairs of option and value, as given.
        target: As spelled.
        objective: What `cost` counts.
        points: Least bytes first.
        compiles: Measurements that it took.
        notes: What a reader should know.
    """

    step: str
    options: tuple[tuple[str, str], ...]
    target: str
    objective: Objective
    points: tuple[CurvePoint, ...]
    compiles: int
    notes: tuple[str, ...] = ()


MAXIMIZED_KNOBS = ("batch", "seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestStep:
    """The largest batch or sequence that fits, and its plan.

    Attributes:
        knob: `batch` or `seq`.
        option: What the factory calls it.
        value: The largest that fits; None = not even the smallest one does.
        total_bytes: Smallest total of the step at this value (or at the smallest value, when none fits), as compiled.
        next_value: The next larger one, which does not fit; None = the upper limit fits.
        next_total_bytes: Its smallest total.
        measurements: Pairs of value and smallest total, in the order tried.
        plan: The best plan at `value`; None = nothing fits.
    """

    knob: str
    option: str
    value: int | None
    total_bytes: int
    next_value: int | None
    next_total_bytes: int | None
    measurements: tuple[tuple[int, int], ...]
    plan: StepPlan | None
