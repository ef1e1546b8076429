"""Layer counts of several stacks, at most two policies in each: exact, by joining the curves of the stacks.

Each stack has a list of fillings (leaner policy, richer policy, layers of the richer one). For each possible largest working set,
the fillings that stay within it form a curve of bytes against cost; the best sum within the room is found along these curves.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_kit.planner.options import Counts, StackOptions, tie_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Fillings:
    """Ways to fill stacks, side by side.

    Attributes:
        size, working, cost: Of each.
        picks: (N, stacks, 3) leaner option, richer option, layers of the richer one.
        names: Names spelled out.
    """

    size: np.ndarray
    working: np.ndarray
    cost: np.ndarray
    names: np.ndarray
    picks: np.ndarray

    def take(self, rows: np.ndarray) -> "Fillings":
        """Some of them, in this order."""
        return Fillings(
            size=self.size[rows], working=self.working[rows], cost=self.cost[rows], names=self.names[rows], picks=self.picks[rows]
        )


def joined_counts(stacks: Sequence[StackOptions], *, budget_bytes: int, working_floor_bytes: int) -> Counts | None:
    """Finds the cheapest counts that fit; of equal costs, fewest names, then fewest bytes.

    Args:
        stacks: The stacks.
        budget_bytes: What kept bytes and the largest working set may fill.
        working_floor_bytes: Least working set.
    """
    every = [fillings_of(stack) for stack in stacks]
    limits = np.unique(np.concatenate([np.maximum(item.working, working_floor_bytes) for item in every]))
    best: list[tuple[float, Counts]] = []
    for limit in limits[limits <= budget_bytes]:
        fronts = [_front(item.take(np.flatnonzero(item.working <= limit))) for item in every]
        if all(len(front.size) for front in fronts):
            joined = functools.reduce(lambda left, right: _front(_sums(left, right)), fronts[:-1])
            best += _cheapest(joined, fronts[-1], budget_bytes - int(limit), stacks)
    if not best:
        return None
    least = min(cost for cost, _ in best)
    near = [counts for cost, counts in best if cost <= least + abs(least) * 1e-12]
    return min(near, key=lambda counts: tie_key(stacks, counts))


@functools.lru_cache(maxsize=64)
def fillings_of(stack: StackOptions) -> Fillings:
    """Every filling of a stack that could be part of the best one."""
    size, working = np.array(stack.layer_bytes, dtype=np.int64), np.array(stack.working_bytes, dtype=np.int64)
    cost, names = np.array(stack.costs), np.array(stack.num_names)
    least = stack.min_layers
    layers = np.arange(least, stack.num_layers - least + 1) if stack.max_segments > 1 else np.arange(0)
    if stack.last_bytes and stack.max_segments > 1 and stack.num_layers > 1:
        layers = np.union1d([1], layers)
    lean, rich = np.nonzero((size[:, None] < size[None, :]) & (cost[:, None] > cost[None, :]))
    single = np.arange(len(size))
    lean = np.concatenate([single, np.repeat(lean, len(layers))])
    count = np.concatenate([np.full(len(size), stack.num_layers), np.tile(layers, len(rich))])
    rich = np.concatenate([single, np.repeat(rich, len(layers))])
    size_of = size[lean] * (stack.num_layers - count) + size[rich] * count
    if stack.last_bytes:
        size_of = np.where((count == 1) & (lean != rich), size_of - size[rich] + np.array(stack.last_bytes)[rich], size_of)
    found = Fillings(
        size=size_of,
        working=np.maximum(working[lean], working[rich]),
        cost=cost[lean] * (stack.num_layers - count) + cost[rich] * count,
        names=names[lean] + names[rich] * (lean != rich),
        picks=np.stack([lean, rich, count], axis=1)[:, None, :],
    )
    return _in_order(found)


def _in_order(found: Fillings) -> Fillings:
    return found.take(np.lexsort((found.working, found.names, found.cost, found.size)))


def _front(found: Fillings) -> Fillings:
    """Of fillings in order of bytes, those that no leaner one equals in cost, nor in cost and names where costs are equal."""
    before = np.concatenate([[np.inf], np.minimum.accumulate(found.cost)[:-1]])
    kept, last_cost, last_names = [], np.inf, 0
    for row in np.flatnonzero(found.cost <= before).tolist():
        if found.cost[row] < last_cost or found.names[row] < last_names:
            kept.append(row)
            last_cost, last_names = found.cost[row], found.names[row]
    return found.take(np.array(kept, dtype=np.int64))


def _sums(left: Fillings, right: Fillings) -> Fillings:
    first, second = (part.ravel() for part in np.indices((len(left.size), len(right.size))))
    found = Fillings(
        size=left.size[first] + right.size[second],
        working=np.maximum(left.working[first], right.working[second]),
        cost=left.cost[first] + right.cost[second],
        names=left.names[first] + right.names[second],
        picks=np.concatenate([left.picks[first], right.picks[second]], axis=1),
    )
    return _in_order(found)


def _cheapest(left: Fillings, right: Fillings, room: int, stacks: Sequence[StackOptions]) -> list[tuple[float, Counts]]:
    """For each filling on the left, the largest one on the right that still fits: cost falls along the curve."""
    partner = np.searchsorted(right.size, room - left.size, side="right") - 1
    rows = np.flatnonzero(partner >= 0)
    if not len(rows):
        return []
    cost = left.cost[rows] + right.cost[partner[rows]]
    best = rows[cost <= cost.min() + abs(cost.min()) * 1e-12]
    found = []
    for row in best.tolist():
        # Equal costs on the right, leaner ones included: ties are decided by names and bytes.
        equal = np.flatnonzero(right.cost <= right.cost[partner[row]] + abs(right.cost[partner[row]]) * 1e-12)
        for other in equal[equal <= partner[row]].tolist():
            picks = np.concatenate([left.picks[row], right.picks[other]])
            counts = tuple(_pairs(stack, pick.tolist()) for stack, pick in zip(stacks, picks, strict=True))
            found.append((float(left.cost[row] + right.cost[other]), counts))
    return found


def _pairs(stack: StackOptions, pick: list[int]) -> tuple[tuple[int, int], ...]:
    lean, rich, count = pick
    return ((rich, stack.num_layers),) if lean == rich else ((lean, stack.num_layers - count), (rich, count))
