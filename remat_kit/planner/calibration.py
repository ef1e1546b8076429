"""Small compiles, before any of the whole step: what fixed bytes, layers, names and segments really take on this compiler.

In: a ledger that compiles, the stacks. Out: the ledger's model, calibrated. First the leanest policies and the richest, each at
two depths (fixed bytes, bytes per layer, what names really take), then policies that are least certain, a last layer alone (whose
values no loop holds), at last those of the plan itself. A loop is one program at any depth; modules one after the other are not:
there the line through two depths is checked near the full one, and given up where it does not hold.
"""

from collections.abc import Sequence

from remat_kit.planner.closure import LayerChoice
from remat_kit.planner.layout import Layout, LayoutSegment, PlannedStack, last_alone, leanest, shrink, uniform
from remat_kit.planner.ledger import Ledger
from remat_kit.planner.model import MemoryModel, name_features
from remat_kit.planner.solve import solve, solve_smallest
from remat_kit.planning import Objective
from remat_kit.policy import NoRemat

FIRST_MARGIN = 0.003
"""The part of the budget that the first plan stays below it."""
MOST_BENT = 0.005
"""How far, as a part of the total, the line through two shallow depths may miss a deep one and still stand for it."""


def calibration_depths(stacks: Sequence[PlannedStack]) -> tuple[int, ...]:
    """Two depths well below the full one, none when the stacks are too short for that."""
    deepest = max(stack.num_layers for stack in stacks)
    if deepest >= 8:
        return (4, min(16, max(6, deepest // 2)))
    return (2, 4) if deepest >= 6 else ()


def calibrate(
    ledger: Ledger, stacks: Sequence[PlannedStack], *, budget_bytes: int, depths: Sequence[int], objective: Objective
) -> None:
    """Measures small variants until the policies of the plan that the model would choose have been measured.

    Args:
        ledger: Where measurements go.
        stacks: The stacks.
        budget_bytes: Of a device.
        depths: Small depths, at least one; the smallest and the largest are used, as far as they stand for the full one.
        objective: What is made least of.
    """
    lean = leanest(stacks)
    rich = uniform(stacks, [min(stack.choices, key=lambda choice: _poverty(choice, objective)) for stack in stacks])
    low, high = _lean_line(ledger, stacks, lean, low=min(depths), high=max(depths))
    ledger.observe_small([shrink(rich, high)], depth=high)
    if high - low > 1:  # what layers keep grows with depth, a working set does not: only two depths tell them apart
        ledger.observe_small([shrink(rich, low)], depth=low)
    for _ in range(min(ledger.limits.num_probes, max(1, ledger.num_small_left - 2))):
        ledger.observe_small([shrink(_least_certain(ledger.model(), stacks), high)], depth=high)
    _probe_last_layer(ledger, stacks, rich, depth=high)
    while ledger.can_measure_small:
        fresh = _variants(ledger, stacks, budget_bytes, (low, high), objective)
        if not fresh:
            return
        for depth, layout in fresh:
            ledger.observe_small([layout], depth=depth)


def _lean_line(ledger: Ledger, stacks: Sequence[PlannedStack], lean: Layout, *, low: int, high: int) -> tuple[int, int]:
    """Measures the leanest policies at two depths that stand for the full one, and says which."""
    for depth in dict.fromkeys((low, high)):
        ledger.observe_small([shrink(lean, depth)], depth=depth)
    deepest = max(stack.num_layers for stack in stacks) - 1
    if not any(stack.is_unrolled for stack in stacks) or deepest <= high:
        return low, high
    ledger.observe_small([shrink(lean, deepest)], depth=deepest)
    predicted, total = ledger.log[-1].predicted_bytes, ledger.log[-1].total_bytes
    if predicted is not None and abs(predicted - total) <= MOST_BENT * total:
        return low, high
    ledger.forget(depth=high)
    ledger.observe_small([shrink(lean, deepest - 1)], depth=deepest - 1)
    return deepest - 1, deepest


def _probe_last_layer(ledger: Ledger, stacks: Sequence[PlannedStack], rich: Layout, *, depth: int) -> None:
    """Measures the richest policy in the last layer alone, over the richest of those seen below it."""
    model, chosen = ledger.model(), last_alone(stacks)

    def segments(stack: PlannedStack, last: LayerChoice) -> tuple[LayoutSegment, ...]:
        seen = [each for each in stack.choices if model.has_seen(stack.name, each) and each.saved_bytes < last.saved_bytes]
        if stack.name != chosen or not seen:
            return (LayoutSegment(choice=last, num_layers=stack.num_layers),)
        others = max(seen, key=lambda choice: choice.saved_bytes)
        return (LayoutSegment(choice=others, num_layers=stack.num_layers - 1), LayoutSegment(choice=last, num_layers=1))

    pairs = zip(stacks, rich.stacks, strict=True)
    layout = Layout(stacks=tuple((stack.name, segments(stack, found[0].choice)) for stack, (_, found) in pairs))
    if chosen is not None and layout.is_mixed:
        ledger.observe_small([shrink(layout, depth)], depth=depth)


def _poverty(choice: LayerChoice, objective: Objective) -> tuple[bool, float, int]:
    """Least for the policy with most to tell about names; `none` keeps what has no name too, so it tells nothing of them."""
    return isinstance(choice.policy, NoRemat), choice.cost(objective), choice.num_names


def _least_certain(model: MemoryModel, stacks: Sequence[PlannedStack]) -> Layout:
    """In each stack, the policy with the largest doubt in the fewest bytes: its measurement tells names apart."""

    def pick(stack: PlannedStack) -> LayerChoice:
        named = [choice for choice in stack.choices if not isinstance(choice.policy, NoRemat)]
        fresh = [choice for choice in named if not model.has_seen(stack.name, choice)]
        return max(fresh or stack.choices, key=lambda choice: _doubt(model, stack.name, choice))

    return uniform(stacks, [pick(stack) for stack in stacks])


def _doubt(model: MemoryModel, stack: str, choice: LayerChoice) -> float:
    return model.spread(name_features(stack, choice)) ** 2 / max(1, choice.saved_bytes)


def _variants(
    ledger: Ledger, stacks: Sequence[PlannedStack], budget_bytes: int, depths: tuple[int, int], objective: Objective
) -> list[tuple[int, Layout]]:
    """Small variants, not measured yet, of the plan that the model would choose: they tell what its policies really keep."""
    model, (low, high) = ledger.model(), depths
    target = solve(model, stacks, budget_bytes=int(budget_bytes * (1 - FIRST_MARGIN)), objective=objective)
    target = target or solve_smallest(model, stacks, objective=objective)
    variants = [(high, 0.0), (high, 1.0), (low, 0.5)] if target.is_mixed else [(high, 0.5), (low, 0.5)]
    small = [(depth, shrink(target, depth, lean_share=share)) for depth, share in variants]
    return [(depth, layout) for depth, layout in small if not ledger.is_known(layout, depth)]
