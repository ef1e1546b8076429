"""A comparison as a table for a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit.records import CompareRow, Comparison, Status
from remat_kit.report.cells import COLUMNS, cells, footnotes, verdicts

_STYLES = {Status.OVER_BUDGET: "red", Status.FAILED: "bold red", Status.OK: ""}


def write_table(comparison: Comparison, console: Console) -> None:
    """Writes the table, what to do, and the footnotes."""
    options = " ".join(f"{name}={value}" for name, value in comparison.options)
    table = Table(title=f"{comparison.step} {options}".strip(), box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("policy", "target", "fits?") else "right", overflow="fold")
    for number, row in enumerate(comparison.rows):
        last_of_target = number + 1 == len(comparison.rows) or comparison.rows[number + 1].target != row.target
        table.add_row(*(Text(cell) for cell in cells(row)), style=_style(row), end_section=last_of_target)
    console.print(table)
    for verdict in verdicts(comparison):
        console.print(Text(verdict, style="bold"))
    for line in footnotes(comparison):
        console.print(Text(f"- {line}", style="dim"))


def _style(row: CompareRow) -> str:
    return "green" if row.is_best else _STYLES[row.status]
