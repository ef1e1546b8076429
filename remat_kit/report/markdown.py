"""A comparison as GitHub-flavoured markdown."""

from remat_kit.records import Comparison
from remat_kit.report.cells import COLUMNS, cells, footnotes, verdicts


def comparison_markdown(comparison: Comparison) -> str:
    """The table, what to do, and the footnotes, with a final newline."""
    options = " ".join(f"{name}={value}" for name, value in comparison.options)
    lines = [
        f"### {comparison.step} {options}".rstrip(),
        "",
        markdown_line(COLUMNS),
        markdown_line(("---",) * len(COLUMNS)),
    ]
    lines += [markdown_line(cells(row)) for row in comparison.rows]
    lines += ["", *(f"**{verdict}**  " for verdict in verdicts(comparison)), ""]
    lines += [f"- {line}" for line in footnotes(comparison)]
    return "\n".join(lines).rstrip() + "\n"


def markdown_line(texts: tuple[str, ...]) -> str:
    """A line of a table."""
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"
