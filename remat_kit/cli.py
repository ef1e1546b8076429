"""The command line: reads texts, asks a verb, writes a report. Exit codes: 0 measured, 1 a row failed, 2 bad input.

Errors are one message on standard error, without a traceback unless `--traceback` asks for it.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from remat_kit.budget import DEFAULT_MEMORY_FRACTION
from remat_kit.errors import CompileError, RematKitError
from remat_kit.export import export_policy, policy_text
from remat_kit.files import default_mode, write_whole
from remat_kit.records import Comparison, Status
from remat_kit.report.json import comparison_json, residuals_json
from remat_kit.report.markdown import comparison_markdown
from remat_kit.report.policies import write_policies
from remat_kit.report.residuals import write_residuals
from remat_kit.report.table import write_table
from remat_kit.report.targets import write_targets
from remat_kit.targets import availability, load_rows
from remat_kit.verbs.compare import compare as compare_verb
from remat_kit.verbs.residuals import step_residuals

PLAIN_WIDTH = 140
EXIT_FAILED_ROW = 1
EXIT_BAD_INPUT = 2

_targets_file = click.option(
    "--targets-file", type=click.Path(exists=True, dir_okay=False), help="TOML file with your own targets (see docs/targets.md)."
)
_traceback = click.option("--traceback", is_flag=True, help="Show the full traceback of an error.")


_wrap = click.option(
    "--wrap",
    "wraps",
    multiple=True,
    metavar="PATTERN=POLICY",
    help="A policy for modules by path, without editing the model; several patterns with ';'.",
)
_set = click.option("--set", "settings", multiple=True, metavar="OPTION=VALUE", help="Option of the step factory.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="remat-kit")
def main() -> None:
    """Choose, check and apply rematerialization policies, with the target's own compiler and without the target."""


@main.command()
@click.argument("step")
@click.option("--policy", "policies", multiple=True, metavar="POLICY", help="none, full, save(q,k), a preset, a plan …")
@_wrap
@click.option("--target", "targets", multiple=True, required=True, metavar="TARGET", help="h100, h100:8, v5e:2x2, cpu …")
@click.option("--budget", metavar="BYTES|PERCENT", help="Memory per device: 16GiB or 90%. Default: the target's own.")
@click.option(
    "--memory-fraction", metavar="PART", default=str(DEFAULT_MEMORY_FRACTION), show_default=True, help="Of a GPU's memory."
)
@_set
@click.option("--xla", "xla", multiple=True, metavar="NAME=VALUE", help="Compiler option of the real run.")
@click.option("--format", "form", type=click.Choice(["table", "json", "markdown"]), default="table", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write instead of standard output.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Most seconds for a row.")
@click.option("--no-cache", is_flag=True, help="Neither read nor write compiled results.")
@_targets_file
@_traceback
def compare(
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
    _check_folder(out)
    with _errors_as_messages(show_traceback=traceback):
        with _progress() as advance:
            comparison = compare_verb(
                step,
                policies=[policy_text(policy) for policy in policies],
                wraps=[_patterns(text) for text in wraps],
                targets=targets,
                options=_pairs("--set", settings),
                budget=budget,
                memory_fraction=memory_fraction,
                xla=_pairs("--xla", xla),
                targets_file=targets_file,
                cache_dir=os.devnull if no_cache else None,
                timeout_s=timeout_s,
                progress=advance,
            )
        _write(comparison, form, out)
    if any(row.status is Status.FAILED for row in comparison.rows):
        sys.exit(EXIT_FAILED_ROW)


@main.command()
@_targets_file
@_traceback
def targets(targets_file: str | None, traceback: bool) -> None:
    """List the targets and whether they can be compiled for here."""
    with _errors_as_messages(show_traceback=traceback):
        rows = load_rows(targets_file)
        write_targets([(row, availability(row.platform)) for row in rows.values()], _console(sys.stdout))


@main.command()
@click.argument("step")
@click.option("--policy", default="full", show_default=True, metavar="POLICY")
@_wrap
@click.option("--target", default="cpu", show_default=True, metavar="TARGET", help="Whose devices the step is traced for.")
@_set
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@_targets_file
@_traceback
def residuals(
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
    with _errors_as_messages(show_traceback=traceback):
        report = step_residuals(
            step,
            policy="none" if wraps else policy_text(policy),
            wraps={pattern: found for text in wraps for pattern, found in _patterns(text).items()},
            target=target,
            options=_pairs("--set", settings),
            targets_file=targets_file,
        )
        if form == "json":
            click.echo(residuals_json(report), nl=False)
        else:
            write_residuals(report, _console(sys.stdout))


@main.command()
@click.argument("policy", required=False)
@click.option("--as", "dialect", type=click.Choice(["jax", "maxtext"]), help="Print POLICY as plain JAX or MaxText settings.")
@_traceback
def policies(policy: str | None, dialect: str | None, traceback: bool) -> None:
    """List the words of the policy grammar and the presets with their sources, or export one policy."""
    if policy is not None:
        with _errors_as_messages(show_traceback=traceback):
            click.echo(export_policy(policy_text(policy), dialect or "jax"))
        return
    write_policies(_console(sys.stdout))


@contextlib.contextmanager
def _errors_as_messages(*, show_traceback: bool) -> Iterator[None]:
    try:
        yield
    except RematKitError as error:
        if show_traceback:
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED_ROW if isinstance(error, CompileError) else EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def advance(what: str, index: int, total: int) -> None:
            bar.update(task, description=what, completed=index, total=total)

        yield advance


def _pairs(option: str, texts: tuple[str, ...]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE.", param_hint=option)
        if name in pairs:
            raise click.BadParameter(f"{name} is given twice.", param_hint=option)
        pairs[name] = value
    return pairs


def _console(stream: IO[str]) -> Console:
    """As wide as the terminal; a file or a pipe has room for every column."""
    return Console(file=stream) if stream.isatty() else Console(file=stream, width=PLAIN_WIDTH)


def _patterns(text: str) -> dict[str, str]:
    return _pairs("--wrap", tuple(part.strip() for part in text.split(";")))


def _write(comparison: Comparison, form: str, out: Path | None) -> None:
    stream = sys.stdout if out is None else io.StringIO()
    if form == "table":
        write_table(comparison, _console(stream))
    else:
        stream.write(comparison_json(comparison) if form == "json" else comparison_markdown(comparison))
    if out is not None and isinstance(stream, io.StringIO):
        write_whole(out, stream.getvalue().encode(), mode=default_mode())


def _check_folder(out: Path | None) -> None:
    if out is not None and not os.access(out.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"there is no folder {str(out.parent)!r} to write to.", param_hint="--out")


if __name__ == "__main__":
    main()
