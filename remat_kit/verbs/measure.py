"""Inside the worker process: one question, from a factory to what the target's compiler says of it.

`answer` takes and returns plain JSON data; the steps of its work are a reader's map of the product: devices, step, trace, checks,
compile.
"""

import functools
from pathlib import Path
from typing import Any

import msgspec

from remat_kit.compile.cache import Cache
from remat_kit.compile.compiler import compile_lowered
from remat_kit.compile.topology import devices_for, identify
from remat_kit.errors import PolicyError
from remat_kit.grammar import parse_plan
from remat_kit.policy import NO_REMAT, NoRemat, Plan, Policies
from remat_kit.records import StepTrace
from remat_kit.step import Step
from remat_kit.targets import Target, check_abilities, load_rows, parse_target
from remat_kit.trace import trace_step
from remat_kit.verbs.build import bind_plan, build, check_names, read_options
from remat_kit.verbs.question import Answer, Question, load_factory


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answers a `Question`, both as JSON data."""
    return msgspec.to_builtins(measure(msgspec.convert(request, Question)))


def measure(question: Question) -> Answer:
    """Measures one policy on one target.

    Raises:
        PolicyError, TargetError, StepError: The question does not make sense.
        CompileError: The compiler failed on it.
    """
    rows = load_rows(question.targets_file)
    target = identify(parse_target(question.target, rows), rows)
    plan = parse_plan(question.policy)
    bare, _, baseline = _trace(question.factory, question.options, target, NO_REMAT)
    policies = bind_plan(plan, bare)
    check_names(plan, baseline)
    step, traced, trace = _trace(question.factory, question.options, target, policies)
    _check_applied(plan, trace, baseline)
    check_abilities(target, dtypes=trace.dtypes, kernels=tuple(kernel.name for kernel in trace.kernels))
    compiled = compile_lowered(
        traced.lower(),
        target=target,
        xla_options=question.xla,
        cache=None if question.cache_dir is None else Cache(Path(question.cache_dir)),
    )
    return Answer(trace=trace, baseline=baseline, compiled=compiled, notes=step.notes)


@functools.lru_cache(maxsize=2)
def _trace(
    factory_name: str, options: tuple[tuple[str, str], ...], target: Target, policies: Policies
) -> tuple[Step, Any, StepTrace]:
    """Builds and traces a step; remembered, since every row of a target starts from the one without rematerialization."""
    factory = load_factory(factory_name)
    step = build(factory, policies, devices_for(target), read_options(factory, options))
    traced, trace = trace_step(step)
    return step, traced, trace


def _check_applied(plan: Plan, trace: StepTrace, baseline: StepTrace) -> None:
    asked = [policy for policy in plan.policies if not isinstance(policy, NoRemat)]
    if asked and trace.num_remat_regions <= baseline.num_remat_regions:
        raise PolicyError(
            f"{str(plan)!r} changed nothing: the traced step has as many jax.checkpoint regions as without it. In the factory, "
            "apply it: block = remat(block, policies[stack])."
        )
