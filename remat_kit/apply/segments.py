"""The loops that a stack's plan asks for: from a `StackPlan` to a tree of `Loop` and `Groups`, which is plain data.

A `Loop` runs consecutive layers under one policy, and each layer keeps what the policy says. `Groups` repeats a list of such
nodes and keeps the input of each group only; what is inside is made again, one group at a time, in the backward pass. Groups of
groups of two give Chen's recursive scheme: memory and extra forward passes both grow with the logarithm of the depth.

Reference: Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never

from remat_kit.apply.function import rules_of
from remat_kit.errors import PolicyError
from remat_kit.plans import StackPlan
from remat_kit.policy import Remat

GroupOption: TypeAlias = int | Literal["sqrt", "recursive"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """Consecutive layers under one policy.

    Attributes:
        start: First layer, counted from the start of the group (or stack) that holds this node.
        num_layers: How many layers.
        rules: What each layer keeps beside its input; None = no rematerialization.
    """

    start: int
    num_layers: int
    rules: Remat | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Equal groups of consecutive layers, of which only the inputs are kept.

    Attributes:
        start: First layer, counted from the start of the group (or stack) that holds this node.
        num_groups: How many groups.
        nodes: The loops of one group.
    """

    start: int
    num_groups: int
    nodes: tuple["Node", ...]


Node: TypeAlias = Loop | Groups


def num_layers_of(node: Node) -> int:
    """Layers that a node runs."""
    match node:
        case Loop():
            return node.num_layers
        case Groups():
            return node.num_groups * group_length(node)
        case _:
            assert_never(node)


def group_length(groups: Groups) -> int:
    """Layers of one group."""
    return sum(num_layers_of(node) for node in groups.nodes)


def build_nodes(plan: StackPlan, *, group: GroupOption) -> tuple[Node, ...]:
    """Lays out the loops of a stack.

    Args:
        plan: Segments with their counts; neighbours with equal policies become one loop.
        group: How `full` segments keep the inputs of only some layers; see `remat_kit.stack`.

    Returns:
        Nodes that cover every layer once, first layer first.

    Raises:
        PolicyError: `group` is given and no segment can follow it.
    """
    nodes: list[Node] = []
    start, num_grouped = 0, 0
    for rules, num_layers in _merged(plan):
        if group is not None and rules == Remat() and num_layers > 1:
            nodes += _grouped(group, start, num_layers)
            num_grouped += 1
        else:
            nodes.append(Loop(start=start, num_layers=num_layers, rules=rules))
        start += num_layers
    if group is not None and not num_grouped:
        raise PolicyError(
            f"group={group!r} keeps the inputs of groups of layers under 'full'; {str(plan)!r} has no two such layers."
        )
    return tuple(nodes)


def _merged(plan: StackPlan) -> list[tuple[Remat | None, int]]:
    merged: list[tuple[Remat | None, int]] = []
    for segment in plan.segments:
        assert segment.num_layers is not None, "the plan is fitted to its stack first"
        rules, num_layers = rules_of(segment.policy), segment.num_layers
        if merged and merged[-1][0] == rules:
            num_layers += merged.pop()[1]
        merged.append((rules, num_layers))
    return merged


def _grouped(group: int | str, start: int, num_layers: int) -> list[Node]:
    if group == "recursive":
        whole = [Loop(start=0, num_layers=num_layers, rules=Remat())]
        return [_shifted(node, start) for node in (_halved(num_layers) if num_layers > 3 else whole)]
    length = max(2, round(math.sqrt(num_layers))) if group == "sqrt" else group
    if not isinstance(length, int):
        raise PolicyError(f"group={group!r}: give a number of layers, 'sqrt' or 'recursive'.")
    if not 2 <= length <= num_layers:
        raise PolicyError(f"group={length}: a segment of {num_layers} layers has groups of 2 to {num_layers} layers.")
    nodes: list[Node] = [Groups(start=start, num_groups=num_layers // length, nodes=_group_of(length))]
    rest = num_layers % length
    # The last group is the first one to be made again, while every kept input is still alive: let the shorter one be last.
    if rest > 1:
        nodes.append(Groups(start=start + num_layers - rest, num_groups=1, nodes=_group_of(rest)))
    if rest == 1:
        nodes.append(Loop(start=start + num_layers - 1, num_layers=1, rules=Remat()))
    return nodes


def _group_of(length: int) -> tuple[Node, ...]:
    """The last layer stands apart: to make the inputs of a group's layers again, it need not be run."""
    if length == 1:
        return (Loop(start=0, num_layers=1, rules=Remat()),)
    first = Loop(start=0, num_layers=length - 1, rules=Remat())
    return first, Loop(start=length - 1, num_layers=1, rules=Remat())


def _halved(num_layers: int) -> list[Node]:
    """Groups of two groups of two …, inside a group: only the inputs of the first halves have to be made again.

    A layer that is left over comes first: the groups are then last, and their second half need not be run to get at its input.
    """
    if num_layers <= 3:
        return list(_group_of(num_layers))
    rest = num_layers % 2
    first: list[Node] = [Loop(start=0, num_layers=1, rules=Remat())] * rest
    return [*first, Groups(start=rest, num_groups=2, nodes=tuple(_halved(num_layers // 2)))]


def _shifted(node: Node, start: int) -> Node:
    match node:
        case Loop():
            return Loop(start=node.start + start, num_layers=node.num_layers, rules=node.rules)
        case Groups():
            return Groups(start=node.start + start, num_groups=node.num_groups, nodes=node.nodes)
        case _:
            assert_never(node)
