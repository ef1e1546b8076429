"""Layer counts as an integer program for HiGHS: several stacks, or more than two policies in one.

Unknowns per stack and option: number of layers (integer) and whether it is in use (binary); and the largest working set. Bytes
are scaled by the room, costs by the largest one. Solvers are exact up to a tolerance only: an answer that is over by some bytes
is solved again with as much less room, so what comes out fits in whole bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_kit.planner.options import Counts, StackOptions, filled, ordered
from remat_kit.planner.solver import Rows, at_most, minimise

MAX_RETRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """All options of all stacks, side by side.

    Attributes:
        stack: Number of the stack of each option.
        size, working, cost, names: Of each option.
        length: Number of layers of its stack.
        least: Least layers of each option in use.
    """

    stack: np.ndarray
    size: np.ndarray
    working: np.ndarray
    cost: np.ndarray
    names: np.ndarray
    length: np.ndarray
    least: np.ndarray


def solve_counts(stacks: Sequence[StackOptions], *, budget_bytes: int, working_floor_bytes: int) -> Counts | None:
    """Finds the cheapest counts that fit; of equal costs, fewest names, then fewest bytes.

    Args:
        stacks: The stacks.
        budget_bytes: What kept bytes and the largest working set may fill.
        working_floor_bytes: Least working set.
    """
    columns, limit = _columns(stacks), budget_bytes
    for _ in range(MAX_RETRIES):
        if limit <= 0:
            return None
        solved = _lexicographic(stacks, columns, limit, working_floor_bytes)
        if solved is None:
            return None
        counts = _counts(stacks, columns, solved)
        total = filled(stacks, counts, fixed_bytes=0, working_floor_bytes=working_floor_bytes).total_bytes
        if total <= budget_bytes:
            return counts
        limit -= total - budget_bytes
    return None


def _columns(stacks: Sequence[StackOptions]) -> Columns:
    def joined(parts: list[tuple[float, ...]]) -> np.ndarray:
        return np.array([item for part in parts for item in part], dtype=np.float64)

    sizes = [len(stack.costs) for stack in stacks]
    return Columns(
        stack=np.repeat(np.arange(len(stacks)), sizes),
        size=joined([stack.layer_bytes for stack in stacks]),
        working=joined([stack.working_bytes for stack in stacks]),
        cost=joined([stack.costs for stack in stacks]),
        names=joined([stack.num_names for stack in stacks]),
        length=np.repeat([float(stack.num_layers) for stack in stacks], sizes),
        least=np.repeat([float(min(stack.min_layers, stack.num_layers)) for stack in stacks], sizes),
    )


def _lexicographic(stacks: Sequence[StackOptions], columns: Columns, limit: int, floor: int) -> np.ndarray | None:
    """Least cost, then least names and (as a fraction of a name) bytes at that cost."""
    num = len(columns.cost)
    rows = _rows(stacks, columns, limit)
    lower = np.concatenate([np.zeros(2 * num), [floor / limit]])
    upper = np.concatenate([columns.length, np.ones(num), [max(1.0, floor / limit)]])
    is_whole = np.concatenate([np.ones(2 * num), [0]])
    cost = np.concatenate([columns.cost / (columns.cost.max(initial=0) or 1.0), np.zeros(num + 1)])
    tie = np.concatenate([columns.size / limit / 2, columns.names, [0.0]])
    first = minimise(cost, rows, lower=lower, upper=upper, is_whole=is_whole)
    if first is None:
        return None
    best = float(cost[:num] @ np.round(first[:num]))
    same_cost = at_most(cost, best + 1e-9 * max(1.0, abs(best)))
    second = minimise(tie, [*rows, same_cost], lower=lower, upper=upper, is_whole=is_whole)
    return first if second is None else second


def _rows(stacks: Sequence[StackOptions], columns: Columns, limit: int) -> list[Rows]:
    num, identity = len(columns.cost), np.eye(len(columns.cost))
    member = (columns.stack[None, :] == np.arange(len(stacks))[:, None]).astype(float)
    none, one = np.zeros_like(member), np.zeros((len(stacks), 1))
    lengths = np.array([float(stack.num_layers) for stack in stacks])
    segments = np.array([float(stack.max_segments) for stack in stacks])
    return [
        Rows(matrix=np.hstack([member, none, one]), lower=lengths, upper=lengths),
        Rows(matrix=np.hstack([none, member, one]), lower=1.0, upper=segments),
        Rows(matrix=np.hstack([identity, -np.diag(columns.length), np.zeros((num, 1))]), upper=0.0),
        Rows(matrix=np.hstack([identity, -np.diag(columns.least), np.zeros((num, 1))]), lower=0.0),
        Rows(matrix=np.hstack([np.zeros((num, num)), np.diag(columns.working / limit), -np.ones((num, 1))]), upper=0.0),
        at_most(np.concatenate([columns.size / limit, np.zeros(num), [1.0]]), 1.0),
    ]


def _counts(stacks: Sequence[StackOptions], columns: Columns, solved: np.ndarray) -> Counts:
    layers = np.round(solved[: len(columns.cost)]).astype(int)
    counts = []
    for number, stack in enumerate(stacks):
        found = layers[columns.stack == number]
        counts.append(ordered(stack, [(option, layers) for option, layers in enumerate(found.tolist()) if layers]))
    return tuple(counts)
