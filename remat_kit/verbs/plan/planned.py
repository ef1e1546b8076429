"""`plan`: one training step, one budget -> the fastest plan that fits, proved by the target's own compiler.

In the caller's process, which needs no JAX: a worker process describes the step's layers, the planner asks it for compiles (small
ones first, then the whole step under a few plans), and the plan that comes out is one whose compiled total is within the budget,
or the smallest one with what fills the memory and measured ways out.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence

from remat_kit.budget import DEFAULT_MEMORY_FRACTION
from remat_kit.compile.pool import Worker
from remat_kit.errors import RematKitError, TargetError
from remat_kit.grammar import parse_plan
from remat_kit.planner.closure import HostLink
from remat_kit.planner.layout import PlannedStack
from remat_kit.planner.search import find_plan, plan_stack
from remat_kit.planner.unrolled import wraps_of
from remat_kit.planning import Objective, PlanResult, PlanRow, PlanTable, StepPlan
from remat_kit.verbs.plan.described import StackBlocks, StepBlocks
from remat_kit.verbs.plan.roofline import predict_time
from remat_kit.verbs.plan.session import PlanQuestion, Progress, Session, ask_blocks, measure_of, with_modules
from remat_kit.verbs.plan.settings import LIMITS, PlanSettings, quiet, read_question
from remat_kit.verbs.plan.ways import ways_for
from remat_kit.verbs.question import step_name


def plan(
    step: str | Callable[..., object],
    *,
    target: str,
    budget: str | int | None = None,
    wraps: Sequence[str] = (),
    objective: str | None = None,
    offload: float = 0.0,
    options: Mapping[str, object] | None = None,
    memory_fraction: str | float = DEFAULT_MEMORY_FRACTION,
    xla: Mapping[str, str] | None = None,
    targets_file: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    progress: Progress = quiet,
) -> StepPlan:
    """Finds the plan that costs least and fits a budget, and proves it by compiling.

    Args:
        step: A step factory, or its `module:function`.
        target: Text like `"h100:8"` or `"v5p:2x2x4"`.
        budget: Bytes per device (`"16GiB"`) or a part of the memory (`"90%"`); None = the target's default.
        wraps: Module patterns to plan for, in a model that nobody edits; () = the step's own stacks.
        objective: `"time"` (predicted seconds) or `"flops"` (recomputed FLOPs); None = time where the target's rates are known.
        offload: See `PlanSettings`.
        options: Options of the factory.
        memory_fraction: Part of a GPU's memory in the default budget.
        xla: Compiler options of the real run.
        targets_file: TOML file with more targets.
        cache_dir: Folder of the compile cache; None = the default one, `os.devnull` = none.
        timeout_s: Most seconds for one compile.
        progress: Told what is compiled.

    Returns:
        The plan; where nothing fits, the smallest one found with `result.fits` False, what fills the memory, and ways out.

    Raises:
        PolicyError, TargetError, StepError, BudgetError: Something given does not make sense.
        CompileError: The compiler failed.
    """
    settings = PlanSettings(
        budget=budget,
        wraps=tuple(wraps),
        objective=objective,
        offload=offload,
        options=options or {},
        memory_fraction=memory_fraction,
        xla=xla or {},
        targets_file=targets_file,
        cache_dir=cache_dir,
        timeout_s=timeout_s,
        progress=progress,
    )
    return plan_target(step, target, settings)


def plan_target(step: str | Callable[..., object], target: str, settings: PlanSettings) -> StepPlan:
    """What `plan` does, its settings in one record."""
    asked = read_question(step, target, settings)
    with Worker() as worker:
        return plan_in(Session(worker=worker), asked, step=step_name(step))


def plan_targets(
    step: str | Callable[..., object],
    *,
    targets: Sequence[str],
    settings: PlanSettings = PlanSettings(),  # noqa: B008 (frozen)
) -> PlanTable:
    """The best plan on each of several targets; one that fails costs its row, not the table.

    Args:
        step: A step factory, or its `module:function`.
        targets: Texts of targets.
        settings: See `PlanSettings`.

    Raises:
        PolicyError, TargetError, StepError, BudgetError: Something given does not make sense.
    """
    if isinstance(targets, str) or not targets:
        raise TargetError(f"give a list of targets, like ['h100'], not {targets!r}.")
    questions = [read_question(step, target, settings) for target in dict.fromkeys(targets)]
    rows = [_row(asked, step_name(step)) for asked in questions]
    return PlanTable(step=step_name(step), options=questions[0].question.options, rows=tuple(rows))


def _row(asked: PlanQuestion, step: str) -> PlanRow:
    try:
        with Worker() as worker:
            return PlanRow(target=asked.target.text, plan=plan_in(Session(worker=worker), asked, step=step))
    except RematKitError as error:
        return PlanRow(target=asked.target.text, plan=None, error=str(error))


def plan_in(session: Session, asked: PlanQuestion, *, step: str) -> StepPlan:
    """Plans for one target in an open session; when nothing fits, measures ways out.

    Raises:
        PolicyError, TargetError, StepError, BudgetError: Something given does not make sense.
        CompileError: The compiler failed.
    """
    blocks = ask_blocks(session, asked)
    asked = with_modules(asked, blocks)
    objective = objective_of(asked, blocks)
    stacks = planned_stacks(asked, blocks, objective)
    result = find_plan(
        stacks,
        budget_bytes=asked.budget_bytes,
        measure=measure_of(session, asked, blocks),
        depths=None if blocks.has_depth else (),
        objective=objective,
        limits=LIMITS,
    )
    if not result.fits:
        result = dataclasses.replace(result, ways_out=ways_for(session, asked, blocks, plan=result.plan))
    return _step_plan(session, asked, blocks, result if blocks.time is not None else without_seconds(result), step=step)


def planned_stacks(asked: PlanQuestion, blocks: StepBlocks, objective: Objective) -> list[PlannedStack]:
    """The stacks with their worthwhile policies.

    Raises:
        PolicyError: Something that must not run again can't be kept by any name.
        TargetError: Offloading to a host whose link is unknown.
    """
    return [
        plan_stack(
            stack.name,
            stack.block,
            num_layers=stack.num_layers,
            objective=objective,
            host=_host_link(asked, stack),
            with_none=True,
            max_segments=2 if stack.accepts_mixed else 1,
            repeats=stack.repeats,
            is_unrolled=bool(stack.paths),
        )
        for stack in blocks.stacks
    ]


def objective_of(asked: PlanQuestion, blocks: StepBlocks) -> Objective:
    """What is made least of.

    Raises:
        TargetError: Seconds on a target whose rates are not known.
    """
    if blocks.time is None and asked.objective is Objective.TIME:
        raise TargetError(
            f"{asked.target.text!r} has no published FLOP/s and bytes/s to predict seconds by: plan for --objective flops, or "
            "give it flops_per_s and memory_bytes_per_s in your targets file."
        )
    return asked.objective or (Objective.FLOPS if blocks.time is None else Objective.TIME)


def _host_link(asked: PlanQuestion, stack: StackBlocks) -> HostLink | None:
    if not asked.offload:
        return None
    if asked.target.host_bytes_per_s is None:
        raise TargetError(f"offloading on {asked.target.text!r}: the rate of its host link is not known (host_bytes_per_s).")
    return HostLink(window_bytes=int(asked.offload * stack.forward_s * asked.target.host_bytes_per_s))


def without_seconds(result: PlanResult) -> PlanResult:
    """A plan for a target without rates: seconds are unknown, but for those of what is not run again at all, which stay 0."""
    decisions = tuple(
        dataclasses.replace(decision, recompute_s=None if decision.recompute_s else 0.0) for decision in result.decisions
    )
    return dataclasses.replace(result, recompute_s=None, decisions=decisions)


def _step_plan(session: Session, asked: PlanQuestion, blocks: StepBlocks, result: PlanResult, *, step: str) -> StepPlan:
    predicted = predict_time(
        blocks.time,
        asked.target,
        recompute_s=result.recompute_s,
        host_bytes=result.host_bytes,
        wire_bytes=session.wire_bytes.get(result.plan),
    )
    num_tokens, step_s = _tokens(blocks), predicted.step_s
    tokens_per_s = None if step_s is None or num_tokens is None else num_tokens / blocks.num_devices / step_s
    price = asked.target.price_per_hour
    return StepPlan(
        step=step,
        options=asked.question.options,
        target=asked.target.text,
        wraps=wraps_of(parse_plan(result.plan), asked.modules),
        result=result,
        baseline_flops=blocks.flops,
        step_s=step_s,
        bound=predicted.bound,
        tokens_per_s=tokens_per_s,
        cost_per_million_tokens=None if price is None or tokens_per_s is None else price / 3600 / tokens_per_s * 1e6,
        num_cached=session.num_cached,
        program=blocks.program,
        versions=session.versions,
        notes=(*blocks.notes, *_notes(blocks), *session.plan_notes.get(result.plan, ()), *predicted.notes),
    )


def _tokens(blocks: StepBlocks) -> int | None:
    """Tokens of a step over all devices; None = the step has no options that say so."""
    knobs, options = dict(blocks.knobs), dict(blocks.options)
    try:
        return int(options[knobs["batch"]]) * int(options[knobs["seq"]])
    except (KeyError, ValueError):
        return None


def _notes(blocks: StepBlocks) -> list[str]:
    if blocks.has_depth:
        return []
    return ["The step has no working depth option (Knobs.depth): no small compiles, so nothing was predicted before."]
