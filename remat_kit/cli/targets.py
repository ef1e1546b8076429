"""`remat-kit targets`: the targets, and which can be compiled for here."""

import sys

import click

from remat_kit.cli.common import console_of, errors_as_messages, targets_file_option, traceback_option
from remat_kit.report.targets import write_targets
from remat_kit.targets import availability, load_rows


@click.command(name="targets")
@targets_file_option
@traceback_option
def command(targets_file: str | None, traceback: bool) -> None:
    """List the targets and whether they can be compiled for here."""
    with errors_as_messages(show_traceback=traceback):
        rows = load_rows(targets_file)
        write_targets([(row, availability(row.platform)) for row in rows.values()], console_of(sys.stdout))
