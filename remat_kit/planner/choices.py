"""The worthwhile policies of one layer: every subset of its names, with the recomputation it causes, reduced to the best ones.

In: a `BlockGraph`. Out: `LayerChoice`s, of which none beats another in bytes, cost, working set, host bytes and names at once.
Small blocks are enumerated, large ones solved (`choices_milp`).

References: Beaumont et al. (Rockmate, ICML 2023) for Pareto sets per block; Jain et al. (Checkmate, MLSys 2020) for the closure.
"""

from collections.abc import Sequence

import numpy as np

from remat_kit.errors import PolicyError
from remat_kit.planner.blocks import BlockGraph
from remat_kit.planner.choices_milp import solved_choices
from remat_kit.planner.closure import HostLink, LayerChoice, movable_names, none_choice, priced_choices
from remat_kit.planning import Objective

MAX_ENUMERATED = 60_000
"""Combinations of names that are enumerated; above, a solver picks them."""


def layer_choices(
    block: BlockGraph, *, objective: Objective = Objective.TIME, host: HostLink | None = None, with_none: bool = False
) -> tuple[LayerChoice, ...]:
    """The policies of a layer that are worth considering.

    Args:
        block: The layer.
        objective: What is made least of.
        host: What may be offloaded; None = nothing.
        with_none: Whether no rematerialization at all is one of them.

    Returns:
        Fewest bytes first.

    Raises:
        PolicyError: Something that must not run again can't be kept by any name.
    """
    num_names, movable = len(block.names), movable_names(block, host)
    small = 2 ** (num_names - len(movable)) * 3 ** len(movable) <= MAX_ENUMERATED
    found = all_choices(block, host=host) if small else solved_choices(block, objective=objective, host=host)
    if with_none:
        found = (*found, none_choice(block))
    if not found:
        fixed = ", ".join(sorted({op.kind for op in block.ops if not op.is_replayable}))
        raise PolicyError(f"no policy keeps what must not run again ({fixed}): name its outputs with checkpoint_name.")
    return pareto_choices(found, objective=objective)


def all_choices(block: BlockGraph, *, host: HostLink | None = None) -> tuple[LayerChoice, ...]:
    """Every allowed combination of names, worthwhile or not, fewest names first."""
    states = combinations(block, host)
    saved, offloaded = states == 1, states == 2
    return priced_choices(block, saved, offloaded, host=host)


def combinations(block: BlockGraph, host: HostLink | None) -> np.ndarray:
    """(N, names): 0 recompute, 1 save, 2 offload; fewest kept names first, so that ties go to simpler policies."""
    movable = movable_names(block, host)
    states = np.zeros((1, 0), dtype=np.int8)
    for name in block.names:
        options = np.arange(3 if name in movable else 2, dtype=np.int8)
        states = np.hstack([np.repeat(states, len(options), axis=0), np.tile(options, len(states))[:, None]])
    return states[np.argsort((states > 0).sum(axis=1), kind="stable")]


def pareto_choices(choices: Sequence[LayerChoice], *, objective: Objective) -> tuple[LayerChoice, ...]:
    """Drops every choice that another one equals or beats in everything that counts; of equals, the first stays.

    Working set counts together with the kept bytes: at least one layer keeps them, so a choice that keeps b more bytes to work
    with at most b less never makes room.
    """
    if not choices:
        return ()
    table = np.array(
        [
            (
                choice.saved_bytes,
                choice.cost(objective),
                choice.saved_bytes + choice.working_bytes,
                choice.host_bytes,
                choice.num_names,
            )
            for choice in choices
        ],
        dtype=np.float64,
    )
    return tuple(choices[row] for row in pareto_rows(table))


def pareto_rows(table: np.ndarray) -> list[int]:
    """Rows that no other row equals or beats in every column, in lexicographic order; of equal rows, the first."""
    order = np.lexsort((np.arange(len(table)), *table.T[::-1]))
    kept = np.empty_like(table)
    rows: list[int] = []
    for row in order:
        if not (kept[: len(rows)] <= table[row]).all(axis=1).any():
            kept[len(rows)] = table[row]
            rows.append(int(row))
    return rows
