"""A comparison as GitHub-flavoured markdown."""

from remat_kit.records import Comparison
from remat_kit.report.cells import COLUMNS, cells, footnotes, verdicts


def comparison_markdown(comparison: Comparison) -> str:
    """The table, what to do, and the footnotes, with a final newline."""
    options = " ".join(f"{name}={value}" for name, value in comparison.options)
    lines = [f"### {comparison.step} {options}".rstrip(), "", _line(COLUMNS), _line(("---",) * len(COLUMNS))]
    lines += [_line(cells(row)) for row in comparison.rows]
    lines += ["", *(f"**{verdict}**  " for verdict in verdicts(comparison)), ""]
    lines += [f"- {line}" for line in footnotes(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def _line(texts: tuple[str, ...]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
