"""The largest batch or sequence of which some plan fits, and the best plan there.

In the caller's process, without JAX: the step is compiled under its leanest plan at values that lines through its totals suggest.
"""

import dataclasses
import math
from collections.abc import Callable

from remat_kit.compile.pool import Worker
from remat_kit.errors import StepError
from remat_kit.planner.frontier import Maximum, maximize
from remat_kit.planner.layout import leanest
from remat_kit.planning import MAXIMIZED_KNOBS, LargestStep
from remat_kit.verbs.plan.described import StepBlocks
from remat_kit.verbs.plan.planned import objective_of, plan_in, planned_stacks
from remat_kit.verbs.plan.session import PlanQuestion, Session, ask_blocks, compile_plan, with_modules
from remat_kit.verbs.plan.settings import PlanSettings, read_question
from remat_kit.verbs.question import step_name

SEQ_STEP = 128
"""Tokens that sequences are a multiple of: the blocks of fused attention kernels."""


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
