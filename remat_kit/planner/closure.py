"""What a layer's policy comes to: bytes kept, what runs again in the backward pass, and what that brings to life.

In: a `BlockGraph` and combinations of kept names. Out: `LayerChoice`s. A value that is needed and not kept costs its producer,
which needs its inputs, and so on, each producer once (the recompute closure). What nothing needs costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_kit.planner.blocks import BlockGraph, op_flops, op_seconds
from remat_kit.planning import Objective
from remat_kit.policy import FULL, NONE, Action, ByKind, Kind, Named, Policy, Remat, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """What offloading may move.

    Attributes:
        window_bytes: At most so many bytes per layer: what the link moves while a layer computes.
        min_bytes: Names below it are not worth a transfer.
    """

    window_bytes: int
    min_bytes: int = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """A policy for one layer and what it comes to, per layer and device.

    Attributes:
        policy: The policy.
        saved: Names kept on the device.
        offloaded: Names kept on the host.
        saved_bytes: Kept on the device, the block's input included.
        host_bytes: Kept on the host.
        working_bytes: What recomputation and transfers back bring to life while the layer's backward pass runs.
        flops: Recomputed.
        seconds: Of recomputation.
        kept_bytes: Pairs of name and bytes of what is kept on the device.
    """

    policy: Policy
    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    saved_bytes: int
    host_bytes: int = 0
    working_bytes: int
    flops: int
    seconds: float
    kept_bytes: tuple[tuple[str, int], ...] = ()

    @property
    def num_names(self) -> int:
        """How many names the policy spells out."""
        return len(self.saved) + len(self.offloaded)

    def cost(self, objective: Objective) -> float:
        """What the objective counts."""
        return self.seconds if objective is Objective.TIME else self.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Closures:
    """What each of N combinations of kept names comes to.

    Attributes:
        replayed: (N, operations) whether the operation runs again.
        flops: (N,) exact.
        seconds: (N,).
        working_bytes: (N,).
        is_allowed: (N,) whether everything that runs again may.
    """

    replayed: np.ndarray
    flops: np.ndarray
    seconds: np.ndarray
    working_bytes: np.ndarray
    is_allowed: np.ndarray


def priced_choices(
    block: BlockGraph, saved: np.ndarray, offloaded: np.ndarray, *, host: HostLink | None = None
) -> tuple[LayerChoice, ...]:
    """Prices combinations of kept names, in exact integers, and drops those that are not allowed.

    Args:
        block: The layer.
        saved: (N, names) whether a name is kept on the device.
        offloaded: (N, names) whether it is kept on the host.
        host: Bounds the bytes on the host.
    """
    closures = close(block, saved | offloaded)
    sizes = np.array([block.name_bytes(name) for name in block.names], dtype=np.int64)
    device, moved = saved @ sizes + block.input_bytes, offloaded @ sizes
    window = host.window_bytes if host is not None else 0
    made = []
    for row in np.flatnonzero(closures.is_allowed & (moved <= window)):
        kept = tuple(name for name, flag in zip(block.names, saved[row], strict=True) if flag)
        away = tuple(name for name, flag in zip(block.names, offloaded[row], strict=True) if flag)
        made.append(
            LayerChoice(
                policy=policy_for(kept, away, rule_names=block.rule_names),
                saved=kept,
                offloaded=away,
                saved_bytes=int(device[row]),
                host_bytes=int(moved[row]),
                working_bytes=int(closures.working_bytes[row] + moved[row]),
                flops=int(closures.flops[row]),
                seconds=float(closures.seconds[row]),
                kept_bytes=tuple(
                    (name, int(size)) for name, size, flag in zip(block.names, sizes, saved[row], strict=True) if flag
                ),
            )
        )
    return tuple(made)


def none_choice(block: BlockGraph) -> LayerChoice:
    """No rematerialization: everything that the backward pass reads is kept, named or not, and nothing runs again."""
    return LayerChoice(policy=NONE, saved_bytes=block.read_bytes, working_bytes=0, flops=0, seconds=0.0)


def close(block: BlockGraph, kept: np.ndarray) -> Closures:
    """The recomputation that combinations of kept names cause.

    Args:
        block: The layer.
        kept: (N, names) whether a name is kept, on device or host.
    """
    column = {name: number for number, name in enumerate(block.names)}
    num_rows = len(kept)
    needed = np.tile([value.is_read for value in block.values], (num_rows, 1))
    replayed = np.zeros((num_rows, len(block.ops)), dtype=bool)
    working = np.zeros(num_rows, dtype=np.int64)
    for number in reversed(range(len(block.ops))):
        op = block.ops[number]
        for output in op.outputs:
            value = block.values[output]
            missing = needed[:, output] & ~kept[:, column[value.name]] if value.name is not None else needed[:, output]
            replayed[:, number] |= missing
        read_bytes = sum(block.values[output].num_bytes for output in op.outputs if block.values[output].is_read)
        working += read_bytes * replayed[:, number]  # a kept output is written again too, when its producer makes others
        needed[:, op.inputs] |= replayed[:, number : number + 1]
    fixed = np.array([not op.is_replayable for op in block.ops], dtype=bool)
    return Closures(
        replayed=replayed,
        flops=replayed @ np.array(op_flops(block), dtype=np.int64),
        seconds=replayed @ np.array(op_seconds(block), dtype=np.float64),
        working_bytes=working,
        is_allowed=np.logical_not(replayed[:, fixed].any(axis=1)),
    )


def policy_for(saved: Sequence[str], offloaded: Sequence[str], *, rule_names: Sequence[str] = ()) -> Policy:
    """The policy that keeps these names and no others."""
    rules: list[Rule] = [ByKind(Kind(name)) for name in saved if name in rule_names]
    named = tuple(name for name in saved if name not in rule_names)
    if named:
        rules.append(Named(Action.SAVE, named))
    if offloaded:
        rules.append(Named(Action.OFFLOAD, tuple(offloaded)))
    return Remat(tuple(rules)) if rules else FULL


def movable_names(block: BlockGraph, host: HostLink | None) -> tuple[str, ...]:
    """Names that may be offloaded: big enough to be worth a transfer, small enough for the window."""
    if host is None:
        return ()
    names = (name for name in block.names if name not in block.rule_names)
    return tuple(name for name in names if host.min_bytes <= block.name_bytes(name) <= host.window_bytes)
