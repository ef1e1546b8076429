"""An explanation, and a difference of two, as tables for a terminal: what to do first, then why."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit.analysis.summary import work_line
from remat_kit.explanation import Difference, Explanation
from remat_kit.memory import PeakClass
from remat_kit.report import explain_cells as cells

_RIGHT = (
    "layers",
    "bytes",
    "of peak",
    "traced",
    "compiled",
    "kernels",
    "traffic",
    "count",
    "payload",
    "on the wire",
    "before",
    "after",
)
_MOST_FINDINGS = 3


def write_explanation(explanation: Explanation, console: Console, *, lines: Sequence[PeakClass] | None = None) -> None:
    """Writes the headline, findings, the peak, work by phase, collectives, the timeline and notes.

    Args:
        explanation: What to write.
        console: Where to.
        lines: Lines of the peak to be written; None = the dozen largest, and the most valuable findings only.
    """
    console.print(Text(cells.title(explanation), style="bold"))
    console.print(Text(cells.opening(explanation), style="bold red" if explanation.row.fits is False else "bold green"))
    _write_findings(explanation, console, most=_MOST_FINDINGS if lines is None else len(explanation.findings))
    rows = cells.peak_rows(explanation, everything=None if lines is None else tuple(lines))
    console.print(_table("At the peak", cells.PEAK_COLUMNS, rows))
    if explanation.memory.host_classes:
        host = cells.peak_rows(explanation, everything=explanation.memory.host_classes)
        console.print(_table("In host memory", cells.PEAK_COLUMNS, host))
    console.print(_table(work_line(explanation), cells.PHASE_COLUMNS, cells.phase_rows(explanation)))
    if explanation.work.collectives:
        console.print(_table("", cells.COLLECTIVE_COLUMNS, cells.collective_rows(explanation)))
    console.print(Text(cells.timeline_words(explanation), style="bold"))
    for line in cells.timeline(explanation):
        console.print(Text(line), no_wrap=True)
    console.print(Text(cells.floor_line(explanation.floor)))
    for line in cells.footnotes(explanation):
        console.print(Text(f"- {line}", style="dim"))


def _write_findings(explanation: Explanation, console: Console, *, most: int) -> None:
    for finding in explanation.findings[:most]:
        first, *more = cells.finding_lines(finding)
        console.print(Text(f"! {first}", style="bold yellow"))
        for line in more:
            console.print(Text(f"  -> {line}"))
    left = len(explanation.findings) - most
    if left > 0:
        console.print(Text(f"  {left} more with --all.", style="dim"))


def write_difference(difference: Difference, console: Console) -> None:
    """Writes totals and what appeared, grew, shrank and vanished at the peak."""
    console.print(Text(f"{difference.before}  ->  {difference.after}", style="bold"))
    amounts = [cells.amount_row(change) for change in difference.amounts]
    console.print(_table("Totals", ("", "before", "after"), amounts))
    console.print(_table("At the peak", cells.CHANGE_COLUMNS, cells.change_rows(difference)))
    for what, before, after in difference.settings:
        console.print(Text(f"- {what}: {before or 'none'} -> {after or 'none'}", style="dim"))


def _table(name: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=name or None, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT else "left", overflow="fold")
    for row in rows or [("nothing", *([""] * (len(columns) - 1)))]:
        table.add_row(*(Text(cell) for cell in row))
    return table
