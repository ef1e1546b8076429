"""An explanation in short: the headline, the peak in a dozen lines, collectives added up, the timeline in a row of columns.

In: `Explanation`. Out: a few records and sentences that every format of the report shows. Whole lists are in the JSON.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from remat_kit.explanation import Explanation
from remat_kit.memory import Collective, CollectiveMeaning, MemoryReport, PeakClass, PeakKind, StepPhase
from remat_kit.units import format_bytes, format_scaled

_TOGETHER = (
    PeakKind.PARAMETERS,
    PeakKind.OPTIMIZER_STATE,
    PeakKind.BATCH,
    PeakKind.OTHER_ARGUMENTS,
    PeakKind.OUTPUTS,
    PeakKind.GRADIENTS,
    PeakKind.WEIGHT_COPIES,
    PeakKind.UPDATES,
    PeakKind.COLLECTIVES,
    PeakKind.PADDING,
    PeakKind.OTHER,
)
_SMALL = 0.01
_MOST_LINES = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSum:
    """Collectives of one meaning, operation and phase.

    Attributes:
        meaning: What they are for.
        opcode: The operation that the compiler chose.
        phase: Where they run.
        is_async: Whether they were split into start and done.
        count: Operands that they move in a step.
        payload_bytes: Of all of them.
        wire_bytes: That a device sends over links for all of them.
    """

    meaning: CollectiveMeaning
    opcode: str
    phase: StepPhase
    is_async: bool
    count: int
    payload_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortPeak:
    """The peak in a dozen lines.

    Attributes:
        lines: Largest first.
        num_smaller: Lines that are left out.
        smaller_bytes: Of those.
        smaller_kinds: What those hold.
    """

    lines: tuple[PeakClass, ...]
    num_smaller: int
    smaller_bytes: int
    smaller_kinds: tuple[PeakKind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A part of the schedule.

    Attributes:
        live_bytes: The most that lives in it.
        phase: Of the point with the most.
        is_peak: Whether the peak is in it.
    """

    live_bytes: int
    phase: StepPhase
    is_peak: bool


def headline(explanation: Explanation) -> str:
    """Whether the step fits and what fills its peak, in a sentence or two."""
    memory, limit = explanation.memory, explanation.row.budget_bytes
    needs = format_bytes(memory.peak_bytes)
    if limit is None:
        fits = f"Needs {needs} per device ({explanation.target} has no budget)."
    elif memory.peak_bytes > limit:
        over = format_bytes(memory.peak_bytes - limit)
        fits = f"Does not fit: needs {needs} of {format_bytes(limit)} per device, {over} too much."
    else:
        fits = f"Fits: needs {needs} of {format_bytes(limit)} per device."
    return f"{fits} {_what_fills(memory)}"


def _what_fills(memory: MemoryReport) -> str:
    sums = bytes_by_kind(memory.peak_classes)
    if not sums:
        return "It holds nothing."
    kind, num_bytes = max(sums.items(), key=lambda pair: pair[1])
    sentence = f"The peak is in the {memory.peak_phase} pass; {num_bytes / memory.peak_bytes:.0%} of it: {kind}"
    temps = [line for line in memory.peak_classes if line.kind not in _FIXED]
    if not temps:
        return f"{sentence}."
    largest = max(temps, key=lambda line: line.bytes)
    where = f" ({largest.source})" if largest.source else ""
    layers = f", {largest.layers} layers" if largest.layers > 1 else ""
    return f"{sentence}. Largest temporary: {largest.kind} {largest.name}{where}, {format_bytes(largest.bytes)}{layers}."


_FIXED = (
    PeakKind.PARAMETERS,
    PeakKind.OPTIMIZER_STATE,
    PeakKind.BATCH,
    PeakKind.OTHER_ARGUMENTS,
    PeakKind.OUTPUTS,
)


def work_line(explanation: Explanation) -> str:
    """What the policy costs in matmul work, in a sentence."""
    again, baseline = explanation.row.recompute_flops, explanation.row.baseline_flops
    if again is None or not baseline:
        return "Matmul work"
    return f"Matmul work: the policy adds {again / baseline:.1%} to {format_scaled(baseline, 'FLOP')} per device and step"


def bytes_by_kind(lines: Sequence[PeakClass]) -> dict[PeakKind, int]:
    """Bytes of each kind, in order of appearance."""
    sums: dict[PeakKind, int] = {}
    for line in lines:
        sums[line.kind] = sums.get(line.kind, 0) + line.bytes
    return sums


def short_peak(lines: Sequence[PeakClass]) -> ShortPeak:
    """The peak in a dozen lines: kinds of which names say little as one line each, and the smallest lines left out.

    Args:
        lines: All of them.

    Returns:
        Lines, and what they leave out; both sum to the peak.
    """
    groups = {kind: [line for line in lines if line.kind is kind] for kind in _TOGETHER}
    merged = [_merged(kind, group) for kind, group in groups.items() if group]
    merged += [line for line in lines if line.kind not in _TOGETHER]
    merged.sort(key=lambda line: -line.bytes)
    total = sum(line.bytes for line in lines)
    kept = tuple(line for line in merged[:_MOST_LINES] if line.bytes >= _SMALL * total)
    rest = merged[len(kept) :]
    return ShortPeak(
        lines=kept,
        num_smaller=len(rest),
        smaller_bytes=sum(line.bytes for line in rest),
        smaller_kinds=tuple(dict.fromkeys(line.kind for line in rest)),
    )


def _merged(kind: PeakKind, group: Sequence[PeakClass]) -> PeakClass:
    largest = max(group, key=lambda line: line.bytes)
    if len(group) == 1:
        return largest
    return PeakClass(
        kind=kind,
        name=f"{len(group)}, largest {largest.name}",
        layers=1,
        bytes=sum(line.bytes for line in group),
        logical_bytes=sum(line.logical_bytes for line in group),
        source=largest.source,
        num_buffers=sum(line.num_buffers for line in group),
    )


def sum_collectives(collectives: Sequence[Collective]) -> tuple[CollectiveSum, ...]:
    """Collectives added up by meaning, phase, operation and whether they are asynchronous, in the order of meanings."""
    groups: dict[tuple[CollectiveMeaning, StepPhase, str, bool], list[Collective]] = {}
    for each in collectives:
        groups.setdefault((each.meaning, each.phase, each.opcode, each.is_async), []).append(each)
    order = list(CollectiveMeaning)
    return tuple(
        CollectiveSum(
            meaning=meaning,
            opcode=opcode,
            phase=phase,
            is_async=is_async,
            count=sum(each.count for each in members),
            payload_bytes=sum(each.payload_bytes * each.count for each in members),
            wire_bytes=sum(each.wire_bytes * each.count for each in members),
        )
        for (meaning, phase, opcode, is_async), members in sorted(
            groups.items(), key=lambda group: (order.index(group[0][0]), list(StepPhase).index(group[0][1]))
        )
    )


def columns(memory: MemoryReport, *, width: int) -> tuple[Column, ...]:
    """The timeline in so many columns; each has the most of its part of the schedule.

    Args:
        memory: With its timeline.
        width: Columns at most.

    Returns:
        Columns in schedule order; () without a timeline.
    """
    points = memory.timeline
    width = min(width, memory.schedule_length)
    if not points or width < 1:
        return ()
    found = []
    for number in range(width):
        start, end = (edge * memory.schedule_length // width for edge in (number, number + 1))
        first = max(0, bisect.bisect_right(points, start, key=lambda point: point.point) - 1)
        inside = points[first : max(first + 1, bisect.bisect_left(points, end, key=lambda point: point.point))]
        top = max(inside, key=lambda point: point.live_bytes)
        found.append(Column(live_bytes=top.live_bytes, phase=top.phase, is_peak=start <= memory.peak_point < end))
    return tuple(found)
