"""The command line: reads texts, asks a verb, writes a report. One module a command.

Exit codes: 0 measured, 1 a row failed, 2 bad input, 3 nothing fits the budget. Errors are one message on standard error, without
a traceback unless `--traceback` asks for it.
"""

import click

from remat_kit.cli import compare, explain, plan, policies, residuals, targets


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="remat-kit")
def main() -> None:
    """Choose, check and apply rematerialization policies, with the target's own compiler and without the target."""


for _module in (compare, explain, plan, residuals, policies, targets):
    main.add_command(_module.command)
