"""Reads what XLA dumps about memory: the buffer assignment and the live ranges.

In: the texts of `…after_optimizations-buffer-assignment.txt` and `…-live-range.txt` of one compile. Out: every allocation with
every value in it (offset and padded size), the flat schedule (bodies of loops before the loop), and each value's first and last
point in it. The dump's "(peak)" block and its cumulative bytes are never read: they are off by 0.7 to 1.9 times.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from remat_kit.errors import DumpError
from remat_kit.records import MemoryBytes

DEVICE_COLOR = 0
HOST_COLOR = 5  # xla::Layout::kHostMemorySpace

ValueKey = tuple[str, str]
"""A value: its defining instruction, and the text of its index in that one's tuple, '' for the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignedValue:
    """A value and where it lies in its allocation.

    Attributes:
        key: Defining instruction and index.
        size_bytes: Padded size.
        offset_bytes: From the start of the allocation.
        shape: Text of its shape.
    """

    key: ValueKey
    size_bytes: int
    offset_bytes: int
    shape: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One allocation.

    Attributes:
        number: In the dump.
        size_bytes: Its size.
        color: Memory space: 0 = device, 5 = host, 1 = on-chip; others are on-chip too.
        parameter: Number of the entry parameter that it holds; None = none.
        is_live_out: Whether results of the program lie in it.
        is_constant: Whether it holds a constant.
        is_thread_local: Whether it belongs to no total.
        is_temp: Whether it is the arena of its space.
        values: Every value in it.
    """

    number: int
    size_bytes: int
    color: int
    parameter: int | None
    is_live_out: bool
    is_constant: bool
    is_thread_local: bool
    is_temp: bool
    values: tuple[AssignedValue, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRanges:
    """When values live.

    Attributes:
        schedule: Names of the instructions, flat: position = schedule point.
        ranges: First and last point of each value, both inclusive.
    """

    schedule: tuple[str, ...]
    ranges: Mapping[ValueKey, tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTotals:
    """Totals of one program, bytes.

    Attributes:
        device: Of device memory.
        host: Of host memory.
        elsewhere_bytes: All allocations that are not in device memory: host and on-chip.
    """

    device: MemoryBytes
    host: MemoryBytes
    elsewhere_bytes: int


_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+), (.*)$")
_VALUE = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})? (?:\(phi\) )?@\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"^\s+([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_POINT = re.compile(r"^\s+(\d+):([\w.\-]+)$")


def read_assignment(text: str) -> tuple[Allocation, ...]:
    """Reads a buffer assignment.

    Args:
        text: The dump.

    Returns:
        Its allocations, in the dump's order.
    """
    allocations: list[Allocation] = []
    header: re.Match[str] | None = None
    values: list[AssignedValue] = []
    for line in text.splitlines():
        if line.startswith(" value:"):
            values += _values(line)
        elif match := _ALLOCATION.match(line):
            if header:
                allocations.append(_allocation(header, values))
            header, values = match, []
        elif header and not line.startswith(" "):
            break
    if header:
        allocations.append(_allocation(header, values))
    return tuple(allocations)


def read_totals(lines: Iterable[str]) -> BufferTotals:
    """Adds up a buffer assignment without reading its values. XLA writes it before it decides whether the program fits.

    Args:
        lines: Of the dump.

    Returns:
        Totals in bytes, as the compiler's own.

    Raises:
        DumpError: The text holds no allocation.
    """
    found = [_allocation(match, []) for line in lines if (match := _ALLOCATION.match(line.rstrip()))]
    if not found:
        raise DumpError("not a buffer assignment: no line starts with 'allocation'.")
    return BufferTotals(
        device=bytes_of_color(found, DEVICE_COLOR),
        host=bytes_of_color(found, HOST_COLOR),
        elsewhere_bytes=elsewhere_bytes(found),
    )


def elsewhere_bytes(allocations: Iterable[Allocation]) -> int:
    """Bytes of the allocations that are not in device memory."""
    return sum(each.size_bytes for each in allocations if each.color != DEVICE_COLOR)


def bytes_of_color(allocations: Iterable[Allocation], color: int) -> MemoryBytes:
    """Sums the allocations of a memory space. Constants and what is local to a thread belong to no total.

    Args:
        allocations: Of one program.
        color: Of the space.

    Returns:
        Its totals.
    """
    argument = output = alias = temp = 0
    for each in allocations:
        if each.color == color and not each.is_thread_local:
            is_argument = each.parameter is not None
            argument += each.size_bytes * is_argument
            output += each.size_bytes * each.is_live_out
            alias += each.size_bytes * (is_argument and each.is_live_out)
            temp += each.size_bytes * each.is_temp
    return MemoryBytes(argument_bytes=argument, output_bytes=output, alias_bytes=alias, temp_bytes=temp)


def read_live_ranges(text: str) -> LiveRanges:
    """Reads schedule and live ranges.

    Args:
        text: The dump.

    Returns:
        Both.
    """
    schedule: list[str] = []
    ranges: dict[ValueKey, tuple[int, int]] = {}
    for line in text.splitlines():
        if match := _RANGE.match(line):
            ranges[match[1], match[2]] = (int(match[3]), int(match[4]))
        elif match := _POINT.match(line):
            schedule.append(match[2])
        elif line.startswith("  Live ranges at"):
            break
    return LiveRanges(schedule=tuple(schedule), ranges=ranges)


def _values(line: str) -> list[AssignedValue]:
    match = _VALUE.match(line)
    if match is None:
        return []
    key = (match[1], match[2] or "")
    return [AssignedValue(key=key, size_bytes=int(match[3]), offset_bytes=int(match[4]), shape=match[5])]


def _allocation(header: re.Match[str], values: list[AssignedValue]) -> Allocation:
    words = header[3]
    color = re.match(r"color (\d+)", words)
    parameter = re.search(r"\bparameter (\d+)", words)
    return Allocation(
        number=int(header[1]),
        size_bytes=int(header[2]),
        color=int(color[1]) if color else DEVICE_COLOR,
        parameter=int(parameter[1]) if parameter else None,
        is_live_out="maybe-live-out" in words or words.startswith("output shape is"),
        is_constant=words.rstrip(":").endswith("constant"),
        is_thread_local="thread-local" in words,
        is_temp="preallocated-temp" in words,
        values=tuple(values),
    )
