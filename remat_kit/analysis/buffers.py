"""The compiler's memory totals, read from the buffer assignment that it dumps.

In: the lines of XLA's `…after_optimizations-buffer-assignment.txt`. Out: bytes per memory space, `MemoryBytes`. XLA writes the
file before it decides whether the program fits, so it is there for a refused program too. Every allocation has a memory space
("color"): 0 = device memory (printed without one), 5 = host memory; the others are on-chip and belong to no total, as do
thread-local allocations and constants. Checked on CPU, GPU and TPU against the compilers' own totals (tests/test_compile.py).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from remat_kit.records import MemoryBytes

DEVICE_SPACE = 0
HOST_SPACE = 5  # xla::Layout::kHostMemorySpace

_ALLOCATION = re.compile(r"allocation \d+: size (?P<size>\d+)(?:, color (?P<color>\d+))?(?P<kinds>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTotals:
    """Totals of one program.

    Attributes:
        device: Of device memory.
        host: Of host memory.
    """

    device: MemoryBytes
    host: MemoryBytes


def read_totals(lines: Iterable[str]) -> BufferTotals:
    """Adds up a buffer assignment.

    Args:
        lines: Of the dumped text.

    Returns:
        Totals in bytes.

    Raises:
        ValueError: The text holds no allocation.
    """
    found = [match for line in lines if (match := _ALLOCATION.match(line)) is not None]
    if not found:
        raise ValueError("not a buffer assignment: no line starts with 'allocation'")
    return BufferTotals(device=_totals(found, DEVICE_SPACE), host=_totals(found, HOST_SPACE))


def find_buffer_assignment(folder: Path) -> Path | None:
    """The buffer assignment in a compile's dump folder; the largest file, should the compiler have split off side programs."""
    return max(folder.glob("*after_optimizations-buffer-assignment.txt"), key=lambda path: path.stat().st_size, default=None)


def _totals(allocations: Iterable[re.Match[str]], space: int) -> MemoryBytes:
    argument_bytes = output_bytes = alias_bytes = temp_bytes = 0
    for allocation in allocations:
        if int(allocation["color"] or DEVICE_SPACE) != space:
            continue
        size_bytes, kinds = int(allocation["size"]), allocation["kinds"]
        is_argument, is_output = ", parameter " in kinds, ", maybe-live-out" in kinds
        argument_bytes += size_bytes * is_argument
        output_bytes += size_bytes * is_output
        alias_bytes += size_bytes * (is_argument and is_output)
        temp_bytes += size_bytes * (", preallocated-temp" in kinds)
    return MemoryBytes(argument_bytes=argument_bytes, output_bytes=output_bytes, alias_bytes=alias_bytes, temp_bytes=temp_bytes)
