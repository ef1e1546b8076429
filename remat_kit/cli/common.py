"""What the commands share: options, errors as one message, progress, texts of pairs, where a report goes."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from remat_kit.budget import DEFAULT_MEMORY_FRACTION
from remat_kit.errors import CompileError, PolicyError, RematKitError
from remat_kit.export import policy_text
from remat_kit.files import default_mode, write_whole
from remat_kit.plan_file import SUFFIXES, read_plan, warn_of_step

PLAIN_WIDTH = 140
EXIT_FAILED_ROW = 1
EXIT_BAD_INPUT = 2
EXIT_NOTHING_FITS = 3

targets_file_option = click.option(
    "--targets-file", type=click.Path(exists=True, dir_okay=False), help="TOML file with your own targets (see docs/targets.md)."
)
traceback_option = click.option("--traceback", is_flag=True, help="Show the full traceback of an error.")


wrap_option = click.option(
    "--wrap",
    "wraps",
    multiple=True,
    metavar="PATTERN=POLICY",
    help="A policy for modules by path, without editing the model; several patterns with ';'.",
)
budget_option = click.option(
    "--budget", metavar="BYTES|PERCENT", help="Memory per device: 16GiB or 90%. Default: the target's own."
)
memory_fraction_option = click.option(
    "--memory-fraction", metavar="PART", default=str(DEFAULT_MEMORY_FRACTION), show_default=True, help="Of a GPU's memory."
)
xla_option = click.option("--xla", "xla", multiple=True, metavar="NAME=VALUE", help="Compiler option of the real run.")
format_option = click.option(
    "--format", "form", type=click.Choice(["table", "json", "markdown"]), default="table", show_default=True
)
report_option = click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write instead of standard output."
)
no_cache_option = click.option("--no-cache", is_flag=True, help="Neither read nor write compiled results.")
timeout_option = click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Most seconds for one compile."
)
set_option = click.option("--set", "settings", multiple=True, metavar="OPTION=VALUE", help="Option of the step factory.")


@contextlib.contextmanager
def errors_as_messages(*, show_traceback: bool) -> Iterator[None]:
    """Turns an error of ours into one message and an exit code."""
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
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, else a line on standard error for each thing that is measured."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def advance(what: str, index: int, total: int) -> None:
            bar.update(task, description=what, completed=index, total=total)
            if not console.is_terminal:
                click.echo(f"[{index + 1}/{total}] {what}", err=True)

        yield advance


def pairs(option: str, texts: tuple[str, ...], form: str = "NAME=VALUE") -> dict[str, str]:
    """Reads texts such as NAME=VALUE, each name once."""
    found = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise click.BadParameter(f"{text!r} is not {form}.", param_hint=option)
        if name in found:
            raise click.BadParameter(f"{name} is given twice.", param_hint=option)
        found[name] = value
    return found


def console_of(stream: IO[str]) -> Console:
    """As wide as the terminal; a file or a pipe has room for every column."""
    return Console(file=stream) if stream.isatty() else Console(file=stream, width=PLAIN_WIDTH)


def patterns(text: str) -> dict[str, str]:
    """Reads a `--wrap`: PATTERN=POLICY, several with `;`, or `@FILE`, a plan file."""
    if text.startswith("@"):
        return wraps_of_file(Path(text[1:]))
    return pairs("--wrap", tuple(part.strip() for part in text.split(";")), "PATTERN=POLICY")


def wraps_of_file(path: Path) -> dict[str, str]:
    """Module pattern -> policy of a plan file."""
    found = read_plan(path)
    if not found.wraps:
        raise PolicyError(f"{str(path)!r} is a plan for the stacks of {found.step}, not for modules: give it to --policy @FILE.")
    return dict(found.wraps)


def policy_for(text: str, *, step: str, options: Mapping[str, str]) -> str:
    """The text of a policy, or that in the file that `@FILE` names; a plan file that was made for another step is warned of."""
    if text.startswith("@") and text.endswith(SUFFIXES):
        path = Path(text[1:])
        found = read_plan(path)
        warn_of_step(found, path, step=step, options=options)
        return str(found.stack_plan)
    return policy_text(text)


def check_folder(out: Path | None) -> None:
    """Refuses a file that could not be written, before anything is measured."""
    if out is not None and not os.access(out.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"there is no folder {str(out.parent)!r} to write to.", param_hint="--out")


def write_report(out: Path | None, write: Callable[[IO[str]], None]) -> None:
    """Writes a report to standard output, or whole or not at all to a file."""
    if out is None:
        write(sys.stdout)
        return
    text = io.StringIO()
    write(text)
    write_whole(out, text.getvalue().encode(), mode=default_mode())
