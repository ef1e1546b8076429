"""`remat-kit policies`: the words of the grammar, the presets with their sources, and a policy in other dialects."""

import sys

import click

from remat_kit.cli.common import console_of, errors_as_messages, traceback_option
from remat_kit.export import export_policy, policy_text
from remat_kit.report.policies import write_policies


@click.command(name="policies")
@click.argument("policy", required=False)
@click.option("--as", "dialect", type=click.Choice(["jax", "maxtext"]), help="Print POLICY as plain JAX or MaxText settings.")
@traceback_option
def command(policy: str | None, dialect: str | None, traceback: bool) -> None:
    """List the words of the policy grammar and the presets with their sources, or export one policy."""
    if policy is not None:
        with errors_as_messages(show_traceback=traceback):
            click.echo(export_policy(policy_text(policy), dialect or "jax"))
        return
    write_policies(console_of(sys.stdout))
