"""Finds and reads the dump of one compile: HLO, buffer assignment and live ranges.

In: the folder that `xla_dump_to` named, private to the compile, with `xla_dump_hlo_as_text`. Out: `Dump`. The same three files
are written on CPU, GPU and TPU, on TPU also for a program that is then refused.
"""

from dataclasses import dataclass
from pathlib import Path

from remat_kit.analysis.assignment import Allocation, LiveRanges, read_assignment, read_live_ranges
from remat_kit.analysis.hlo import HloModule
from remat_kit.analysis.hlo_reader import read_module
from remat_kit.errors import DumpError

_ASSIGNMENT = "after_optimizations-buffer-assignment.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """What one compile wrote down.

    Attributes:
        module: The optimized, scheduled program.
        allocations: Its buffer assignment.
        live: Its schedule and live ranges.
    """

    module: HloModule
    allocations: tuple[Allocation, ...]
    live: LiveRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpTexts:
    """The three texts of a dump, as they are kept.

    Attributes:
        hlo: The optimized, scheduled program.
        assignment: Its buffer assignment.
        live_ranges: Its schedule and live ranges.
    """

    hlo: str
    assignment: str
    live_ranges: str


def find_buffer_assignment(folder: Path) -> Path | None:
    """The buffer assignment in a compile's dump folder; the largest file, should the compiler have split off side programs."""
    return max(folder.glob(f"*{_ASSIGNMENT}"), key=lambda path: path.stat().st_size, default=None)


def read_dump(folder: Path) -> Dump:
    """Reads the dump of one compile; see `read_texts`."""
    return parse_dump(read_texts(folder))


def read_texts(folder: Path) -> DumpTexts:
    """Reads the files of the dump of one compile.

    Args:
        folder: Where the compiler wrote it. Of several programs the largest is the step.

    Returns:
        Their texts.

    Raises:
        DumpError: A file is missing.
    """
    assignment = find_buffer_assignment(folder)
    if assignment is None:
        raise DumpError(f"{folder} has no *{_ASSIGNMENT}: compile with xla_dump_to={folder} and xla_dump_hlo_as_text=True.")
    stem = assignment.name.removesuffix("-buffer-assignment.txt")
    return DumpTexts(
        hlo=_read(folder / f"{stem}.txt"), assignment=_read(assignment), live_ranges=_read(folder / f"{stem}-live-range.txt")
    )


def parse_dump(texts: DumpTexts) -> Dump:
    """Reads the three texts of a dump."""
    return Dump(
        module=read_module(texts.hlo),
        allocations=read_assignment(texts.assignment),
        live=read_live_ranges(texts.live_ranges),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise DumpError(f"{path} is missing: the compiler did not finish its dump.") from error
