"""`residuals` of a step: what it keeps for its backward pass and what it computes again, traced in a worker process."""

import dataclasses
import os
from collections.abc import Callable, Mapping

import msgspec

from remat_kit.compile.pool import Worker
from remat_kit.grammar import parse_plan, parse_policy
from remat_kit.graph import ResidualReport
from remat_kit.policy import Policy
from remat_kit.verbs.question import Task, question_of


def step_residuals(
    step: str | Callable[..., object],
    *,
    policy: str,
    wraps: Mapping[str, str | Policy] | None = None,
    target: str = "cpu",
    options: Mapping[str, object] | None = None,
    targets_file: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
) -> ResidualReport:
    """Traces a step under a policy and reads off what it keeps.

    Args:
        step: A step factory, or its `module:function`.
        policy: Text of a plan.
        wraps: Module pattern -> policy, for a model that nobody edits.
        target: Whose devices the step is traced for; nothing is compiled.
        options: Options of the factory.
        targets_file: TOML file with more targets.
        timeout_s: Most seconds.

    Raises:
        PolicyError, TargetError, StepError: Something given does not make sense.
    """
    parse_plan(policy)
    for of_modules in (wraps or {}).values():
        parse_policy(str(of_modules))
    question = dataclasses.replace(
        question_of(step, options=options, targets_file=targets_file),
        task=Task.RESIDUALS,
        policy=policy,
        wraps=tuple((pattern, str(of_modules)) for pattern, of_modules in (wraps or {}).items()),
        target=target,
    )
    with Worker() as worker:
        return msgspec.convert(worker.ask(msgspec.to_builtins(question), timeout_s=timeout_s), ResidualReport)
