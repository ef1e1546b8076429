"""The truth loop: calibrate on few layers, predict, compile the whole plan, correct, until the best plan that fits is proved.

In: stacks with their choices, a budget, a `measure` callable (a compile). Out: a `PlanResult` whose total is measured, never
predicted. Small variants come first (`calibration`); from then on `predicted` is fixed. Whole plans are then compiled, and each
total corrects the model; a plan over the budget is never returned as one that fits.
"""

from collections.abc import Sequence

from remat_kit.errors import BudgetError
from remat_kit.planner.blocks import BlockGraph
from remat_kit.planner.calibration import FIRST_MARGIN, calibrate, calibration_depths
from remat_kit.planner.choices import layer_choices
from remat_kit.planner.closure import HostLink
from remat_kit.planner.explain import explained
from remat_kit.planner.layout import Layout, PlannedStack, leanest
from remat_kit.planner.ledger import Ledger, Limits
from remat_kit.planner.solve import cost_of, solve, solve_smallest
from remat_kit.planning import Measure, Measured, Objective, PlanResult

SAFER = ((0.5, FIRST_MARGIN), (1.0, 0.004), (3.0, 0.03))
"""By plans that turned out too large so far: standard deviations, and a part of the budget, that the next one stays below it."""
NEXT_MARGIN = 0.0003
"""The part of the budget that plans stay below it when one that fits is at hand."""
OPTIMISM = (-3.0, -2.0, -1.0, -0.5, 0.0, 1.0)
"""When a plan that fits is at hand: standard deviations by which layers are taken to keep less than expected. Of the plans that
would then fit, the one with the most to gain, times the chance that it fits, is compiled."""


def plan_stack(
    name: str,
    block: BlockGraph,
    *,
    num_layers: int,
    objective: Objective = Objective.TIME,
    host: HostLink | None = None,
    with_none: bool = False,
    max_segments: int = 2,
    repeats: int = 1,
    is_unrolled: bool = False,
) -> PlannedStack:
    """A stack with the policies that are worth considering for it.

    Args:
        name: What plans call it.
        block: One of its layers.
        num_layers: How many there are.
        objective: What is made least of.
        host: What may be offloaded; None = nothing.
        with_none: Whether layers without rematerialization may be part of a plan.
        max_segments: 1 for a stack that can't mix policies.
        repeats: How often it runs in a step.
        is_unrolled: Whether its layers are modules one after the other, not a loop.

    Raises:
        PolicyError: Something that must not run again can't be kept by any name.
    """
    choices = layer_choices(block, objective=objective, host=host, with_none=with_none)
    return PlannedStack(
        name=name,
        num_layers=num_layers,
        block=block,
        choices=choices,
        max_segments=max_segments,
        repeats=repeats,
        is_unrolled=is_unrolled,
    )


def find_plan(
    stacks: Sequence[PlannedStack],
    *,
    budget_bytes: int,
    measure: Measure,
    depths: Sequence[int] | None = None,
    objective: Objective = Objective.TIME,
    limits: Limits = Limits(),  # noqa: B008 (frozen)
) -> PlanResult:
    """Finds the plan that costs least and fits, and proves it.

    Args:
        stacks: The stacks of the step, in forward order.
        budget_bytes: Of a device.
        measure: Compiles the step under a plan, at full depth or fewer layers.
        depths: Two small depths to calibrate at; None = chosen by the stacks, () = the step has no such option.
        objective: What is made least of.
        limits: Of compiles.

    Returns:
        The best measured plan within the budget; where there is none, the smallest one found, with `fits` False.

    Raises:
        BudgetError: The budget is not above 0.
    """
    if budget_bytes <= 0:
        raise BudgetError(f"a budget of {budget_bytes} bytes holds nothing: give more than 0.")
    ledger = Ledger(measure=measure, limits=limits)
    usable = calibration_depths(stacks) if depths is None else tuple(depths)
    if usable:
        calibrate(ledger, stacks, budget_bytes=budget_bytes, depths=usable, objective=objective)
    before = ledger.model() if ledger.observations else None
    _prove(ledger, stacks, budget_bytes, objective)
    layout, measured = _verdict(ledger, stacks, budget_bytes, objective)
    return explained(
        layout, measured, stacks=stacks, budget_bytes=budget_bytes, objective=objective, ledger=ledger, before=before
    )


def _prove(ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective) -> None:
    """Compiles whole plans: the best one by the model, corrected after each, until nothing better is in sight."""
    while ledger.can_measure_whole:
        candidate = _candidate(ledger, stacks, budget_bytes, objective)
        if candidate is None:
            return
        ledger.observe(candidate, depth=None)


def _candidate(ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective) -> Layout | None:
    """What to compile next at full depth; None = nothing is worth it."""
    if not ledger.observations:
        return leanest(stacks)
    fitting = ledger.fitting(budget_bytes)
    if not fitting:
        return _safer(ledger, stacks, budget_bytes, objective)
    best = min(cost_of(layout, stacks, objective) for layout, _ in fitting)
    model, worth = ledger.model(), ledger.limits.min_gain * abs(best)
    found = [_untried(ledger, stacks, int(budget_bytes * (1 - NEXT_MARGIN)), objective, optimism=each) for each in OPTIMISM]
    better = [layout for layout in found if layout is not None and cost_of(layout, stacks, objective) < best - worth]

    def hope(layout: Layout) -> float:
        return (best - cost_of(layout, stacks, objective)) * model.chance(layout, budget_bytes)

    return max((layout for layout in better if not ledger.is_known(layout, None)), key=hope, default=None)


def _safer(ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective) -> Layout | None:
    """While nothing fits: plans of which more and more is certain, at last the smallest one."""
    smallest = solve_smallest(ledger.model(), stacks, objective=objective)
    misses = len(ledger.whole)
    doubt, margin = SAFER[min(misses, len(SAFER) - 1)]
    found = None
    if misses < ledger.limits.max_whole - 1:
        found = _untried(ledger, stacks, int(budget_bytes * (1 - margin)), objective, optimism=-doubt)
    found = found or smallest
    return None if ledger.is_known(found, None) else found


def _untried(
    ledger: Ledger, stacks: Sequence[PlannedStack], limit: int, objective: Objective, *, optimism: float
) -> Layout | None:
    """The best plan by the model that was not measured to be over."""
    model = ledger.model()
    over = {str(layout) for layout, measured in ledger.whole if measured.total_bytes > limit}
    for _ in range(16):
        found = solve(model, stacks, budget_bytes=limit, objective=objective, optimism=optimism)
        if found is None or str(found) not in over:
            return found
        limit -= max(1, limit // 400)
    return None


def _verdict(ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective) -> tuple[Layout, Measured]:
    fitting = ledger.fitting(budget_bytes)
    if not fitting:
        return min(ledger.whole, key=lambda item: item[1].total_bytes)

    def key(item: tuple[Layout, Measured]) -> tuple[float, int, int]:
        layout, measured = item
        cost = measured.recompute_flops if objective is Objective.FLOPS else cost_of(layout, stacks, objective)
        return cost, layout.num_names, measured.total_bytes

    return min(fitting, key=key)
