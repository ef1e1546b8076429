"""`remat-kit explain`: an X-ray of one compiled step, or what two of them differ in."""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click

from remat_kit.analysis.differences import difference
from remat_kit.cli.common import (
    EXIT_FAILED_ROW,
    budget_option,
    check_folder,
    console_of,
    errors_as_messages,
    format_option,
    memory_fraction_option,
    no_cache_option,
    pairs,
    patterns,
    report_option,
    set_option,
    show_progress,
    targets_file_option,
    timeout_option,
    traceback_option,
    wrap_option,
    write_report,
    xla_option,
)
from remat_kit.explanation import Difference, Explanation
from remat_kit.export import policy_text
from remat_kit.report.explain_json import difference_json, explanation_json
from remat_kit.report.explain_markdown import difference_markdown, explanation_markdown
from remat_kit.report.explain_table import write_difference, write_explanation
from remat_kit.verbs.explain import explain, load_explanation
from remat_kit.verbs.question import MOST_CHECKS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One explanation to be made or read: a saved report, or a step under a policy (or patterns) on a target."""

    step: str
    policy: str = "none"
    wraps: tuple[tuple[str, str], ...] = ()
    target: str = ""

    @property
    def is_saved(self) -> bool:
        return self.step.endswith(".json")


@click.command(name="explain")
@click.argument("steps", nargs=-1, required=True, metavar="STEP|REPORT.json [REPORT.json]")
@click.option("--policy", "policies", multiple=True, metavar="POLICY", help="none, full, save(q,k), …; twice = the difference.")
@wrap_option
@click.option("--target", "targets", multiple=True, metavar="TARGET", help="h100:8, v5e:2x2, …; twice = the difference.")
@budget_option
@memory_fraction_option
@set_option
@xla_option
@click.option("--all", "shows_all", is_flag=True, help="Every line of the peak and every finding.")
@click.option("--fail-over", type=float, metavar="PERCENT", help="With two: exit with 1 when temporaries grow by more than this.")
@format_option
@report_option
@timeout_option
@click.option(
    "--checks",
    type=click.IntRange(min=0),
    default=MOST_CHECKS,
    show_default=True,
    metavar="N",
    help="Remedies that are compiled to see what they bring.",
)
@no_cache_option
@targets_file_option
@traceback_option
def command(
    steps: tuple[str, ...],
    policies: tuple[str, ...],
    wraps: tuple[str, ...],
    targets: tuple[str, ...],
    budget: str | None,
    memory_fraction: str,
    settings: tuple[str, ...],
    xla: tuple[str, ...],
    shows_all: bool,
    fail_over: float | None,
    form: str,
    out: Path | None,
    timeout_s: float | None,
    checks: int,
    no_cache: bool,
    targets_file: str | None,
    traceback: bool,
) -> None:
    """Say where a step's memory goes, what runs again and what to change, from what its target's compiler made of it.

    STEP is a step factory, module:function, like models:gpt2_small. Two policies, two targets or two saved reports: what they
    differ in. A program that the compiler refuses for its size is explained too.
    """
    check_folder(out)
    sides = _sides(steps, policies, wraps, targets)
    if fail_over is not None and len(sides) < 2:
        raise click.BadParameter(
            "there is nothing to compare with: give two policies, targets or reports.", param_hint="--fail-over"
        )
    ask = functools.partial(
        explain,
        options=pairs("--set", settings),
        budget=budget,
        memory_fraction=memory_fraction,
        xla=pairs("--xla", xla),
        targets_file=targets_file,
        cache_dir=os.devnull if no_cache else None,
        timeout_s=timeout_s,
        most_checks=checks if len(sides) == 1 else 0,  # a difference shows no findings
    )
    with errors_as_messages(show_traceback=traceback):
        found = _explain_all(sides, ask)
        changes = difference(*found) if len(found) == 2 else None
        write_report(out, functools.partial(_write, found[0], changes, form, shows_all))
    if changes is not None and fail_over is not None and _grew_over(changes, fail_over):
        sys.exit(EXIT_FAILED_ROW)


def _sides(
    steps: tuple[str, ...], policies: tuple[str, ...], wraps: tuple[str, ...], targets: tuple[str, ...]
) -> tuple[_Side, ...]:
    """One or two explanations: of the reports given, or of the only step under every policy on every target."""
    saved = tuple(_Side(step=step) for step in steps if step.endswith(".json"))
    asked = [_Side(step="", policy=policy_text(policy)) for policy in policies]
    asked += [_Side(step="", wraps=tuple(patterns(text).items())) for text in wraps]
    fresh = tuple(
        _Side(step=step, policy=side.policy, wraps=side.wraps, target=target)
        for step in steps
        if not step.endswith(".json")
        for target in targets
        for side in asked or [_Side(step="")]
    )
    if len(steps) > len(saved) and not targets:
        raise click.BadParameter("give the target to explain the step for, like --target h100.", param_hint="--target")
    sides = (*saved, *fresh)
    if len(sides) > 2:
        raise click.UsageError(f"this asks for {len(sides)} explanations; give one policy and target, or what makes two.")
    return sides


def _explain_all(sides: tuple[_Side, ...], ask: Callable[..., Explanation]) -> list[Explanation]:
    found = []
    with show_progress() as advance:
        for number, side in enumerate(sides):
            if side.is_saved:
                found.append(load_explanation(side.step))
                continue
            words = "; ".join(f"{pattern}={policy}" for pattern, policy in side.wraps) or side.policy
            advance(f"{words} on {side.target}", number, len(sides))
            found.append(ask(side.step, policy=side.policy, wraps=dict(side.wraps), target=side.target))
    return found


def _grew_over(changes: Difference, percent: float) -> bool:
    return changes.temps_grew_by is not None and changes.temps_grew_by > percent / 100


def _write(explanation: Explanation, changes: Difference | None, form: str, shows_all: bool, stream: IO[str]) -> None:
    lines = explanation.memory.peak_classes if shows_all else None
    if changes is not None:
        match form:
            case "table":
                write_difference(changes, console_of(stream))
            case _:
                stream.write(difference_json(changes) if form == "json" else difference_markdown(changes))
    elif form == "table":
        write_explanation(explanation, console_of(stream), lines=lines)
    else:
        stream.write(explanation_json(explanation) if form == "json" else explanation_markdown(explanation, lines=lines))
