"""A plan as the planner handles it: per stack, its layer policies and how many layers follow each; and its text.

In: blocks with their choices. Out: `Layout`s, which shrink to a smaller depth for calibration and print as a plan of the grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from remat_kit.planner.blocks import BlockGraph
from remat_kit.planner.closure import LayerChoice
from remat_kit.plans import Plan, Segment, StackPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStack:
    """A stack of equal layers to plan for.

    Attributes:
        name: What plans call it.
        num_layers: How many layers.
        block: One of them.
        choices: Policies that its layers may follow.
        max_segments: How many of them at once: 1 for a stack that can't mix.
        repeats: How often the stack runs in a step (micro-batches): its costs count so often, its bytes once.
        is_unrolled: Whether its layers are modules one after the other, not a loop.
    """

    name: str
    num_layers: int
    block: BlockGraph
    choices: tuple[LayerChoice, ...]
    max_segments: int = 2
    repeats: int = 1
    is_unrolled: bool = False

    def __post_init__(self) -> None:
        assert self.choices, f"stack {self.name} has no policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSegment:
    """Consecutive layers under one policy.

    Attributes:
        choice: The policy and what it comes to.
        num_layers: At least 1.
    """

    choice: LayerChoice
    num_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan for every stack.

    Attributes:
        stacks: Pairs of stack name and its segments, first layer first.
    """

    stacks: tuple[tuple[str, tuple[LayoutSegment, ...]], ...]

    @property
    def is_mixed(self) -> bool:
        """Whether any stack follows more than one policy."""
        return any(len(segments) > 1 for _, segments in self.stacks)

    @property
    def segments(self) -> tuple[tuple[str, LayoutSegment], ...]:
        """Every segment with the name of its stack."""
        return tuple((name, segment) for name, segments in self.stacks for segment in segments)

    @property
    def depth(self) -> int:
        """Layers of its longest stack."""
        return max(sum(segment.num_layers for segment in segments) for _, segments in self.stacks)

    @property
    def num_names(self) -> int:
        """Names that its text spells out."""
        return sum(segment.choice.num_names for _, segment in self.segments)

    def __str__(self) -> str:
        return str(plan_of(self))


def plan_of(layout: Layout) -> Plan:
    """The plan in the grammar's records; one stack goes without its name."""
    parts = []
    for name, segments in layout.stacks:
        listed = tuple(Segment(segment.choice.policy, segment.num_layers if len(segments) > 1 else None) for segment in segments)
        parts.append((name if len(layout.stacks) > 1 else None, StackPlan(listed)))
    return Plan(tuple(parts))


def uniform(stacks: Sequence[PlannedStack], picks: Sequence[LayerChoice]) -> Layout:
    """One policy for each stack."""
    return Layout(
        stacks=tuple(
            (stack.name, (LayoutSegment(choice=pick, num_layers=stack.num_layers),))
            for stack, pick in zip(stacks, picks, strict=True)
        )
    )


def last_alone(stacks: Sequence[PlannedStack]) -> str | None:
    """The stack whose last layer may follow a policy of its own: its backward pass follows its forward pass at once.

    What such a layer keeps is free again before the loop over the layers before it runs backward, where the peak is.
    """
    last = stacks[-1]
    return last.name if last.num_layers >= 3 and last.max_segments > 1 else None


def leanest(stacks: Sequence[PlannedStack]) -> Layout:
    """The policies that keep least."""
    return uniform(stacks, [min(stack.choices, key=lambda choice: choice.saved_bytes) for stack in stacks])


def shrink(layout: Layout, depth: int, *, lean_share: float = 0.5) -> Layout:
    """The same policies in fewer layers.

    Args:
        layout: A plan.
        depth: Layers of each stack that has more.
        lean_share: Share of a mixed stack's layers for its first segments together; every segment gets 2 layers where depth
            allows, since compilers unroll a loop of one.
    """
    return Layout(
        stacks=tuple(
            (name, _shrunk(segments, min(depth, sum(s.num_layers for s in segments)), lean_share))
            for name, segments in layout.stacks
        )
    )


def _shrunk(segments: tuple[LayoutSegment, ...], depth: int, lean_share: float) -> tuple[LayoutSegment, ...]:
    if len(segments) > 1 and segments[-1].num_layers == 1 and depth > 1:  # a last layer alone stays alone
        return (*_shrunk(segments[:-1], depth - 1, lean_share), segments[-1])
    least = 2 if depth >= 2 * len(segments) else 1
    if len(segments) > depth:  # too few layers for all: keep the last policies
        segments = segments[-depth:]
    spare = depth - least * len(segments)
    first = round(spare * lean_share) if len(segments) > 1 else 0
    counts = [least] * len(segments)
    counts[0] += first
    counts[-1] += spare - first
    return tuple(LayoutSegment(choice=segment.choice, num_layers=count) for segment, count in zip(segments, counts, strict=True))
