"""What the policies of a stack come to, as numbers, and counts of layers over them: what `mixture` and its solver exchange."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Counts: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]
"""Per stack, pairs of option and number of layers, fewest kept bytes first: the stack's segments from the first layer on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """A stack of equal layers and the policies that they may follow; the position in the tuples is the option's number.

    Attributes:
        num_layers: How many layers.
        layer_bytes: What a layer keeps, per option.
        working_bytes: What a layer's backward pass needs besides, per option; the largest in use counts once.
        costs: Of a layer, per option.
        num_names: Names that a segment spells out, per option.
        max_segments: How many options may be in use at once.
        min_layers: Least layers of an option in use beside another one.
        last_bytes: What the last layer keeps, per option, when it is the only one to follow it: that may be fewer layers than
            `min_layers`, and fewer bytes, as they are free again before the loop over the others runs. () = it may not.
    """

    num_layers: int
    layer_bytes: tuple[int, ...]
    working_bytes: tuple[int, ...]
    costs: tuple[float, ...]
    num_names: tuple[int, ...]
    max_segments: int = 2
    min_layers: int = 1
    last_bytes: tuple[int, ...] = ()

    def kept_bytes(self, pairs: Sequence[tuple[int, int]]) -> int:
        """What all layers keep, when so many follow each option, the last one's last."""
        kept = sum(self.layer_bytes[option] * layers for option, layers in pairs)
        last, layers = pairs[-1]
        is_alone = len(pairs) > 1 and layers == 1 and bool(self.last_bytes)
        return kept - self.layer_bytes[last] + self.last_bytes[last] if is_alone else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """Counts and what they come to.

    Attributes:
        counts: See `Counts`.
        total_bytes: Fixed bytes + kept bytes + largest working set.
        kept_bytes: Kept by all layers.
        working_bytes: Largest working set in use, or that of the rest of the step.
        cost: Of all layers.
    """

    counts: Counts
    total_bytes: int
    kept_bytes: int
    working_bytes: int
    cost: float


def filled(stacks: Sequence[StackOptions], counts: Counts, *, fixed_bytes: int, working_floor_bytes: int) -> Filled:
    """Adds up what counts come to, in whole bytes."""
    used = [(stack, option, layers) for stack, pairs in zip(stacks, counts, strict=True) for option, layers in pairs]
    kept = sum(stack.kept_bytes(pairs) for stack, pairs in zip(stacks, counts, strict=True) if pairs)
    working = max([working_floor_bytes, *(stack.working_bytes[option] for stack, option, _ in used)])
    cost = sum(stack.costs[option] * layers for stack, option, layers in used)
    return Filled(counts=counts, total_bytes=fixed_bytes + kept + working, kept_bytes=kept, working_bytes=working, cost=cost)


def tie_key(stacks: Sequence[StackOptions], counts: Counts) -> tuple[int, int]:
    """What decides between equal costs: names that the plan spells out, then bytes kept."""
    used = [(stack, option, layers) for stack, pairs in zip(stacks, counts, strict=True) for option, layers in pairs]
    return (
        sum(stack.num_names[option] for stack, option, _ in used),
        sum(stack.kept_bytes(pairs) for stack, pairs in zip(stacks, counts, strict=True) if pairs),
    )


def ordered(stack: StackOptions, pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Segments from the first layer on: what keeps most comes last, since the backward pass frees it first."""
    return tuple(sorted(pairs, key=lambda pair: (stack.layer_bytes[pair[0]], pair[0])))
