"""What the memory peak is made of.

In: `Dump`, what the step says of its arguments and what the trace calls its residuals. Out: `PeakClass` lines that sum to the
total: arguments, outputs, and the arena at its peak, every byte once: buffers under the most certain of their names, padding,
and the holes between them, computed from offsets.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from remat_kit.analysis.assignment import Allocation, AssignedValue
from remat_kit.analysis.classify import label_of
from remat_kit.analysis.dump import Dump
from remat_kit.analysis.labels import Evidence, Label, layer_patterns, short_name
from remat_kit.analysis.liveness import Arena, LiveValue, logical_bytes, space_of
from remat_kit.analysis.shapes import arrays_of
from remat_kit.graph import Residual
from remat_kit.memory import PeakClass, PeakKind, Space, StepPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Bytes of the arena at the peak, with their label."""

    label: Label
    num_bytes: int
    logical_bytes: int
    padding_bytes: int
    shape: str


def peak_classes(
    dump: Dump, evidence: Evidence, arena: Arena, phases: Sequence[StepPhase], *, space: Space
) -> tuple[PeakClass, ...]:
    """Splits the memory of a space at its peak.

    Args:
        dump: The dump.
        evidence: What is known of the program.
        arena: Of the space.
        phases: Of each schedule point.
        space: Device or host.

    Returns:
        Lines, largest first; they sum to arguments + outputs - aliases + arena.
    """
    temporaries = _over_layers(list(_merge(_settle(list(_pieces(evidence, arena, phases))))))
    lines = [*_fixed(dump, evidence, space), *temporaries]
    holes = arena.size_bytes - arena.live_bytes
    if holes:
        lines.append(_line(PeakKind.HOLES, "between living buffers", num_bytes=holes))
    return tuple(sorted((line for line in lines if line.bytes), key=lambda line: -line.bytes))


def _line(kind: PeakKind, name: str, *, num_bytes: int) -> PeakClass:
    return PeakClass(kind=kind, name=name, layers=1, bytes=num_bytes, logical_bytes=0, source="")


def _fixed(dump: Dump, evidence: Evidence, space: Space) -> Iterator[PeakClass]:
    """Arguments, and results that lie in no argument."""
    by_number = {argument.number: argument for argument in evidence.arguments}
    padding = 0
    for each in dump.allocations:
        if space_of(each.color) is not space or each.is_thread_local or each.is_temp:
            continue
        argument = by_number.get(each.parameter) if each.parameter is not None else None
        if argument is None and not each.is_live_out:
            continue
        value = _result(each, evidence) if argument is None else next(iter(each.values), None)
        logical = min(each.size_bytes, argument.local.num_bytes if argument else _logical(each, value))
        padding += each.size_bytes - logical
        yield PeakClass(
            kind=argument.kind if argument else PeakKind.OUTPUTS,
            name=argument.path if argument else "results",
            layers=1,
            bytes=logical,
            logical_bytes=logical,
            source="",
            shape=value.shape if value else "",
        )
    if padding:
        yield _line(PeakKind.PADDING, "arguments and results", num_bytes=padding)


def _result(allocation: Allocation, evidence: Evidence) -> AssignedValue | None:
    """The value of an allocation that the program returns: the largest; temporaries may use its place before."""
    module = evidence.flow.module
    entry = module.computations[module.entry]
    returned = (entry.root, *entry.by_name[entry.root].operands)
    return max(allocation.values, key=lambda value: (value.size_bytes, value.key[0] in returned), default=None)


def _logical(allocation: Allocation, value: AssignedValue | None) -> int:
    """Bytes of a result without padding; a table of pointers has none."""
    is_array = value is not None and not value.shape.startswith("(")
    return sum(array.num_bytes for array in arrays_of(value.shape)) if value and is_array else allocation.size_bytes


def _pieces(evidence: Evidence, arena: Arena, phases: Sequence[StepPhase]) -> Iterator[_Piece]:
    """Living buffers of the peak: values of one place are one buffer; of what overlaps partly the larger one has the bytes."""
    places: dict[tuple[int, int], list[LiveValue]] = {}
    for each in arena.values:
        if each.start <= arena.peak_point <= each.end and each.value.size_bytes:
            places.setdefault((each.offset_bytes, each.value.size_bytes), []).append(each)
    taken = _Taken()
    for (offset, size), values in sorted(places.items(), key=lambda place: -place[0][1]):
        new = taken.take(offset, offset + size)
        if not new:
            continue
        labels = [(label_of(evidence, *each.value.key, phases[arena.peak_point]), each) for each in values]
        label, chosen = max(labels, key=lambda pair: pair[0].certainty)
        logical = logical_bytes(chosen.value)
        padding = min(size - logical, new)
        yield _Piece(
            label=label,
            num_bytes=new - padding,
            logical_bytes=label.logical_bytes or logical,
            padding_bytes=padding,
            shape=chosen.value.shape,
        )


def _settle(pieces: list[_Piece]) -> list[_Piece]:
    """Where a stack is dead and a copy of it in another layout lives, the copy is the stack; a residual is one buffer only."""
    alive = {piece.label.stack for piece in pieces if not piece.label.is_copy}
    settled, taken = [], set[Residual]()
    for piece in pieces:
        label = piece.label
        if label.is_copy and label.stack in alive:
            label = replace(label, name=f"{label.name}, copied", logical_bytes=None)
        elif label.is_copy:
            alive.add(label.stack)
        if label.residual is not None and label.residual in taken:
            label = replace(label, name=short_name(label.op_name) or label.residual.kind)
        elif label.residual is not None:
            taken.add(label.residual)
        settled.append(replace(piece, label=label))
    return settled


class _Taken:
    """Intervals of bytes that have been given away, disjoint."""

    def __init__(self) -> None:
        self.intervals: list[tuple[int, int]] = []

    def take(self, low: int, high: int) -> int:
        """Takes what is free between two offsets; gives the bytes that were."""
        touching = [each for each in self.intervals if each[0] < high and low < each[1]]
        gaps = list(_gaps(low, high, touching))
        self.intervals += gaps
        return sum(end - start for start, end in gaps)


def _gaps(low: int, high: int, taken: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, end in sorted(taken):
        if low < start:
            yield low, start
        low = max(low, end)
    if low < high:
        yield low, high


def _merge(pieces: Iterable[_Piece]) -> Iterator[PeakClass]:
    """Adds up equal lines; padding has a line for each name."""
    groups: dict[tuple[PeakKind, str, int, str], list[_Piece]] = {}
    for piece in pieces:
        label = piece.label
        groups.setdefault((label.kind, label.name, label.layers, label.source), []).append(piece)
    for (kind, name, layers, source), members in groups.items():
        yield PeakClass(
            kind=kind,
            name=name,
            layers=layers,
            bytes=sum(piece.num_bytes for piece in members),
            logical_bytes=sum(piece.logical_bytes for piece in members),
            source=source,
            shape=members[0].shape,
            num_buffers=len(members),
        )
        if padding := sum(piece.padding_bytes for piece in members):
            yield _line(PeakKind.PADDING, name, num_bytes=padding)


def _over_layers(lines: list[PeakClass]) -> Iterator[PeakClass]:
    """Adds up what layers that are modules of their own hold alike: one line a name, with a star for the layer's number."""
    patterns = layer_patterns({line.name for line in lines if line.layers == 1})
    groups: dict[tuple[PeakKind, str, str, int, tuple[int, ...]], list[PeakClass]] = {}
    for line in lines:
        dims = arrays_of(line.shape)[0].dims if arrays_of(line.shape) else ()
        key = (line.kind, patterns.get(line.name, line.name), line.source, line.layers, dims)
        groups.setdefault(key, []).append(line)
    for (_, pattern, *_), members in groups.items():
        if len(members) == 1:
            yield members[0]
            continue
        yield replace(
            members[0],
            name=pattern,
            layers=len(members) if members[0].layers == 1 else members[0].layers,
            bytes=sum(line.bytes for line in members),
            logical_bytes=sum(line.logical_bytes for line in members),
            num_buffers=sum(line.num_buffers for line in members),
        )
