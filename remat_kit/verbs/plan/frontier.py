"""The best plan at every budget, from the leanest one to where nothing is left to gain.

In the caller's process, without JAX. It rests on what `plan` rests on: blocks of the step, compiles, the model they calibrate.
"""

from collections.abc import Callable, Sequence

from remat_kit.compile.pool import Worker
from remat_kit.planner.calibration import calibrate, calibration_depths
from remat_kit.planner.frontier import FrontierPoint, compile_points, frontier
from remat_kit.planner.layout import PlannedStack, leanest, uniform
from remat_kit.planner.ledger import Ledger
from remat_kit.planning import CurvePoint, Objective, PlanCurve
from remat_kit.verbs.plan.described import StepBlocks
from remat_kit.verbs.plan.planned import objective_of, planned_stacks
from remat_kit.verbs.plan.session import PlanQuestion, Session, ask_blocks, measure_of, with_modules
from remat_kit.verbs.plan.settings import LIMITS, PlanSettings, read_question
from remat_kit.verbs.question import step_name

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


def _curve_point(point: FrontierPoint) -> CurvePoint:
    return CurvePoint(
        plan=point.plan,
        predicted_total_bytes=point.total_bytes,
        cost=point.cost,
        compiled_total_bytes=point.compiled_total_bytes,
        recompute_flops=point.recompute_flops,
    )
