"""The truth loop: calibrate on few layers, predict, compile the whole plan, correct, until the best plan that fits is proved.

In: stacks with their choices, a budget, a `measure` callable (a compile). Out: a `PlanResult` whose total is measured, never predicted.
Small variants come first: the leanest policies at two depths (fixed bytes, bytes per layer), the richest (what names really
take), then the policies of the plan itself. From then on `predicted` is fixed. Whole plans are then compiled, and each total corrects
the model; a plan over the budget is never returned as one that fits.
"""

from collections.abc import Sequence

from remat_kit.errors import BudgetError
from remat_kit.planner.blocks import BlockGraph, Objective
from remat_kit.planner.choices import layer_choices
from remat_kit.planner.closure import HostLink
from remat_kit.planner.explain import explained
from remat_kit.planner.layout import Layout, PlannedStack, shrink, uniform
from remat_kit.planner.ledger import Ledger, Limits
from remat_kit.planner.model import MemoryModel
from remat_kit.planner.results import Measure, Measured, PlanResult
from remat_kit.planner.solve import cost_of, solve, solve_smallest


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

    Raises:
        PolicyError: Something that must not run again can't be kept by any name.
    """
    choices = layer_choices(block, objective=objective, host=host, with_none=with_none)
    return PlannedStack(
        name=name, num_layers=num_layers, block=block, choices=choices, max_segments=max_segments, repeats=repeats
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


def calibration_depths(stacks: Sequence[PlannedStack]) -> tuple[int, ...]:
    """Two depths well below the full one, none when the stacks are too short for that."""
    deepest = max(stack.num_layers for stack in stacks)
    if deepest >= 8:
        return (4, 6)
    return (2, 4) if deepest >= 6 else ()


def calibrate(
    ledger: Ledger, stacks: Sequence[PlannedStack], *, budget_bytes: int, depths: Sequence[int], objective: Objective
) -> None:
    """Measures small variants until the policies of the plan that the model would choose have been measured.

    Args:
        ledger: Where measurements go.
        stacks: The stacks.
        budget_bytes: Of a device.
        depths: Small depths, at least one; the smallest and the largest are used.
        objective: What is made least of.
    """
    low, high = min(depths), max(depths)
    lean = uniform(stacks, [min(stack.choices, key=lambda choice: choice.saved_bytes) for stack in stacks])
    rich = uniform(
        stacks, [min(stack.choices, key=lambda choice: (choice.cost(objective), choice.num_names)) for stack in stacks]
    )
    for depth in dict.fromkeys((low, high)):
        ledger.observe_small([shrink(lean, depth)], depth=depth)
    ledger.observe_small([shrink(rich, high)], depth=high)
    while ledger.can_measure_small:
        model = ledger.model()
        target = solve(model, stacks, budget_bytes=_with_margin(budget_bytes, ledger), objective=objective)
        target = target or solve_smallest(model, stacks, objective=objective)
        variants = [(low, 0.5), (high, 0.0), (high, 1.0)] if target.is_mixed else [(high, 0.5), (low, 0.5)]
        fresh = [
            (depth, small)
            for depth, share in variants
            if not ledger.is_known(small := shrink(target, depth, lean_share=share), depth)
        ]
        if not fresh:
            return
        for depth, small in fresh:
            ledger.observe_small([small], depth=depth)


def _prove(ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective) -> None:
    """Compiles whole plans: the best one by the model, corrected after each, until nothing better is in sight."""
    while ledger.can_measure_whole:
        candidate = _candidate(ledger, stacks, budget_bytes, objective)
        if candidate is None:
            return
        ledger.observe(candidate, depth=None)


def _candidate(ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective) -> Layout | None:
    """What to compile next at full depth; None = nothing is worth it."""
    model = ledger.model()
    smallest = solve_smallest(model, stacks, objective=objective)
    fitting = ledger.fitting(budget_bytes)
    is_last = len(ledger.whole) == ledger.limits.max_whole - 1
    if not ledger.observations or (is_last and not fitting):
        return None if ledger.is_known(smallest, None) else smallest
    found = _unmeasured(model, ledger, stacks, budget_bytes, objective)
    if not fitting:
        found = found or smallest
        return None if ledger.is_known(found, None) else found
    best = min(cost_of(layout, stacks, objective) for layout, _ in fitting)
    if found is None or cost_of(found, stacks, objective) >= best - ledger.limits.min_gain * abs(best):
        return None
    return found


def _unmeasured(
    model: MemoryModel, ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective
) -> Layout | None:
    """The best plan that was not measured to be over the budget, with ever more room left free."""
    limit = _with_margin(budget_bytes, ledger)
    over = {str(layout) for layout, measured in ledger.whole if measured.total_bytes > budget_bytes}
    for _ in range(16):
        found = solve(model, stacks, budget_bytes=limit, objective=objective)
        if found is None or str(found) not in over:
            return found
        limit -= max(1, budget_bytes // 400)
    return None


def _with_margin(budget_bytes: int, ledger: Ledger) -> int:
    margin = ledger.limits.next_margin if ledger.whole else ledger.limits.first_margin
    misses = sum(measured.total_bytes > budget_bytes for _, measured in ledger.whole)
    return int(budget_bytes * (1 - margin * (1 + 2 * misses)))


def _verdict(ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, objective: Objective) -> tuple[Layout, Measured]:
    fitting = ledger.fitting(budget_bytes)
    if not fitting:
        return min(ledger.whole, key=lambda item: item[1].total_bytes)

    def key(item: tuple[Layout, Measured]) -> tuple[float, int, int]:
        layout, measured = item
        cost = measured.recompute_flops if objective is Objective.FLOPS else cost_of(layout, stacks, objective)
        return cost, layout.num_names, measured.total_bytes

    return min(fitting, key=key)
