"""The policies of a layer with too many names to enumerate: a small integer program per budget, solved by HiGHS.

In: a `BlockGraph`. Out: `LayerChoice`s along the curve of bytes against cost, each optimal for its bytes. Binary unknowns:
name saved, name offloaded, operation run again. A needed value is kept or made again; an operation run again needs its inputs.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from remat_kit.planner.blocks import BlockGraph, op_flops, op_seconds
from remat_kit.planner.closure import HostLink, LayerChoice, movable_names, priced_choices
from remat_kit.planner.solver import Rows, at_most, minimise
from remat_kit.planning import Objective

NUM_POINTS = 48
"""Budgets between least and most bytes that are solved for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The part of the integer program that all budgets share; unknowns are saved names, offloaded names, operations.

    Attributes:
        closure: Rows `closure @ x >= demand`.
        demand: Right-hand side.
        sizes: Bytes of each name, scaled to at most 1.
        costs: Of each operation, scaled to at most 1.
        upper: Upper bound of each unknown: 0 where it is not allowed.
        window: Most offloaded bytes, scaled as `sizes`.
    """

    closure: csr_array
    demand: np.ndarray
    sizes: np.ndarray
    costs: np.ndarray
    upper: np.ndarray
    window: float


def solved_choices(
    block: BlockGraph, *, objective: Objective, host: HostLink | None, num_points: int = NUM_POINTS
) -> tuple[LayerChoice, ...]:
    """Optimal policies for evenly spaced bytes, from the fewest possible to where nothing is left to gain.

    Args:
        block: The layer.
        objective: What is made least of.
        host: What may be offloaded; None = nothing.
        num_points: Budgets in between.
    """
    program = _program(block, objective, host)
    most, least = _solve(program, None), _solve(program, None, by_bytes=True)
    if most is None or least is None:
        return ()
    num_names = len(program.sizes)
    low, high = (float(program.sizes @ x[:num_names]) for x in (least, most))
    found = [least, most]
    for limit in np.linspace(low, high, num_points)[:-1]:
        solved = _solve(program, float(limit))
        if solved is not None:
            found.append(solved)
    table = np.unique(np.array(found)[:, : 2 * num_names] > 0.5, axis=0)
    return priced_choices(block, table[:, :num_names], table[:, num_names:], host=host)


def _solve(program: Program, limit: float | None, *, by_bytes: bool = False) -> np.ndarray | None:
    """Least cost within a limit of bytes, then fewest bytes and names at that cost; or fewest bytes first."""
    num_names, num_ops = len(program.sizes), len(program.costs)
    device = np.concatenate([program.sizes, np.zeros(num_names + num_ops)])
    cost = np.concatenate([np.zeros(2 * num_names), program.costs])
    rows = [Rows(matrix=program.closure, lower=program.demand), at_most(_host_row(program), program.window)]
    if limit is not None:
        rows.append(at_most(device, limit))
    first, second = (device, cost) if by_bytes else (cost, device)
    solved = _minimise(program, first, rows)
    if solved is None:
        return None
    tie = second + np.concatenate([np.full(2 * num_names, 1e-5), np.zeros(num_ops)])
    refined = _minimise(program, tie, [*rows, at_most(first, float(first @ solved) + 1e-9)])
    return solved if refined is None else refined


def _minimise(program: Program, goal: np.ndarray, rows: list[Rows]) -> np.ndarray | None:
    solved = minimise(goal, rows, lower=0.0, upper=program.upper, is_whole=np.ones(len(goal)))
    return None if solved is None else np.round(solved)


def _host_row(program: Program) -> np.ndarray:
    return np.concatenate([np.zeros(len(program.sizes)), program.sizes, np.zeros(len(program.costs))])


def _program(block: BlockGraph, objective: Objective, host: HostLink | None) -> Program:
    sizes = np.array([block.name_bytes(name) for name in block.names], dtype=np.float64)
    costs = np.array(op_seconds(block) if objective is Objective.TIME else op_flops(block), dtype=np.float64)
    scale = max(1.0, sizes.max(initial=0))
    movable = movable_names(block, host)
    closure, demand = _closure_rows(block)
    return Program(
        closure=closure,
        demand=demand,
        sizes=sizes / scale,
        costs=costs / (costs.max(initial=0) or 1.0),
        upper=np.concatenate(
            [np.ones(len(sizes)), [float(name in movable) for name in block.names], [float(op.is_replayable) for op in block.ops]]
        ),
        window=(host.window_bytes if host is not None else 0) / scale,
    )


def _closure_rows(block: BlockGraph) -> tuple[csr_array, np.ndarray]:
    """Rows: saved + offloaded + replayed(maker) >= 1 of what is read, >= replayed(op) of what an op needs; no name twice."""
    names = {name: number for number, name in enumerate(block.names)}
    maker = {value: number for number, op in enumerate(block.ops) for value in op.outputs}
    num_names = len(names)
    wanted = [(value, None) for value in maker if block.values[value].is_read]
    wanted += [(value, number) for number, op in enumerate(block.ops) for value in op.inputs if value in maker]
    cells: list[tuple[int, int, float]] = []
    demand: list[float] = []
    for row, (value, reader) in enumerate(wanted):
        cells.append((row, 2 * num_names + maker[value], 1.0))
        name = block.values[value].name
        if name is not None:
            cells += [(row, names[name], 1.0), (row, num_names + names[name], 1.0)]
        if reader is not None:
            cells.append((row, 2 * num_names + reader, -1.0))
        demand.append(1.0 if reader is None else 0.0)
    for number in range(num_names):
        cells += [(len(demand), number, -1.0), (len(demand), num_names + number, -1.0)]
        demand.append(-1.0)
    rows, columns, entries = (list(part) for part in zip(*cells, strict=True)) if cells else ([], [], [])
    shape = (len(demand), 2 * num_names + len(block.ops))
    return csr_array((entries, (rows, columns)), shape=shape), np.array(demand)
