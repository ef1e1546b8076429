"""An explanation, and a difference of two, as GitHub-flavoured markdown."""

from collections.abc import Sequence

from remat_kit.analysis.summary import work_line
from remat_kit.explanation import Difference, Explanation
from remat_kit.memory import PeakClass
from remat_kit.report import explain_cells as cells
from remat_kit.report.markdown import markdown_line


def explanation_markdown(explanation: Explanation, *, lines: Sequence[PeakClass] | None = None) -> str:
    """The whole report with a final newline; see `explain_table.write_explanation`."""
    text = [f"### {cells.title(explanation)}", "", f"**{cells.opening(explanation)}**", ""]
    for finding in explanation.findings:
        first, *more = cells.finding_lines(finding)
        text += [f"- **{first}**", *(f"  - {line}" for line in more)]
    text += _table(cells.PEAK_COLUMNS, cells.peak_rows(explanation, everything=None if lines is None else tuple(lines)))
    if explanation.memory.host_classes:
        text += ["", "In host memory:"]
        text += _table(cells.PEAK_COLUMNS, cells.peak_rows(explanation, everything=explanation.memory.host_classes))
    text += ["", f"{work_line(explanation)}:"]
    text += _table(cells.PHASE_COLUMNS, cells.phase_rows(explanation))
    if explanation.work.collectives:
        text += _table(cells.COLLECTIVE_COLUMNS, cells.collective_rows(explanation))
    text += ["", cells.timeline_words(explanation), "", "```", *cells.timeline(explanation), "```", ""]
    text += [cells.floor_line(explanation.floor), "", *(f"- {line}" for line in cells.footnotes(explanation))]
    return "\n".join(text).rstrip() + "\n"


def difference_markdown(difference: Difference) -> str:
    """Totals and changes, with a final newline."""
    text = [f"### {difference.before} → {difference.after}"]
    text += _table(("", "before", "after"), [cells.amount_row(change) for change in difference.amounts])
    text += _table(cells.CHANGE_COLUMNS, cells.change_rows(difference))
    text += ["", *(f"- {what}: {before or 'none'} → {after or 'none'}" for what, before, after in difference.settings)]
    return "\n".join(text).rstrip() + "\n"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    return ["", markdown_line(columns), markdown_line(("---",) * len(columns)), *(markdown_line(row) for row in rows)]
