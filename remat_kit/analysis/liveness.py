"""Which buffers live when, and when most bytes do.

In: `Dump`. Out: `Buffer` records, the peak of a memory space and the timeline. The peak is the schedule point with the largest
union of (offset, size) over the values that live there, in the space's arena: values that share memory count once. Loops are
flat in the schedule: their body stands once, before them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from remat_kit.analysis.assignment import DEVICE_COLOR, HOST_COLOR, Allocation, AssignedValue, bytes_of_color
from remat_kit.analysis.dataflow import Dataflow, instruction_of
from remat_kit.analysis.dump import Dump
from remat_kit.analysis.hlo import source_of
from remat_kit.analysis.phases import phase_of
from remat_kit.analysis.shapes import arrays_of
from remat_kit.memory import Buffer, BufferKind, Space, SpaceTotals, StepPhase, TimelinePoint

_COLORS = {Space.DEVICE: DEVICE_COLOR, Space.HOST: HOST_COLOR}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValue:
    """A value of an arena, with its place and its life.

    Attributes:
        value: The value.
        offset_bytes: From the start of the space's arenas, laid end to end.
        start: First schedule point.
        end: Last one.
    """

    value: AssignedValue
    offset_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """All temporaries of a memory space.

    Attributes:
        size_bytes: Of its allocations.
        values: Every value in it.
        covered_bytes: Union of living values at each schedule point.
        peak_point: The first point with the most.
        peak_instruction: What runs there.
    """

    size_bytes: int
    values: tuple[LiveValue, ...]
    covered_bytes: tuple[int, ...]
    peak_point: int
    peak_instruction: str

    @property
    def live_bytes(self) -> int:
        """Union of living values at the peak."""
        return self.covered_bytes[self.peak_point] if self.covered_bytes else 0


def space_of(color: int) -> Space:
    """The memory space of a color of the dump."""
    return {DEVICE_COLOR: Space.DEVICE, HOST_COLOR: Space.HOST}.get(color, Space.ON_CHIP)


def arena_of(dump: Dump, space: Space) -> Arena:
    """Reads the arena of a memory space.

    Args:
        dump: The dump.
        space: Device or host.

    Returns:
        The arena; empty when the space has none.
    """
    allocations = [each for each in dump.allocations if each.is_temp and each.color == _COLORS[space]]
    values = tuple(_live_values(dump, allocations))
    covered = covered_bytes(values, num_points=len(dump.live.schedule))
    peak = max(range(len(covered)), key=covered.__getitem__, default=0)
    return Arena(
        size_bytes=sum(each.size_bytes for each in allocations),
        values=values,
        covered_bytes=covered,
        peak_point=peak,
        peak_instruction=dump.live.schedule[peak] if covered else "",
    )


def totals_of(dump: Dump, space: Space, arena: Arena) -> SpaceTotals:
    """Sums the allocations of a memory space as the compiler's own totals do."""
    found = bytes_of_color(dump.allocations, _COLORS[space])
    return SpaceTotals(
        space=space,
        argument_bytes=found.argument_bytes,
        output_bytes=found.output_bytes,
        alias_bytes=found.alias_bytes,
        arena_bytes=found.temp_bytes,
        live_bytes=arena.live_bytes,
    )


def covered_bytes(values: Iterable[LiveValue], *, num_points: int) -> tuple[int, ...]:
    """Union of (offset, size) over the values that live at each point.

    Args:
        values: Values of one arena.
        num_points: Length of the schedule.

    Returns:
        Bytes at each point.
    """
    events: dict[int, list[tuple[int, int, int]]] = {}
    for each in values:
        place = (each.offset_bytes, each.offset_bytes + each.value.size_bytes)
        events.setdefault(each.start, []).append((*place, 1))
        events.setdefault(each.end + 1, []).append((*place, -1))
    edges = np.unique([edge for changes in events.values() for low, high, _ in changes for edge in (low, high)])
    if len(edges) < 2:
        return (0,) * num_points
    widths, counts = np.diff(edges), np.zeros(len(edges) - 1, dtype=np.int32)
    covered: list[int] = []
    for point in range(num_points):
        for low, high, change in events.get(point, ()):
            counts[np.searchsorted(edges, low) : np.searchsorted(edges, high)] += change
        covered.append(int(widths[counts > 0].sum()) if point in events else (covered[-1] if covered else 0))
    return tuple(covered)


def buffers_of(dump: Dump, flow: Dataflow) -> tuple[Buffer, ...]:
    """Every value of every allocation, thread-local ones left out.

    Args:
        dump: The dump.
        flow: Indices of its module.

    Returns:
        Buffers in the dump's order.
    """
    return tuple(
        _buffer(dump, flow, allocation, value)
        for allocation in dump.allocations
        if not allocation.is_thread_local
        for value in allocation.values
    )


def timeline_of(
    dump: Dump, flow: Dataflow, arena: Arena, phases: Sequence[StepPhase], *, fixed_bytes: int
) -> tuple[TimelinePoint, ...]:
    """Memory over the schedule, at the points where it changes.

    Args:
        dump: The dump.
        flow: Indices of its module.
        arena: Of device memory.
        phases: Of each schedule point.
        fixed_bytes: Arguments and outputs.

    Returns:
        Points in schedule order.
    """
    points: list[TimelinePoint] = []
    before = -1
    for point, covered in enumerate(arena.covered_bytes):
        if covered != before:
            name = dump.live.schedule[point]
            points.append(
                TimelinePoint(
                    point=point,
                    instruction=name,
                    live_bytes=fixed_bytes + covered,
                    phase=phases[point],
                    loop=flow.loops.get(flow.where.get(name, ""), ""),
                )
            )
        before = covered
    return tuple(points)


def schedule_phases(dump: Dump, flow: Dataflow) -> tuple[StepPhase, ...]:
    """Phase of each schedule point.

    An instruction that the compiler left without a name has that of the loop around it, else of what ran before it (of what
    comes next, at the very beginning).
    """
    known = [_phase_at(flow, name) for name in dump.live.schedule]
    last = next((phase for phase in known if phase is not None), StepPhase.UPDATE)
    phases: list[StepPhase] = []
    for phase in known:
        last = phase or last
        phases.append(last)
    return tuple(phases)


def _phase_at(flow: Dataflow, name: str) -> StepPhase | None:
    instruction = instruction_of(flow, name)
    while instruction is not None and instruction.opcode not in ("parameter", "constant", "get-tuple-element", "tuple"):
        if instruction.op_name:
            return phase_of(instruction.op_name)
        instruction = instruction_of(flow, flow.loops.get(flow.where[instruction.name], ""))
    return None


def _live_values(dump: Dump, allocations: Iterable[Allocation]) -> Iterator[LiveValue]:
    last = len(dump.live.schedule) - 1
    base = 0
    for allocation in allocations:
        for value in allocation.values:
            start, end = dump.live.ranges.get(value.key, (0, last))
            yield LiveValue(value=value, offset_bytes=base + value.offset_bytes, start=start, end=end)
        base += allocation.size_bytes


def _buffer(dump: Dump, flow: Dataflow, allocation: Allocation, value: AssignedValue) -> Buffer:
    name, index = value.key
    instruction = instruction_of(flow, name)
    start, end = dump.live.ranges.get(value.key, (None, None)) if allocation.is_temp else (None, None)
    return Buffer(
        name=f"{name}{{{index}}}" if index else name,
        instruction=name,
        shape=value.shape,
        space=space_of(allocation.color),
        kind=_kind(allocation),
        allocation=allocation.number,
        offset_bytes=value.offset_bytes,
        size_bytes=value.size_bytes,
        logical_bytes=logical_bytes(value),
        start=start,
        end=end,
        op_name=instruction.op_name if instruction else "",
        source=source_of(dump.module, instruction.frame) if instruction else "",
    )


def logical_bytes(value: AssignedValue) -> int:
    """Bytes without padding; a tuple's own buffer is a table of pointers, not its elements."""
    if value.shape.startswith("("):
        return value.size_bytes
    return min(value.size_bytes, sum(array.num_bytes for array in arrays_of(value.shape)))


def _kind(allocation: Allocation) -> BufferKind:
    if allocation.parameter is not None:
        return BufferKind.DONATED if allocation.is_live_out else BufferKind.PARAMETER
    if allocation.is_live_out:
        return BufferKind.OUTPUT
    return BufferKind.CONSTANT if allocation.is_constant else BufferKind.TEMP
