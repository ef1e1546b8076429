"""Planning reports written down: for a terminal, as markdown, and as JSON (docs/plan.md describes the fields)."""

from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from remat_kit.planning import LargestStep, PlanCurve, PlanTable, StepPlan
from remat_kit.report.json import json_text
from remat_kit.report.markdown import markdown_line
from remat_kit.report.plan_sections import Section

PLAN_SCHEMA_VERSION = 1


def write_sections(sections: Sequence[Section], console: Console) -> None:
    """Writes a report to a terminal."""
    for section in sections:
        if section.title and not section.columns:
            console.print(Text(section.title, style="bold"))
        if section.headline:
            console.print(Text(section.headline, style="bold green"))
        if section.columns:
            console.print(_table(section))
        for line in section.lines:
            console.print(Text(f"- {line}", style="dim" if section.title == "Notes" else ""))
        console.print()


def sections_markdown(sections: Sequence[Section]) -> str:
    """A report as GitHub-flavoured markdown, with a final newline."""
    lines: list[str] = []
    for section in sections:
        lines += [f"### {section.title}", ""] if section.title else []
        lines += [f"**{section.headline}**", ""] if section.headline else []
        if section.columns:
            lines += [markdown_line(section.columns), markdown_line(("---",) * len(section.columns))]
            lines += [*(markdown_line(row) for row in section.rows), ""]
        lines += [*(f"- {line}" for line in section.lines), ""] if section.lines else []
    return "\n".join(lines).rstrip() + "\n"


def plan_json(plan: StepPlan) -> str:
    """A plan as indented JSON with a final newline."""
    return json_text(_plan(plan))


def table_json(table: PlanTable) -> str:
    """Several targets as indented JSON with a final newline."""
    rows = [{"target": row.target, "error": row.error, "plan": row.plan and _plan(row.plan)} for row in table.rows]
    schema = f"remat-kit/plan-table/{PLAN_SCHEMA_VERSION}"
    return json_text({"schema": schema, "step": table.step, "options": dict(table.options), "rows": rows})


def curve_json(curve: PlanCurve) -> str:
    """A frontier as indented JSON with a final newline."""
    data = {**msgspec.to_builtins(curve), "options": dict(curve.options)}
    return json_text({"schema": f"remat-kit/plan-curve/{PLAN_SCHEMA_VERSION}", **data})


def largest_json(largest: LargestStep) -> str:
    """The largest batch or sequence as indented JSON with a final newline."""
    data = {**msgspec.to_builtins(largest), "plan": largest.plan and _plan(largest.plan)}
    return json_text({"schema": f"remat-kit/plan-largest/{PLAN_SCHEMA_VERSION}", **data})


def _plan(plan: StepPlan) -> dict[str, object]:
    """A plan's result beside what it is for, in one flat object."""
    data = msgspec.to_builtins(plan)
    result = data.pop("result")
    own = {**data, "options": dict(plan.options), "versions": dict(plan.versions), "wraps": dict(plan.wraps)}
    notes = list(dict.fromkeys((*result.pop("notes"), *own.pop("notes"))))
    return {"schema": f"remat-kit/planned/{PLAN_SCHEMA_VERSION}", **result, **own, "notes": notes}


def _table(section: Section) -> Table:
    table = Table(title=section.title or None, box=SIMPLE_HEAD, title_justify="left", title_style="bold")
    for column in section.columns:
        table.add_column(column, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
