"""What a run was: its end, and what was measured against what plan and compiler promised. Numbers to a record, that to text."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from remat_kit.units import format_bytes, format_scaled, format_seconds
from train.plans import Promise
from train.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, ended.

    Attributes:
        step: Steps done.
        steps: Steps asked for.
        was_stopped: Whether a signal ended it.
        plan: Text of its plan.
        loss: Of the last step; None = no step was run.
        held_out_loss: At the end; None = not evaluated.
        floor: Loss of a model that knows nothing of its input; None = unknown.
        floor_name: What that model is.
        step_time_s: Median over the logged stretches but the first; None = too few.
        promised_step_time_s: Of the plan file; None = it doesn't say, or was made for another device.
        units_per_s: Tokens or images in a second; None = too few steps.
        unit: Which.
        utilization: Model-FLOPs utilization; None = the device's peak is unknown.
        recompute_percent: FLOPs computed again, in percent of the step without rematerialization.
        peak_bytes: Measured; None = unknown.
        promised_bytes: Compiled; None = unknown.
        plan_total_bytes: Of the plan file; None = it doesn't say, or was made for another device.
        is_growth: Whether the bytes are the growth of a CPU's process, arguments not included.
        notes: What a reader should know.
    """

    step: int
    steps: int
    was_stopped: bool
    plan: str
    loss: float | None
    held_out_loss: float | None
    floor: float | None
    floor_name: str
    step_time_s: float | None
    promised_step_time_s: float | None
    units_per_s: float | None
    unit: str
    utilization: float | None
    recompute_percent: float
    peak_bytes: int | None
    promised_bytes: int | None
    plan_total_bytes: int | None
    is_growth: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a summary is made of, beside the logged steps.

    Attributes: see `Summary`; `promise` is the plan file's, None unless it was made for this device.
    """

    step: int
    was_stopped: bool
    plan: str
    promise: Promise | None
    held_out_loss: float | None
    floor: float | None
    floor_name: str
    recompute_percent: float
    is_growth: bool
    notes: tuple[str, ...]


def summarise(outcome: Outcome, logged: Sequence[Progress], *, steps: int, unit: str) -> Summary:
    """Adds the logged steps up."""
    steady = list(logged[1:])
    last = logged[-1] if logged else None
    times = [progress.step_time_s for progress in steady]
    rates = [progress.units_per_s for progress in steady]
    shares = [progress.utilization for progress in steady if progress.utilization is not None]
    promise = outcome.promise
    return Summary(
        step=outcome.step,
        steps=steps,
        was_stopped=outcome.was_stopped,
        plan=outcome.plan,
        loss=None if last is None else last.loss,
        held_out_loss=outcome.held_out_loss,
        floor=outcome.floor,
        floor_name=outcome.floor_name,
        step_time_s=statistics.median(times) if times else None,
        promised_step_time_s=None if promise is None else promise.step_time_s,
        units_per_s=statistics.median(rates) if rates else None,
        unit=unit,
        utilization=statistics.median(shares) if shares else None,
        recompute_percent=outcome.recompute_percent,
        peak_bytes=None if last is None else last.peak_bytes,
        promised_bytes=None if last is None else last.promised_bytes,
        plan_total_bytes=None if promise is None else promise.total_bytes,
        is_growth=outcome.is_growth,
        notes=outcome.notes,
    )


def summary_text(summary: Summary) -> str:
    """The summary for people: a line for each thing that is known."""
    lines = [
        ("steps", f"{summary.step} of {summary.steps}{', stopped by a signal' if summary.was_stopped else ''}"),
        ("plan", f"{summary.plan}, {summary.recompute_percent:.1f} % of the FLOPs computed again"),
        ("loss", _loss(summary)),
        ("step time", _time(summary)),
        ("speed", _speed(summary)),
        ("memory", _memory(summary)),
        *(("note", note) for note in summary.notes),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in lines if text)


def _loss(summary: Summary) -> str:
    parts = []
    if summary.loss is not None:
        parts.append(f"{summary.loss:.4f} at the last step")
    if summary.held_out_loss is not None:
        parts.append(f"{summary.held_out_loss:.4f} held out")
    if summary.floor is not None:
        parts.append(f"a {summary.floor_name} has {summary.floor:.4f}")
    return ", ".join(parts)


def _time(summary: Summary) -> str:
    if summary.step_time_s is None:
        return ""
    measured = f"{format_seconds(summary.step_time_s)} measured"
    if summary.promised_step_time_s is None:
        return measured
    promised = summary.promised_step_time_s
    return f"{measured}, {format_seconds(promised)} promised by the plan{_ratio(summary.step_time_s, promised)}"


def _speed(summary: Summary) -> str:
    if summary.units_per_s is None:
        return ""
    rate = format_scaled(summary.units_per_s, f"{summary.unit}/s")
    return rate if summary.utilization is None else f"{rate}, {100 * summary.utilization:.1f} % model-FLOPs utilization"


def _memory(summary: Summary) -> str:
    if summary.peak_bytes is None or summary.promised_bytes is None:
        return ""
    what = "growth of the process" if summary.is_growth else "peak of a device"
    parts = [
        f"{format_bytes(summary.peak_bytes)} {what}",
        f"{format_bytes(summary.promised_bytes)} compiled{_ratio(summary.peak_bytes, summary.promised_bytes)}",
    ]
    if summary.plan_total_bytes is not None:
        parts.append(f"{format_bytes(summary.plan_total_bytes)} promised by the plan")
    return ", ".join(parts)


def _ratio(measured: float, promised: float) -> str:
    return f" ({measured / promised:.2f} x)" if promised else ""
