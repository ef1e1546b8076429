"""The operations of one layer, as traced, into a `BlockGraph`: names, bytes per device, prices on the target.

In: a `Body`, found by `from_trace` (a loop over layers) or `unrolled` (modules one after the other). Matmuls and kernels are
priced by the roofline. Other operations fuse: they cost the writing of a result only where a matmul, a kernel or the backward
pass reads it; what only renames or lays out is free. A kernel of unknown price keeps none, and counts as expensive.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remat_kit.graph import Crossing, StepGraph, TracedOp, is_kernel
from remat_kit.planner.blocks import BlockGraph, BlockOp, BlockValue
from remat_kit.planner.closure import close
from remat_kit.policy import Kind

KERNELS, MATMULS = str(Kind.KERNELS), str(Kind.DOTS_NO_BATCH)
DECISIONS = frozenset({"top_k", "sort", "argmax", "argmin", "rng_uniform"})
"""Operations that decide, as routing does: a tie that falls another way when they run again corrupts gradients. Random numbers
from a key are not among them: the same key gives the same bits."""
COLLECTIVES = frozenset(
    {"all_gather", "all_gather_invariant", "all_to_all", "psum", "psum2", "psum_invariant", "reduce_scatter", "ppermute"}
)
FREE = frozenset(
    {"name", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "sharding_constraint", "optimization_barrier"}
)
"""Operations that only rename, or lay out what a fusion reads anyway."""
_ALIASES = frozenset({"name", "reshape", "squeeze", "expand_dims", "sharding_constraint", "optimization_barrier"})
_SAME = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "sharding_constraint"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device of the target does in a second.

    Attributes:
        flops_per_s: Matmul FLOPs in the step's dtype.
        bytes_per_s: Of device memory.
        link_bytes_per_s: Between devices; None = a tenth of the memory's.
        replays_collectives: Whether recomputation may run collectives again.
    """

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float | None = None
    replays_collectives: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoop:
    """A stack of equal layers.

    Attributes:
        calls: Layers times how often the stack runs in a step.
        source: `file:line` of its loop, or path of its first module.
        block: One layer.
        forward_s: Seconds of one layer's forward pass, by the roofline.
    """

    calls: int
    source: str
    block: BlockGraph
    forward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The operations of one layer.

    Attributes:
        ops: In program order; inner loops are one group each.
        kept: Values that are kept for the backward pass without rematerialization.
        inputs: Values that the layer gets from the one before.
        calls: How often it runs.
        source: `file:line` of the loop, or path of the module.
        path: Path of the module that the layer is; names below it begin with `*` in policies. Empty = a loop's body.
    """

    ops: tuple[tuple[TracedOp, ...], ...]
    kept: tuple[int, ...]
    inputs: tuple[int, ...]
    calls: int
    source: str
    path: str = ""

    @property
    def flat(self) -> tuple[TracedOp, ...]:
        """Its operations one by one."""
        return tuple(op for group in self.ops for op in group)

    @property
    def handed_on(self) -> frozenset[int]:
        """The layer's input as its operations name or lay it out anew: the same bytes."""
        same = set(self.inputs)
        for op in self.flat:
            if op.kind in _ALIASES and same.issuperset(op.inputs):
                same.update(op.outputs)
        return frozenset(same)

    @property
    def written(self) -> frozenset[int]:
        """Values that no fusion can leave out: matmuls, kernels and the backward pass read them."""
        heavy = (op for op in self.flat if op.flops != 0 or is_kernel(op))
        return frozenset((*self.kept, *(value for op in heavy for value in op.inputs)))


def grouped(ops: Sequence[TracedOp], indices: Sequence[int], *, calls: int) -> tuple[tuple[TracedOp, ...], ...]:
    """Operations one by one, those of an inner loop together: a policy can't cut through its iterations from here."""
    groups: list[list[TracedOp]] = []
    was_inner = False
    for index in indices:
        is_inner = ops[index].calls > calls
        if not (is_inner and was_inner):
            groups.append([])
        groups[-1].append(ops[index])
        was_inner = is_inner
    return tuple(tuple(group) for group in groups)


def layer_of(graph: StepGraph, body: Body, rates: Rates) -> LayerLoop:
    """Prices a layer.

    Args:
        graph: The step.
        body: The layer.
        rates: Of the target.
    """
    made = {value for op in body.flat for value in op.outputs}
    names, rule_names = _names(graph, body)
    inputs = body.handed_on
    listed = sorted(made | {value for op in body.flat for value in op.inputs})
    number = {value: position for position, value in enumerate(listed)}
    values = tuple(
        BlockValue(
            num_bytes=0 if value in inputs & made else device_bytes(graph, value),
            name=None if value in inputs else names.get(value),
            is_read=value in body.kept,
        )
        for value in listed
    )
    written = body.written
    ops = tuple(
        part
        for group in body.ops
        for part in _apart(_block_op(graph, group, number, body=body, written=written, rates=rates), group, number, body)
    )
    block = BlockGraph(
        values=values,
        ops=ops,
        input_bytes=sum(device_bytes(graph, value) for value in set(body.inputs).intersection(listed) - made),
        rule_names=rule_names,
        input_names=tuple(dict.fromkeys(name for value, name in names.items() if value in inputs)),
        notes=_notes(body),
    )
    forward_s = sum(op.seconds or 0.0 for op in ops)
    return LayerLoop(calls=body.calls, source=body.source, block=_with_lost_decisions(block), forward_s=forward_s)


def name_within(name: str, path: str) -> str:
    """A value's name as a policy for the module at `path` says it: whatever module of the kind it stands in.

    Example:
        >>> name_within("h/3/mlp/c_fc", "h/3"), name_within("q", "h/3")
        ('*/mlp/c_fc', 'q')
    """
    return f"*{name.removeprefix(path)}" if path and name.startswith(f"{path}/") else name


def _names(graph: StepGraph, body: Body) -> tuple[dict[int, str], tuple[str, ...]]:
    """Names of values; kernels that nobody named, and plain matmuls where nothing has a name, go by the rule for them."""
    names = {op.outputs[0]: name_within(op.name, body.path) for op in body.flat if op.kind == "name" and op.name is not None}
    by_rule = {
        value: KERNELS
        for op in body.flat
        if is_kernel(op) and not any(_is_named(output, body) for output in op.outputs)
        for value in op.outputs
    }
    if not names:
        by_rule |= {op.outputs[0]: MATMULS for op in body.flat if op.calls == body.calls and _is_plain_matmul(graph, op)}
    return names | by_rule, tuple(dict.fromkeys(by_rule.values()))


def _is_plain_matmul(graph: StepGraph, op: TracedOp) -> bool:
    """Whether an operation is a matmul without batch dimensions, by its sizes: (M K) (K N) = (M N) K K. Not told in shard_map."""
    if op.kind != "dot_general" or len(op.inputs) != 2 or not op.flops:
        return False
    left, right, out = (math.prod(graph.values[value].shape) for value in (*op.inputs, *op.outputs))
    depth = op.flops // (2 * out)
    return left * right == out * depth * depth


def _block_op(
    graph: StepGraph, group: Sequence[TracedOp], number: dict[int, int], *, body: Body, written: frozenset[int], rates: Rates
) -> BlockOp:
    made = dict.fromkeys(value for op in group for value in op.outputs)
    prices = [_price(graph, op, calls=body.calls, written=written, rates=rates) for op in group]
    is_known = all(flops is not None for flops, _ in prices)
    return BlockOp(
        kind=group[0].kind if len(group) == 1 else "inner loop",
        inputs=tuple(number[value] for value in dict.fromkeys(value for op in group for value in op.inputs) if value not in made),
        outputs=tuple(number[value] for value in made),
        flops=sum(flops or 0 for flops, _ in prices) if is_known else None,
        seconds=sum(seconds for _, seconds in prices) if is_known else None,
        is_replayable=not any(op.kind in COLLECTIVES and not rates.replays_collectives for op in group),
    )


def _with_lost_decisions(block: BlockGraph) -> BlockGraph:
    """Lets decisions run again that do whatever is kept, as their derivative reads their own results, with a note."""
    replayed = close(block, np.ones((1, len(block.names)), dtype=bool)).replayed[0]
    lost = [op for op, again in zip(block.ops, replayed, strict=True) if again and op.kind in DECISIONS and not op.is_replayable]
    if not lost:
        return block
    note = (
        f"{', '.join(dict.fromkeys(op.kind for op in lost))} runs again in the backward pass whatever is saved, since its "
        "derivative reads its own result, not the named one: a tie could fall another way. Take the values by the named indices "
        "(jnp.take_along_axis) instead of from the operation itself."
    )
    ops = tuple(dataclasses.replace(op, is_replayable=True) if op in lost else op for op in block.ops)
    return dataclasses.replace(block, ops=ops, notes=(*block.notes, note))


def _apart(made: BlockOp, group: Sequence[TracedOp], number: dict[int, int], body: Body) -> list[BlockOp]:
    """A decision, one result at a time: those that a name can keep must not be made again, the others follow from them."""
    if len(group) > 1 or group[0].kind not in DECISIONS:
        return [made]
    seconds = None if made.seconds is None else made.seconds / len(group[0].outputs)
    return [
        dataclasses.replace(made, outputs=(number[value],), seconds=seconds, is_replayable=not _is_named(value, body))
        for value in group[0].outputs
    ]


def _price(graph: StepGraph, op: TracedOp, *, calls: int, written: frozenset[int], rates: Rates) -> tuple[int | None, float]:
    """FLOPs and seconds per layer and device; None = unknown."""
    times = op.calls // calls
    if op.flops is None:
        return None, 0.0
    flops = op.flops * times // graph.num_devices
    if op.flops or is_kernel(op):
        moved = op.num_bytes * times / graph.num_devices
        return flops, max(flops / rates.flops_per_s, moved / rates.bytes_per_s)
    if op.kind in FREE or op.kind in tuple(Crossing):
        return 0, 0.0
    if op.kind in COLLECTIVES:
        moved = sum(device_bytes(graph, value) for value in op.outputs) * times
        return 0, moved / (rates.link_bytes_per_s or rates.bytes_per_s / 10)
    return 0, sum(device_bytes(graph, value) for value in written.intersection(op.outputs)) * times / rates.bytes_per_s


def _is_named(value: int, body: Body) -> bool:
    """Whether a name keeps a value, be it in another shape or type."""
    for op in body.flat:
        if value in op.inputs and (op.kind == "name" or (op.kind in _SAME and any(_is_named(each, body) for each in op.outputs))):
            return True
    return False


def _notes(body: Body) -> tuple[str, ...]:
    loose = [op for op in body.flat if op.kind in DECISIONS and not any(_is_named(value, body) for value in op.outputs)]
    return tuple(
        dict.fromkeys(
            f"{op.kind} at {op.source or 'an unknown line'} may run again in the backward pass, where a tie could fall another "
            "way: name its result with checkpoint_name, so that a plan can keep it."
            for op in loose
        )
    )


def device_bytes(graph: StepGraph, value: int) -> int:
    """Bytes of a value on one device; where only the compiler knows its sharding, an even share."""
    found = graph.values[value]
    return found.device_bytes if found.device_bytes is not None else -(-found.num_bytes // graph.num_devices)
