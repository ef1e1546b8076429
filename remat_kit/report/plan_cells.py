"""The cells and sentences of a plan: what the table and the markdown report both show, as text. Nothing is computed here."""

from remat_kit.planning import Decision, LargestStep, LogEntry, PlanCurve, PlanRow, StepPlan, WayOut
from remat_kit.report.cells import UNAVAILABLE
from remat_kit.units import format_bytes, format_scaled, format_seconds

DECISION_COLUMNS = ("name", "bytes x layers", "live at the peak?", "recompute cost", "decision", "what would flip it")
TARGET_COLUMNS = ("target", "plan", "total", "budget", "step time", "bound by", "tokens/s per device", "cost per 1M tokens")
CURVE_COLUMNS = ("plan", "predicted total", "compiled total", "cost")


def decision_cells(decision: Decision, *, num_stacks: int) -> tuple[str, ...]:
    """A name of a layer."""
    live = {True: "yes", False: "no", None: UNAVAILABLE}[decision.is_live_at_peak]
    is_free = not decision.recompute_flops and decision.recompute_s == 0
    dropped = "not needed" if is_free else "recompute"
    kept = f"{decision.action} in {decision.num_kept} of {decision.num_layers}" if decision.num_kept else dropped
    return (
        decision.name if num_stacks == 1 else f"{decision.stack}: {decision.name}",
        f"{format_bytes(decision.num_bytes)} x {decision.num_layers}",
        live,
        _spared(decision),
        kept,
        decision.flip,
    )


def proof_lines(plan: StepPlan) -> tuple[str, ...]:
    """Prediction against compiled, how many compiles, the predicted time."""
    result = plan.result
    lines = [f"compiled {_exact(result.compiled_total_bytes)} of {_exact(result.budget_bytes)} per device"]
    if result.host_bytes:
        lines.append(f"besides, {_exact(result.host_bytes)} of host memory")
    if result.predicted_total_bytes is None:
        lines.append("nothing was predicted: that takes a depth option, and a stack of at least 6 layers")
    else:
        lines.append(
            f"predicted before any compile at full depth: {_exact(result.predicted_total_bytes)} "
            f"({result.predicted_total_bytes / result.compiled_total_bytes - 1:+.2%})"
        )
    lines.append(
        f"{result.full_compiles} compile{'s' * (result.full_compiles != 1)} of the whole step, {result.compiles} in all"
        + f", {plan.num_cached} of them remembered" * bool(plan.num_cached)
    )
    if plan.step_s is not None:
        lines.append(f"predicted step time at least {format_seconds(plan.step_s)}, bound by {plan.bound}{_rate(plan)}")
    return tuple(lines)


def part_lines(plan: StepPlan) -> tuple[str, ...]:
    """What fills the memory."""
    return tuple(f"{format_bytes(part.num_bytes)}: {part.label}" for part in plan.result.parts)


def way_line(way: WayOut) -> str:
    """A way out, with its compiled number."""
    if way.total_bytes is None:
        return f"not measured: {way.text}: {way.error}"
    return f"{'fits' if way.fits else 'still too large'}: {way.text}: {format_bytes(way.total_bytes)}"


def log_line(entry: LogEntry) -> str:
    """A compile."""
    depth = "whole" if entry.depth is None else f"{entry.depth} layers"
    expected = "" if entry.predicted_bytes is None else f" (expected {format_bytes(entry.predicted_bytes)})"
    return f"{depth}: {entry.plan}: {format_bytes(entry.total_bytes)}{expected}"


def notes_of(plan: StepPlan) -> tuple[str, ...]:
    """Everything that a reader should know."""
    return tuple(dict.fromkeys((*plan.result.notes, *plan.notes)))


def target_cells(row: PlanRow) -> tuple[str, ...]:
    """A target of several."""
    plan = row.plan
    if plan is None:
        return (row.target, f"failed: {row.error}", *([UNAVAILABLE] * (len(TARGET_COLUMNS) - 2)))
    fits = "" if plan.result.fits else f"nothing fits; smallest: {plan.result.plan}"
    return (
        row.target,
        fits or plan.result.plan,
        format_bytes(plan.result.compiled_total_bytes),
        format_bytes(plan.result.budget_bytes),
        UNAVAILABLE if plan.step_s is None else format_seconds(plan.step_s),
        plan.bound or UNAVAILABLE,
        UNAVAILABLE if plan.tokens_per_s is None else f"{plan.tokens_per_s:,.0f}",
        UNAVAILABLE if plan.cost_per_million_tokens is None else f"{plan.cost_per_million_tokens:.3g}",
    )


def curve_cells(curve: PlanCurve) -> list[tuple[str, ...]]:
    """The points of a frontier."""
    return [
        (
            point.plan,
            format_bytes(point.predicted_total_bytes),
            "" if point.compiled_total_bytes is None else format_bytes(point.compiled_total_bytes),
            format_seconds(point.cost) if curve.objective == "time" else format_scaled(point.cost, "FLOP"),
        )
        for point in curve.points
    ]


def largest_sentence(largest: LargestStep) -> str:
    """The largest value, and why not more."""
    if largest.value is None:
        return f"Nothing fits: {largest.option} {largest.measurements[-1][0]} takes {format_bytes(largest.total_bytes)} at least."
    if largest.next_value is None or largest.next_total_bytes is None:
        return f"{largest.option} {largest.value} fits, the most that was tried."
    more = f"{largest.option} {largest.next_value} needs {format_bytes(largest.next_total_bytes)} even under the leanest plan"
    return f"{largest.option} {largest.value} is the largest that fits; {more}."


def tried_lines(largest: LargestStep) -> tuple[str, ...]:
    """What was compiled to find it."""
    return tuple(f"{largest.option} {value}: at least {format_bytes(total)}" for value, total in largest.measurements)


def title_of(step: str, options: tuple[tuple[str, str], ...], target: str = "") -> str:
    """What a report is about."""
    words = [step, *(f"{name}={value}" for name, value in options)]
    return " ".join(words) + (f" on {target}" if target else "")


def _spared(decision: Decision) -> str:
    """What keeping the name spares in a layer."""
    parts = [] if not decision.recompute_flops else [format_scaled(decision.recompute_flops, "FLOP")]
    parts += [] if not decision.recompute_s else [format_seconds(decision.recompute_s)]
    return f"{', '.join(parts)} a layer" if parts else "none"


def _exact(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} ({num_bytes:,} B)"


def _rate(plan: StepPlan) -> str:
    if plan.tokens_per_s is None:
        return ""
    cost = plan.cost_per_million_tokens
    return f", {plan.tokens_per_s:,.0f} tokens/s per device" + ("" if cost is None else f", {cost:.3g} per million tokens")
