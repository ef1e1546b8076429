"""`remat-kit plan`: the plan that costs least and fits, on one target or several; the whole curve; the largest step that fits."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

from remat_kit.cli.common import (
    EXIT_FAILED_ROW,
    EXIT_NOTHING_FITS,
    budget_option,
    check_folder,
    console_of,
    errors_as_messages,
    format_option,
    memory_fraction_option,
    no_cache_option,
    pairs,
    set_option,
    show_progress,
    targets_file_option,
    timeout_option,
    traceback_option,
    xla_option,
)
from remat_kit.plan_file import check_suffix, write_plan
from remat_kit.planning import MAXIMIZED_KNOBS, LargestStep, Objective, PlanCurve, PlanTable, StepPlan
from remat_kit.report.plan import curve_json, largest_json, plan_json, sections_markdown, table_json, write_sections
from remat_kit.report.plan_sections import Section, curve_sections, largest_sections, plan_sections, table_sections

if TYPE_CHECKING:
    from remat_kit.verbs.plan.settings import PlanSettings

_Answer: TypeAlias = StepPlan | PlanTable | PlanCurve | LargestStep


@click.command(name="plan")
@click.argument("step")
@click.option("--target", "targets", multiple=True, required=True, metavar="TARGET", help="h100, h100:8, v5e:2x2, cpu …")
@budget_option
@click.option("--wrap", "wraps", multiple=True, metavar="PATTERN", help="Plan for modules by path, in a model that nobody edits.")
@click.option(
    "--objective",
    type=click.Choice([str(each) for each in Objective]),
    help="What is made least of. Default: time, or flops where the target's rates are unknown.",
)
@click.option("--frontier", is_flag=True, help="The best plan at every budget.")
@click.option("--maximize", "knob", type=click.Choice(MAXIMIZED_KNOBS), help="The largest that fits, with its plan.")
@click.option(
    "--offload",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    metavar="PART",
    help="Part of a layer's forward pass during which values may go to host memory.",
)
@memory_fraction_option
@set_option
@xla_option
@format_option
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Plan file to write, .toml or .json.")
@timeout_option
@no_cache_option
@targets_file_option
@traceback_option
def command(
    step: str,
    targets: tuple[str, ...],
    budget: str | None,
    wraps: tuple[str, ...],
    objective: str | None,
    frontier: bool,
    knob: str | None,
    offload: float,
    memory_fraction: str,
    settings: tuple[str, ...],
    xla: tuple[str, ...],
    form: str,
    out: Path | None,
    timeout_s: float | None,
    no_cache: bool,
    targets_file: str | None,
    traceback: bool,
) -> None:
    """Find the fastest plan that fits the memory, proved by the target's compiler.

    STEP is a step factory, module:function, like models:gpt2_small. Several targets give one row each.
    """
    from remat_kit.verbs.plan.settings import PlanSettings  # brings scipy, for which the other commands need not wait

    check_folder(out)
    _check_one_target(targets, frontier=frontier, knob=knob, out=out)
    with errors_as_messages(show_traceback=traceback):
        if out is not None:
            check_suffix(out)
        with show_progress() as advance:
            asked = PlanSettings(
                budget=budget,
                wraps=wraps,
                objective=objective,
                offload=offload,
                options=pairs("--set", settings),
                memory_fraction=memory_fraction,
                xla=pairs("--xla", xla),
                targets_file=targets_file,
                cache_dir=os.devnull if no_cache else None,
                timeout_s=timeout_s,
                progress=advance,
            )
            answer = _ask(step, targets, asked, frontier=frontier, knob=knob)
        _write(answer, form)
        if out is not None:
            _write_file(answer, out)
    sys.exit(_exit_code(answer))


def _check_one_target(targets: tuple[str, ...], *, frontier: bool, knob: str | None, out: Path | None) -> None:
    if frontier and knob is not None:
        raise click.UsageError("give --frontier or --maximize, not both.")
    if frontier and out is not None:
        raise click.UsageError("--frontier gives many plans and --out writes one: plan at one --budget of them.")
    if len(targets) > 1 and (frontier or knob is not None or out is not None):
        raise click.UsageError("--frontier, --maximize and --out are for one --target.")


def _ask(step: str, targets: tuple[str, ...], settings: "PlanSettings", *, frontier: bool, knob: str | None) -> _Answer:
    from remat_kit.verbs.plan.frontier import plan_frontier
    from remat_kit.verbs.plan.largest import plan_largest
    from remat_kit.verbs.plan.planned import plan_target, plan_targets

    if frontier:
        return plan_frontier(step, target=targets[0], settings=settings)
    if knob is not None:
        return plan_largest(step, target=targets[0], knob=knob, settings=settings)
    return (
        plan_target(step, targets[0], settings) if len(targets) == 1 else plan_targets(step, targets=targets, settings=settings)
    )


def _write(answer: _Answer, form: str) -> None:
    if form == "json":
        click.echo(_json(answer), nl=False)
    elif form == "markdown":
        click.echo(sections_markdown(_sections(answer)), nl=False)
    else:
        write_sections(_sections(answer), console_of(sys.stdout))


def _json(answer: _Answer) -> str:
    match answer:
        case StepPlan():
            return plan_json(answer)
        case PlanTable():
            return table_json(answer)
        case PlanCurve():
            return curve_json(answer)
        case LargestStep():
            return largest_json(answer)


def _sections(answer: _Answer) -> list[Section]:
    match answer:
        case StepPlan():
            return plan_sections(answer)
        case PlanTable():
            return table_sections(answer)
        case PlanCurve():
            return curve_sections(answer)
        case LargestStep():
            return largest_sections(answer)


def _plans(answer: _Answer) -> list[StepPlan | None]:
    match answer:
        case StepPlan():
            return [answer]
        case PlanTable():
            return [row.plan for row in answer.rows]
        case PlanCurve():
            return []
        case LargestStep():
            return [answer.plan]


def _write_file(answer: _Answer, out: Path) -> None:
    for plan in _plans(answer):
        if plan is not None and plan.result.fits:
            write_plan(plan, out)
            click.echo(f"wrote {out}", err=True)


def _exit_code(answer: _Answer) -> int:
    """A target that failed is an error, a target where nothing fits is an answer when another one has a plan."""
    if isinstance(answer, PlanTable) and any(row.plan is None for row in answer.rows):
        return EXIT_FAILED_ROW
    plans = _plans(answer)
    return EXIT_NOTHING_FITS if plans and not any(plan is not None and plan.result.fits for plan in plans) else 0
