"""Two more questions to the planner: the best plan at every budget, and the largest batch or sequence that fits.

In the caller's process, without JAX. Both rest on what `plan` rests on: blocks of the step, compiles, the model they calibrate.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from remat_kit.compile.pool import Worker
from remat_kit.errors import StepError
from remat_kit.planner.frontier import FrontierPoint, Maximum, compile_points, frontier, maximize
from remat_kit.planner.layout import Layout, PlannedStack, uniform
from remat_kit.planner.ledger import Ledger
from remat_kit.planner.search import calibrate, calibration_depths
from remat_kit.planning import MAXIMIZED_KNOBS, CurvePoint, LargestStep, Objective, PlanCurve
from remat_kit.verbs.plan import objective_of, plan_in, planned_stacks
from remat_kit.verbs.plan_question import StepBlocks
from remat_kit.verbs.plan_session import PlanQuestion, Session, ask_blocks, compile_plan, measure_of, with_modules
from remat_kit.verbs.plan_settings import LIMITS, PlanSettings, read_question
from remat_kit.verbs.question import step_name

SEQ_STEP = 128
"""Tokens that sequences are a multiple of: the blocks of fused attention kernels."""

NO_BUDGET_BYTES = 2**50


def plan_frontier(
    step: str | Callable[..., object],
    *,
    target: str,
    settings: PlanSettings = PlanSettings(),  # noqa: B008 (frozen)
) -> PlanCurve:
    """The best plans from the smallest total to no recomputation, compiled at the ends and at points between.

    Args:
        step: A step factory, or its `module:function`.
        target: Text of the target.
        settings: See `PlanSettings`; its budget only says where the model is to be most exact.

    Raises:
        PolicyError, TargetError, StepError, BudgetError: Something given does not make sense.
        CompileError: The compiler failed.
    """
    asked = read_question(step, target, settings, default_budget_bytes=NO_BUDGET_BYTES)
    with Worker() as worker:
        session = Session(worker=worker)
        blocks = ask_blocks(session, asked)
        asked = with_modules(asked, blocks)
        objective = objective_of(asked, blocks)
        stacks = planned_stacks(asked, blocks, objective)
        ledger = Ledger(measure=measure_of(session, asked, blocks), limits=LIMITS)
        _calibrated(ledger, asked, blocks, stacks, objective)
        points = frontier(stacks, model=ledger.model(), objective=objective)
        points = compile_points(points, measure_of(session, asked, blocks))
    return PlanCurve(
        step=step_name(step),
        options=asked.question.options,
        target=target,
        objective=objective,
        points=tuple(_curve_point(point) for point in points),
        compiles=session.num_compiles,
        notes=blocks.notes,
    )


def _calibrated(
    ledger: Ledger, asked: PlanQuestion, blocks: StepBlocks, stacks: Sequence[PlannedStack], objective: Objective
) -> None:
    """Measures small variants, or the ends at full depth where there are none."""
    depths = calibration_depths(stacks) if blocks.has_depth else ()
    if depths:
        calibrate(ledger, stacks, budget_bytes=asked.budget_bytes, depths=depths, objective=objective)
        return
    ledger.observe(leanest(stacks), depth=None)
    ledger.observe(uniform(stacks, [min(stack.choices, key=lambda each: each.cost(objective)) for stack in stacks]), depth=None)


def leanest(stacks: Sequence[PlannedStack]) -> Layout:
    """The policies that keep least."""
    return uniform(stacks, [min(stack.choices, key=lambda choice: choice.saved_bytes) for stack in stacks])


def _curve_point(point: FrontierPoint) -> CurvePoint:
    return CurvePoint(
        plan=point.plan,
        predicted_total_bytes=point.total_bytes,
        cost=point.cost,
        compiled_total_bytes=point.compiled_total_bytes,
        recompute_flops=point.recompute_flops,
    )


def plan_largest(
    step: str | Callable[..., object],
    *,
    target: str,
    knob: str,
    settings: PlanSettings = PlanSettings(),  # noqa: B008 (frozen)
) -> LargestStep:
    """The largest batch or sequence of which some plan fits, and its best plan.

    Args:
        step: A step factory, or its `module:function`.
        target: Text of the target.
        knob: `batch` or `seq`.
        settings: See `PlanSettings`.

    Raises:
        PolicyError, TargetError, StepError, BudgetError: Something given does not make sense, or the step has no such option.
        CompileError: The compiler failed.
    """
    asked = read_question(step, target, settings)
    with Worker() as worker:
        session = Session(worker=worker)
        blocks = ask_blocks(session, asked)
        asked = with_modules(asked, blocks)
        option, given = _option_of(blocks, knob)
        lean = str(leanest(planned_stacks(asked, blocks, objective_of(asked, blocks))))
        found = _maximum(session, asked, option=option, given=given, step=_step_of(knob, given, blocks.num_devices), lean=lean)
        plan = None
        if found.value is not None:
            session = Session(worker=worker)
            plan = plan_in(session, asked.with_options({option: str(found.value)}), step=step_name(step))
    return LargestStep(
        knob=knob,
        option=option,
        value=found.value,
        total_bytes=found.total_bytes,
        next_value=found.next_value,
        next_total_bytes=found.next_total_bytes,
        measurements=found.measurements,
        plan=plan,
    )


def _option_of(blocks: StepBlocks, knob: str) -> tuple[str, int]:
    """The option that a knob is, and its value."""
    if knob not in MAXIMIZED_KNOBS:
        raise StepError(f"{knob!r} can't be maximized: choose from {', '.join(MAXIMIZED_KNOBS)}.")
    option = dict(blocks.knobs).get(knob)
    if option is None:
        raise StepError(f"the step says of no option that it is the {knob}: add knobs=Knobs({knob}='…') to its Step.")
    given = dict(blocks.options).get(option, "")
    if not given.isdecimal() or int(given) < 1:
        raise StepError(f"option {option}={given!r} is not a whole number of at least 1 to start from.")
    return option, int(given)


def _step_of(knob: str, given: int, num_devices: int) -> int:
    """What values are multiples of, in keeping with the one given."""
    return math.gcd(given, num_devices if knob == "batch" else SEQ_STEP)


class _RefusedError(Exception):
    """The factory refused a value."""

    def __init__(self, value: int, reason: StepError) -> None:
        self.value = value
        self.reason = reason


def _maximum(session: Session, asked: PlanQuestion, *, option: str, given: int, step: int, lean: str) -> Maximum:
    """Searches; a value that the factory refuses, as beyond the model's positions, is a limit."""
    totals: dict[int, int] = {}
    limit: int | None = None

    def smallest_total(value: int) -> int:
        if value not in totals:
            try:
                changed = asked.with_options({option: str(value)})
                totals[value] = compile_plan(session, changed, lean, what=f"{option} {value}").total_bytes
            except StepError as error:
                raise _RefusedError(value, error) from error
        return totals[value]

    while True:
        try:
            found = maximize(smallest_total, budget_bytes=asked.budget_bytes, step=step, start=given, limit=limit)
        except _RefusedError as refused:
            limit = refused.value - step
            if limit < step:
                raise refused.reason from None
        else:
            return dataclasses.replace(found, measurements=tuple(totals.items()))
