"""The whole curve of bytes against cost, the best plan at each, and the largest batch or sequence that fits.

In: stacks and a model, or a measured function of a knob. Out: `FrontierPoint`s, least bytes first; a `Maximum`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remat_kit.errors import BudgetError
from remat_kit.planner.layout import Layout, PlannedStack
from remat_kit.planner.model import MemoryModel
from remat_kit.planner.solve import cost_of, solve, solve_smallest
from remat_kit.planning import Measure, Objective

NUM_POINTS = 33
"""Budgets between least and most bytes that are solved for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The best plan for a total.

    Attributes:
        plan: Its text.
        layout: The plan.
        total_bytes: By the model.
        cost: Predicted seconds or FLOPs of recomputation, as the objective says.
        compiled_total_bytes: The compiler's total; None = not compiled.
        recompute_flops: As traced; None = not compiled.
    """

    plan: str
    layout: Layout
    total_bytes: int
    cost: float
    compiled_total_bytes: int | None = None
    recompute_flops: int | None = None


def frontier(
    stacks: Sequence[PlannedStack], *, model: MemoryModel, objective: Objective, num_points: int = NUM_POINTS
) -> tuple[FrontierPoint, ...]:
    """The best plans from the smallest one to where nothing is left to gain, those only that others don't beat.

    Args:
        stacks: The stacks.
        model: Predicts bytes.
        objective: What is made least of.
        num_points: Budgets in between.
    """
    least = solve_smallest(model, stacks, objective=objective)
    richest = solve(model, stacks, budget_bytes=2**62, objective=objective)
    assert richest is not None
    low, high = model.predict(least), model.predict(richest)
    step = (high - low) / max(1, num_points - 1)
    layouts = [least]
    for number in range(1, num_points - 1):
        found = solve(model, stacks, budget_bytes=low + round(step * number), objective=objective)
        layouts += [] if found is None else [found]
    return _front([_point(layout, stacks, model, objective) for layout in (*layouts, richest)])


def _point(layout: Layout, stacks: Sequence[PlannedStack], model: MemoryModel, objective: Objective) -> FrontierPoint:
    return FrontierPoint(
        plan=str(layout), layout=layout, total_bytes=model.predict(layout), cost=cost_of(layout, stacks, objective)
    )


def _front(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda item: (item.total_bytes, item.cost)):
        if not kept or point.cost < kept[-1].cost:
            kept.append(point)
    return tuple(kept)


def compile_points(points: Sequence[FrontierPoint], measure: Measure, *, num_compiled: int = 4) -> tuple[FrontierPoint, ...]:
    """Compiles the ends of a frontier and evenly spaced points between them.

    Args:
        points: Least bytes first.
        measure: Compiles.
        num_compiled: How many, at least 2 where there are so many points.
    """
    last = len(points) - 1
    chosen = {round(last * number / max(1, num_compiled - 1)) for number in range(num_compiled)}
    compiled = []
    for number, point in enumerate(points):
        if number in chosen:
            measured = measure(point.plan, None)
            point = dataclasses.replace(
                point, compiled_total_bytes=measured.total_bytes, recompute_flops=measured.recompute_flops
            )
        compiled.append(point)
    return tuple(compiled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maximum:
    """The largest value of a knob that fits.

    Attributes:
        value: The value; None = not even the smallest one fits.
        total_bytes: Smallest total of the step at this value (or at the smallest value, when none fits).
        next_value: The next larger value, which does not fit; None = the upper limit fits.
        next_total_bytes: Its smallest total.
        measurements: Pairs of value and total, in order.
    """

    value: int | None
    total_bytes: int
    next_value: int | None
    next_total_bytes: int | None
    measurements: tuple[tuple[int, int], ...]


def maximize(
    smallest_total: Callable[[int], int], *, budget_bytes: int, step: int = 1, start: int | None = None, limit: int | None = None
) -> Maximum:
    """Finds the largest multiple of a step that fits; guesses by the line through the nearest totals, so few compiles do.

    Args:
        smallest_total: Value of the knob -> bytes of the step's leanest plan there; must not fall with the value.
        budget_bytes: Of a device.
        step: Values are multiples of it.
        start: First value tried; None = the step.
        limit: Largest value; None = no limit.

    Raises:
        BudgetError: The limit is below the step.
    """
    top = None if limit is None else limit // step
    if top == 0:
        raise BudgetError(f"no multiple of {step} is at most {limit}.")
    seen: dict[int, int] = {}

    def fits(count: int) -> bool:
        if count not in seen:
            seen[count] = smallest_total(count * step)
        return seen[count] <= budget_bytes

    first = max(1, (start or step) // step)
    low, high = _bracket(fits, first if top is None else min(first, top), top)
    while low is not None and high is not None and high - low > 1:
        # A line finds the place at once where totals are straight; halving now and then bounds the rest.
        is_straight = len(seen) < 8 or len(seen) % 2 == 0
        guess = _on_line(seen, low, high, budget_bytes) if is_straight else (low + high) // 2
        low, high = (guess, high) if fits(guess) else (low, guess)
    shown = low if low is not None else 1
    return Maximum(
        value=None if low is None else low * step,
        total_bytes=seen[shown],
        next_value=None if high is None else high * step,
        next_total_bytes=None if high is None else seen[high],
        measurements=tuple((count * step, total) for count, total in seen.items()),
    )


def _bracket(fits: Callable[[int], bool], first: int, top: int | None) -> tuple[int | None, int | None]:
    """A value that fits and a larger one that does not; None for one that does not exist."""
    low, high = (first, None) if fits(first) else (None, first)
    while high is None and low is not None and low != top:
        count = low * 2 if top is None else min(low * 2, top)
        low, high = (count, None) if fits(count) else (low, count)
    while low is None and high is not None and high > 1:
        count = max(1, high // 2)
        low, high = (count, high) if fits(count) else (None, count)
    return low, high


def _on_line(seen: dict[int, int], low: int, high: int, budget_bytes: int) -> int:
    """Where the line between two totals meets the budget; the middle where it would move by almost nothing."""
    slope = (seen[high] - seen[low]) / (high - low)
    guess = low + int((budget_bytes - seen[low]) / slope) if slope > 0 else (low + high) // 2
    if guess <= low:
        return low + 1
    return min(guess, high - 1)
