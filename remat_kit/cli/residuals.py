"""`remat-kit residuals`: what a step keeps for its backward pass and what it computes again."""

import sys

import click

from remat_kit.cli.common import (
    console_of,
    errors_as_messages,
    pairs,
    patterns,
    set_option,
    targets_file_option,
    traceback_option,
    wrap_option,
)
from remat_kit.export import policy_text
from remat_kit.report.json import residuals_json
from remat_kit.report.residuals import write_residuals
from remat_kit.verbs.residuals import step_residuals


@click.command(name="residuals")
@click.argument("step")
@click.option("--policy", default="full", show_default=True, metavar="POLICY")
@wrap_option
@click.option("--target", default="cpu", show_default=True, metavar="TARGET", help="Whose devices the step is traced for.")
@set_option
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@targets_file_option
@traceback_option
def command(
    step: str,
    policy: str,
    wraps: tuple[str, ...],
    target: str,
    settings: tuple[str, ...],
    form: str,
    targets_file: str | None,
    traceback: bool,
) -> None:
    """List what a step keeps for its backward pass and what it computes again."""
    with errors_as_messages(show_traceback=traceback):
        report = step_residuals(
            step,
            policy="none" if wraps else policy_text(policy),
            wraps={pattern: found for text in wraps for pattern, found in patterns(text).items()},
            target=target,
            options=pairs("--set", settings),
            targets_file=targets_file,
        )
        if form == "json":
            click.echo(residuals_json(report), nl=False)
        else:
            write_residuals(report, console_of(sys.stdout))
