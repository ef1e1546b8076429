"""Inside the worker process: one question, from a factory to what the target's compiler says of it.

`answer` takes and returns plain JSON data; the steps of its work are a reader's map of the product: devices, step, trace, checks,
compile.
"""

import dataclasses
import functools
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import jax
import msgspec

from remat_kit import _jax
from remat_kit.analysis.findings import check_remedies
from remat_kit.apply.casts import CastPlace, place_casts
from remat_kit.apply.paths import rematerialize
from remat_kit.compile.cache import Cache
from remat_kit.compile.compiler import compile_lowered, compile_with_dump
from remat_kit.compile.environment import compiler_flags
from remat_kit.compile.topology import devices_for, identify
from remat_kit.errors import IdleRuleWarning, PolicyError, RematKitError
from remat_kit.findings import Change, Finding, Measured
from remat_kit.grammar import parse_plan
from remat_kit.graph import StepGraph
from remat_kit.plans import NO_REMAT, Plan, Policies
from remat_kit.policy import NoRemat
from remat_kit.records import CompiledStep, StepTrace
from remat_kit.step import Step
from remat_kit.targets import Target, check_abilities, load_rows, parse_target
from remat_kit.trace import graph_of, report_graph, summarise
from remat_kit.verbs.build import bind_plan, build, check_names, factory_error, read_options
from remat_kit.verbs.dissect import dissect
from remat_kit.verbs.plan.blocks import step_blocks
from remat_kit.verbs.question import Answer, Insides, Question, Task, changed_question, load_factory


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Answers a `Question`; it and the answer are JSON data: an `Answer`, a `ResidualReport` or `StepBlocks`, by its task."""
    question = msgspec.convert(request, Question)
    match question.task:
        case Task.MEASURE:
            return msgspec.to_builtins(measure(question))
        case Task.RESIDUALS:
            return msgspec.to_builtins(report_graph(prepare(question).traced.graph))
        case Task.EXPLAIN:
            return msgspec.to_builtins(explain(question))
        case Task.BLOCKS:
            prepared = prepare(question)
            return msgspec.to_builtins(step_blocks(question, prepared.target, prepared.traced.step, prepared.traced.graph))
        case _:
            assert_never(question.task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A step, traced.

    Attributes:
        step: As the factory built it.
        program: What `jax.jit(…).trace` gave.
        graph: Its operations.
        trace: Its totals.
    """

    step: Step
    program: Any
    graph: StepGraph
    trace: StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked question, before any compiler.

    Attributes:
        target: What to compile for.
        baseline: The step without rematerialization.
        traced: The step under the policy.
    """

    target: Target
    baseline: Traced
    traced: Traced


def measure(question: Question) -> Answer:
    """Measures one policy on one target.

    Raises:
        PolicyError, TargetError, StepError: The question does not make sense.
        CompileError: The compiler failed on it.
    """
    prepared = prepare(question)
    program = _with_casts(prepared.traced, question.casts)
    compiled = compile_lowered(program.lower(), target=prepared.target, xla_options=question.xla, cache=_cache(question))
    return _answer(question, prepared, compiled)


def _with_casts(traced: Traced, place: str | None) -> Any:
    """The traced program, or the same step traced with the casts of its stacked weights elsewhere."""
    if place is None:
        return traced.program
    moved = place_casts(traced.step.fn, CastPlace(place))
    return jax.jit(moved, donate_argnums=traced.step.donate).trace(*traced.step.args)


def explain(question: Question) -> Insides:
    """Measures one policy on one target, and looks inside what its compiler made.

    Raises:
        PolicyError, TargetError, StepError: The question does not make sense.
        CompileError: The compiler failed on it, or left nothing to look into.
        DumpError: What it left disagrees with its own totals.
    """
    prepared = prepare(question)
    traced = prepared.traced
    compiled, texts = compile_with_dump(
        traced.program.lower(), target=prepared.target, xla_options=question.xla, cache=_cache(question)
    )
    measured = _answer(question, prepared, compiled)
    insides = dissect(measured, texts, question=question, target=prepared.target, step=traced.step, graph=traced.graph)
    return dataclasses.replace(insides, findings=_check_remedies(question, insides))


def _check_remedies(question: Question, insides: Insides) -> tuple[Finding, ...]:
    def of_change(change: Change) -> Measured:
        return _measured(measure(changed_question(question, change)))

    return check_remedies(insides.findings, of_change, before=_measured(insides.measured), most=question.most_checks)


def _measured(answer: Answer) -> Measured:
    return Measured(total_bytes=answer.compiled.device.total_bytes, flops=answer.trace.flops)


def _answer(question: Question, prepared: Prepared, compiled: CompiledStep) -> Answer:
    traced = prepared.traced
    findings = tuple(finding.message for finding in report_graph(traced.graph).findings)
    notes = (*traced.step.notes, *findings, *_offload_notes(question, prepared))
    return Answer(trace=traced.trace, baseline=prepared.baseline.trace, compiled=compiled, notes=notes)


def _offload_notes(question: Question, prepared: Prepared) -> tuple[str, ...]:
    """What this jaxlib gets wrong when a step that keeps values in host memory runs on a GPU."""
    fault = _jax.GPU_OFFLOAD_FAULT
    flags = (*compiler_flags(), *question.xla, *prepared.target.compiler_options)
    if fault is None or prepared.target.platform != "cuda" or any(_jax.GPU_OFFLOAD_PASS in str(value) for _, value in flags):
        return ()
    return (fault,) if any(value.is_on_host for value in prepared.traced.graph.values) else ()


def _cache(question: Question) -> Cache | None:
    return None if question.cache_dir is None else Cache(Path(question.cache_dir))


def prepare(question: Question) -> Prepared:
    """Builds and traces a step without and with its policy, and checks all that can be wrong with the question.

    Raises:
        PolicyError, TargetError, StepError: The question does not make sense.
    """
    rows = load_rows(question.targets_file)
    target = identify(parse_target(question.target, rows), rows)
    plan = parse_plan(question.policy)
    baseline = _trace(question.factory, question.options, target, NO_REMAT, ())
    policies = bind_plan(plan, baseline.step)
    traced = _trace(question.factory, question.options, target, policies, question.wraps, question.donate)
    check_names(plan, baseline.trace, traced.trace)
    _check_applied(plan, traced.trace, baseline.trace)
    check_abilities(target, dtypes=traced.trace.dtypes, kernels=tuple(kernel.name for kernel in traced.trace.kernels))
    return Prepared(target=target, baseline=baseline, traced=traced)


@functools.lru_cache(maxsize=2)
def _trace(
    factory_name: str,
    options: tuple[tuple[str, str], ...],
    target: Target,
    policies: Policies,
    wraps: tuple[tuple[str, str], ...],
    donate: tuple[int, ...] | None = None,
) -> Traced:
    """Builds and traces a step; remembered, since every row of a target starts from the one without rematerialization."""
    factory = load_factory(factory_name)
    step = build(factory, policies, devices_for(target), read_options(factory, options))
    if wraps:
        step = dataclasses.replace(step, fn=rematerialize(dict(wraps))(step.fn))
    if donate is not None:
        step = dataclasses.replace(step, donate=donate)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IdleRuleWarning)  # the findings say it, and more
            program = jax.jit(step.fn, donate_argnums=step.donate).trace(*step.args)
    except RematKitError:
        raise
    except Exception as error:
        raise factory_error("tracing the step raised", error) from error
    graph = graph_of(program, step.args)
    return Traced(step=step, program=program, graph=graph, trace=summarise(graph))


def _check_applied(plan: Plan, trace: StepTrace, baseline: StepTrace) -> None:
    asked = [policy for policy in plan.policies if not isinstance(policy, NoRemat)]
    if asked and trace.num_remat_regions <= baseline.num_remat_regions:
        raise PolicyError(
            f"{str(plan)!r} changed nothing: the traced step has as many jax.checkpoint regions as without it. In the factory, "
            "apply it: block = remat(block, policies[stack])."
        )
