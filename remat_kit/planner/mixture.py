"""How many layers of each stack get which policy, so that the step costs least and fits: exact, by a formula or a solver.

In: per stack, what each of its policies comes to per layer. Out: counts. A step's bytes are fixed bytes + the sum over layers of
what each keeps + the largest working set of any policy in use. With at most two policies each, one stack has a closed form and
several are joined (`mixture_join`); everything else is an integer program (`mixture_milp`). Ties go to fewer names, then bytes.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from remat_kit.planner.mixture_join import joined_counts
from remat_kit.planner.mixture_milp import solve_counts
from remat_kit.planner.options import Counts, Filled, StackOptions, filled, tie_key

MAX_PAIRED = 1500
"""Policies of a stack up to which all pairs are tried."""
MAX_LAST = 8
"""Policies that are tried for a last layer alone."""

Pair: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What the layers may fill.

    Attributes:
        budget_bytes: Of a device.
        fixed_bytes: Taken whatever the policies.
        working_floor_bytes: What the rest of the step (the loss) needs at its peak; a layer's working set up to it is free.
    """

    budget_bytes: int
    fixed_bytes: int = 0
    working_floor_bytes: int = 0


def fill(stacks: Sequence[StackOptions], room: Room) -> Filled | None:
    """Finds the cheapest counts that fit.

    Args:
        stacks: The stacks of the step.
        room: What they may fill.

    Returns:
        The counts and what they come to, None when nothing fits.
    """
    free, floor = room.budget_bytes - room.fixed_bytes, room.working_floor_bytes
    is_small = all(stack.max_segments <= 2 and len(stack.costs) <= MAX_PAIRED for stack in stacks)
    if is_small and len(stacks) == 1:
        best = _best_pair(stacks[0], room)
        every = [*([] if best is None else [best]), *_with_last_alone(stacks[0], room)]
        counts = min(every, key=lambda found: (_cost(stacks[0], found), *tie_key(stacks, found)), default=None)
    elif is_small:
        counts = joined_counts(stacks, budget_bytes=free, working_floor_bytes=floor)
    else:
        counts = solve_counts(stacks, budget_bytes=free, working_floor_bytes=floor)
    return None if counts is None else filled(stacks, counts, fixed_bytes=room.fixed_bytes, working_floor_bytes=floor)


def smallest(stacks: Sequence[StackOptions], room: Room) -> Filled:
    """The counts with the fewest bytes, whether they fit or not; of equals, the cheapest. No mixture beats one policy here."""
    limits = sorted({bytes_ for stack in stacks for bytes_ in stack.working_bytes} | {room.working_floor_bytes})
    found = []
    for limit in limits:
        picks = [_leanest(stack, limit) for stack in stacks]
        if all(pick is not None for pick in picks):
            counts = tuple(((pick, stack.num_layers),) for pick, stack in zip(picks, stacks, strict=True) if pick is not None)
            found.append(filled(stacks, counts, fixed_bytes=room.fixed_bytes, working_floor_bytes=room.working_floor_bytes))
    return min(found, key=lambda item: (item.total_bytes, item.cost))


def _leanest(stack: StackOptions, working_limit: int) -> int | None:
    allowed = [option for option, working in enumerate(stack.working_bytes) if working <= working_limit]
    return min(allowed, key=lambda option: (stack.layer_bytes[option], stack.costs[option]), default=None)


def _best_pair(stack: StackOptions, room: Room) -> Counts | None:
    """Tries every pair (leaner, richer) with as many richer layers as fit: cost falls with each of them."""
    size, cost = np.array(stack.layer_bytes, dtype=np.int64), np.array(stack.costs, dtype=np.float64)
    working = np.maximum(np.array(stack.working_bytes, dtype=np.int64), room.working_floor_bytes)
    free = room.budget_bytes - room.fixed_bytes
    single = np.flatnonzero(size * stack.num_layers + working <= free)
    candidates: list[Pair] = [(int(option), int(option), stack.num_layers) for option in single]
    if stack.max_segments > 1 and stack.num_layers >= 2 * stack.min_layers:
        candidates += _pairs(stack, size, cost, working, free)
    if not candidates:
        return None
    costs = [cost[lean] * (stack.num_layers - rich_layers) + cost[rich] * rich_layers for lean, rich, rich_layers in candidates]
    limit = min(costs) + abs(min(costs)) * 1e-12
    near = [_counts(pair, stack.num_layers) for pair, value in zip(candidates, costs, strict=True) if value <= limit]
    return min(near, key=lambda counts: tie_key((stack,), counts))


def _pairs(stack: StackOptions, size: np.ndarray, cost: np.ndarray, working: np.ndarray, free: int) -> list[Pair]:
    num_layers = stack.num_layers
    lean, rich = np.nonzero((size[:, None] < size[None, :]) & (cost[:, None] > cost[None, :]))
    room = free - np.maximum(working[lean], working[rich]) - num_layers * size[lean]
    rich_layers = np.minimum(room // (size[rich] - size[lean]), num_layers - stack.min_layers)
    value = cost[lean] * (num_layers - rich_layers) + cost[rich] * rich_layers
    fits = (room >= 0) & (rich_layers >= stack.min_layers)
    if not fits.any():
        return []
    best = value[fits].min()
    keep = np.flatnonzero(fits & (value <= best + abs(best) * 1e-12))
    return [(int(lean[row]), int(rich[row]), int(rich_layers[row])) for row in keep]


def _with_last_alone(stack: StackOptions, room: Room) -> list[Counts]:
    """For each of the policies that cost least, in the last layer alone, the best fillings of the others."""
    if not stack.last_bytes or stack.max_segments < 2 or stack.num_layers < 2:
        return []
    rest = dataclasses.replace(stack, num_layers=stack.num_layers - 1, last_bytes=())
    found: list[Counts] = []
    for last in sorted(range(len(stack.costs)), key=lambda option: stack.costs[option])[:MAX_LAST]:
        left = dataclasses.replace(
            room,
            budget_bytes=room.budget_bytes - stack.last_bytes[last],
            working_floor_bytes=max(room.working_floor_bytes, stack.working_bytes[last]),
        )
        counts = _best_pair(rest, left)
        if counts is not None and stack.layer_bytes[counts[0][-1][0]] < stack.layer_bytes[last]:
            found.append(((*counts[0], (last, 1)),))
    return found


def _cost(stack: StackOptions, counts: Counts) -> float:
    return sum(stack.costs[option] * layers for option, layers in counts[0])


def _counts(pair: Pair, num_layers: int) -> Counts:
    lean, rich, rich_layers = pair
    return (((rich, num_layers),),) if lean == rich else (((lean, num_layers - rich_layers), (rich, rich_layers)),)
