"""What a planning report says, in order: headlines, tables, lines. Two writers show it, one for terminals, one for markdown."""

from collections.abc import Iterable
from dataclasses import dataclass

from remat_kit.planning import LargestStep, PlanCurve, PlanTable, StepPlan
from remat_kit.report.plan_cells import (
    CURVE_COLUMNS,
    DECISION_COLUMNS,
    TARGET_COLUMNS,
    curve_cells,
    decision_cells,
    largest_sentence,
    log_line,
    notes_of,
    part_lines,
    proof_lines,
    target_cells,
    title_of,
    tried_lines,
    way_line,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report: any of a title, a headline, a table and lines.

    Attributes:
        title: What it is about.
        headline: What to take away.
        columns: Of the table; () = no table.
        rows: Of the table.
        lines: Below.
    """

    title: str = ""
    headline: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


def plan_sections(plan: StepPlan) -> list[Section]:
    """A plan for one target: the plan, the sentence, the decisions, the proof; what does not fit says why first."""
    result = plan.result
    num_stacks = len({decision.stack for decision in result.decisions})
    rows = tuple(decision_cells(decision, num_stacks=num_stacks) for decision in result.decisions)
    ways = tuple(way_line(way) for way in result.ways_out)
    sections = [
        Section(title=title_of(plan.step, plan.options, plan.target), headline=result.plan if result.fits else "nothing fits"),
        Section(headline=result.sentence, lines=proof_lines(plan)),
        Section(title="Names in a layer", columns=DECISION_COLUMNS, rows=rows),
        Section(title="What fills the memory", lines=part_lines(plan)),
        Section(title="Compiles", lines=tuple(log_line(entry) for entry in result.log)),
        Section(title="Notes", lines=notes_of(plan)),
    ]
    if not result.fits:
        sections[2:4] = [sections[3], Section(title="Ways out, each compiled under the leanest plan", lines=ways), sections[2]]
    return _told(sections)


def table_sections(table: PlanTable) -> list[Section]:
    """Several targets beside each other."""
    notes = [f"{row.target}: {row.plan.result.sentence}" for row in table.rows if row.plan is not None]
    shared = [note for row in table.rows if row.plan is not None for note in notes_of(row.plan)]
    title = title_of(table.step, table.options)
    rows = tuple(target_cells(row) for row in table.rows)
    lines = tuple(dict.fromkeys((*notes, *shared)))
    return _told([Section(title=title, columns=TARGET_COLUMNS, rows=rows), Section(lines=lines)])


def curve_sections(curve: PlanCurve) -> list[Section]:
    """The best plan at every budget."""
    title = f"Best plans of {title_of(curve.step, curve.options, curve.target)}, by budget"
    return _told(
        [
            Section(title=title, columns=CURVE_COLUMNS, rows=tuple(curve_cells(curve))),
            Section(lines=(f"{curve.compiles} compiles in all", *curve.notes)),
        ]
    )


def largest_sections(largest: LargestStep) -> list[Section]:
    """The largest batch or sequence that fits, then its plan."""
    head = Section(headline=largest_sentence(largest), lines=tried_lines(largest))
    return [head, *([] if largest.plan is None else plan_sections(largest.plan))]


def _told(sections: Iterable[Section]) -> list[Section]:
    """Those that say something."""
    return [section for section in sections if section.headline or section.rows or section.lines]
