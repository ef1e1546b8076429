"""`remat-kit compare`: policies of one training step on targets."""

import functools
import os
import sys
from pathlib import Path
from typing import IO

import click

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
    policy_for,
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
from remat_kit.records import Comparison, Status
from remat_kit.report.json import comparison_json
from remat_kit.report.markdown import comparison_markdown
from remat_kit.report.table import write_table
from remat_kit.verbs.compare import compare


@click.command(name="compare")
@click.argument("step")
@click.option("--policy", "policies", multiple=True, metavar="POLICY", help="none, full, save(q,k), a preset, a plan …")
@wrap_option
@click.option("--target", "targets", multiple=True, required=True, metavar="TARGET", help="h100, h100:8, v5e:2x2, cpu …")
@budget_option
@memory_fraction_option
@set_option
@xla_option
@format_option
@report_option
@timeout_option
@no_cache_option
@targets_file_option
@traceback_option
def command(
    step: str,
    policies: tuple[str, ...],
    wraps: tuple[str, ...],
    targets: tuple[str, ...],
    budget: str | None,
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
    """Measure policies of one training step on targets.

    STEP is a step factory, module:function, like models:gpt2_small.
    """
    check_folder(out)
    with errors_as_messages(show_traceback=traceback):
        with show_progress() as advance:
            comparison = compare(
                step,
                policies=[policy_for(policy, step=step, options=pairs("--set", settings)) for policy in policies],
                wraps=[patterns(text) for text in wraps],
                targets=targets,
                options=pairs("--set", settings),
                budget=budget,
                memory_fraction=memory_fraction,
                xla=pairs("--xla", xla),
                targets_file=targets_file,
                cache_dir=os.devnull if no_cache else None,
                timeout_s=timeout_s,
                progress=advance,
            )
        write_report(out, functools.partial(_write, comparison, form))
    if any(row.status is Status.FAILED for row in comparison.rows):
        sys.exit(EXIT_FAILED_ROW)


def _write(comparison: Comparison, form: str, stream: IO[str]) -> None:
    if form == "table":
        write_table(comparison, console_of(stream))
    else:
        stream.write(comparison_json(comparison) if form == "json" else comparison_markdown(comparison))
