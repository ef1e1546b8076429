"""Who makes, who reads and what else is called the same: the index that residual tables are read from.

In: a `StepGraph`. Out: `Links`. Values that differ only by how they are named, laid out, placed or sharded are one: operations
that compute nothing (`name`, reshape, transpose, a rounding to the own precision, a copy to the host, the border of a shard) join
their operand and their result into one class, called by its first member, the root.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from remat_kit.graph import Crossing, StepGraph, TracedOp

_SAME_VALUE = frozenset(
    {
        "name",
        "reduce_precision",
        "device_put",
        "copy",
        "copy_p",
        "reshape",
        "transpose",
        "squeeze",
        "expand_dims",
        "broadcast_in_dim",
        "sharding_constraint",
        "reshard",
        "mesh_cast",
        "pvary",
        "pcast",
        "optimization_barrier",
        Crossing.SHARD_IN,
        Crossing.SHARD_OUT,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Index of a graph.

    Attributes:
        maker: Value -> the operation that makes it; arguments and constants have none.
        readers: Value -> the live operations that read it.
        root: Value -> the first value of its class.
        members: Root -> its class.
        names: Root -> names of its class, innermost first.
        reached: Values that some argument reaches.
    """

    maker: dict[int, TracedOp]
    readers: dict[int, list[TracedOp]]
    root: dict[int, int]
    members: dict[int, list[int]]
    names: dict[int, tuple[str, ...]]
    reached: frozenset[int]

    def origin_op(self, value: int) -> TracedOp | None:
        """The operation that made the first value of a class."""
        return self.maker.get(self.root[value])


def link(graph: StepGraph) -> Links:
    """Indexes a graph."""
    maker = {value: op for op in graph.ops for value in op.outputs}
    readers: dict[int, list[TracedOp]] = {}
    for op in graph.ops:
        for value in dict.fromkeys(op.inputs):
            if op.is_live:
                readers.setdefault(value, []).append(op)
    root = _roots(graph)
    members: dict[int, list[int]] = {}
    for value, first in root.items():
        members.setdefault(first, []).append(value)
    names: dict[int, dict[str, None]] = {}
    for op in graph.ops:
        if op.kind == "name" and op.name is not None:
            names.setdefault(root[op.outputs[0]], {})[op.name] = None
    return Links(
        maker=maker,
        readers=readers,
        root=root,
        members=members,
        names={value: tuple(found) for value, found in names.items()},
        reached=_reached(graph.inputs, readers),
    )


def same_value(graph: StepGraph, op: TracedOp) -> bool:
    """Whether an operation hands its operand on without computing anything."""
    if op.kind not in _SAME_VALUE or len(op.inputs) != 1 or len(op.outputs) != 1:
        return False
    source, result = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
    return op.kind != "broadcast_in_dim" or source.num_bytes == result.num_bytes


def _roots(graph: StepGraph) -> dict[int, int]:
    """Operations stand after the makers of what they hand on, so one pass suffices."""
    root = {value: value for value in range(len(graph.values))}
    for op in graph.ops:
        if same_value(graph, op):
            root[op.outputs[0]] = root[op.inputs[0]]
    return root


def _reached(start: Iterable[int], readers: dict[int, list[TracedOp]]) -> frozenset[int]:
    found, waiting = set(start), list(start)
    while waiting:
        for op in readers.get(waiting.pop(), ()):
            new = [value for value in op.outputs if value not in found]
            found.update(new)
            waiting += new
    return frozenset(found)
