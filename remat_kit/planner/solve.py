"""The best layout under a model: from choices and coefficients to counts and back. Measures nothing."""

from collections.abc import Sequence

from remat_kit.planner.layout import Layout, LayoutSegment, PlannedStack
from remat_kit.planner.mixture import fill, smallest
from remat_kit.planner.model import MemoryModel, options_of, room_of
from remat_kit.planner.options import Counts, Filled, StackOptions, ordered
from remat_kit.planning import Objective


def solve(
    model: MemoryModel, stacks: Sequence[PlannedStack], *, budget_bytes: int, objective: Objective, optimism: float = 0.0
) -> Layout | None:
    """The cheapest layout that the model expects to fit, None when it expects none to.

    Args:
        model: Predicts bytes.
        stacks: The stacks.
        budget_bytes: Of a device.
        objective: What is made least of.
        optimism: Standard deviations by which kept bytes are taken to be fewer than expected.
    """
    found: list[tuple[float, int, Layout]] = []
    for most in dict.fromkeys((1, max(stack.max_segments for stack in stacks))):
        options = options_of(model, stacks, objective=objective, max_segments=most, optimism=optimism)
        answer = fill(options, room_of(model, budget_bytes, is_mixed=most > 1))
        if answer is not None:
            layout = _layout(stacks, options, answer.counts)
            found.append((answer.cost, layout.num_names, layout))
    return min(found, key=lambda item: item[:2])[2] if found else None


def solve_smallest(model: MemoryModel, stacks: Sequence[PlannedStack], *, objective: Objective) -> Layout:
    """The layout with the fewest bytes by the model."""
    options = options_of(model, stacks, objective=objective, max_segments=1)
    answer: Filled = smallest(options, room_of(model, 0, is_mixed=False))
    return _layout(stacks, options, answer.counts)


def cost_of(layout: Layout, stacks: Sequence[PlannedStack], objective: Objective) -> float:
    """Predicted seconds or FLOPs of all recomputation."""
    repeats = {stack.name: stack.repeats for stack in stacks}
    return sum(segment.choice.cost(objective) * segment.num_layers * repeats[name] for name, segment in layout.segments)


def _layout(stacks: Sequence[PlannedStack], options: Sequence[StackOptions], counts: Counts) -> Layout:
    parts = []
    for stack, option, pairs in zip(stacks, options, counts, strict=True):
        segments = tuple(
            LayoutSegment(choice=stack.choices[number], num_layers=layers) for number, layers in ordered(option, pairs)
        )
        parts.append((stack.name, segments))
    return Layout(stacks=tuple(parts))
