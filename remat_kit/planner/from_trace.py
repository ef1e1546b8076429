"""Blocks of a traced step: the layer loops of a step traced *without* rematerialization, as the planner sees them.

In: a `StepGraph` and the target's rates. Out: a `LayerLoop` for each loop whose forward pass stacks values for its backward pass.
What is stacked is what the backward pass reads; the operations of the loop's body are what recomputation would run. Matmuls and
kernels are priced by the roofline. Other operations fuse: they cost the writing of a result only where a matmul, a kernel or the
backward pass reads it; what only renames or lays out is free. A kernel of unknown price keeps none, and counts as expensive.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_kit.errors import StepError
from remat_kit.graph import Crossing, Phase, StepGraph, TracedOp, is_kernel
from remat_kit.planner.blocks import BlockGraph, BlockOp, BlockValue
from remat_kit.policy import Kind

KERNELS = str(Kind.KERNELS)
DECISIONS = frozenset({"top_k", "sort", "argmax", "argmin"})
"""Operations that decide, as routing does: a tie that falls another way when they run again corrupts gradients."""
COLLECTIVES = frozenset(
    {"all_gather", "all_gather_invariant", "all_to_all", "psum", "psum2", "psum_invariant", "reduce_scatter", "ppermute"}
)
_FREE = frozenset(
    {"name", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota", "sharding_constraint", "optimization_barrier"}
)


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
    """A loop over layers.

    Attributes:
        calls: Layers times how often the loop runs in a step.
        source: `file:line` of the loop.
        block: One layer.
        forward_s: Seconds of one layer's forward pass, by the roofline.
    """

    calls: int
    source: str
    block: BlockGraph
    forward_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The operations of a loop's body.

    Attributes:
        ops: In program order; inner loops are one group each.
        kept: Values that are stacked for the backward pass.
        calls: How often the body runs.
        source: `file:line` of the loop.
    """

    ops: tuple[tuple[TracedOp, ...], ...]
    kept: tuple[int, ...]
    calls: int
    source: str

    @property
    def written(self) -> frozenset[int]:
        """Values that no fusion can leave out: matmuls, kernels and the backward pass read them."""
        heavy = (op for group in self.ops for op in group if op.flops != 0 or is_kernel(op))
        return frozenset((*self.kept, *(value for op in heavy for value in op.inputs)))


def block_graph(graph: StepGraph, *, num_layers: int, rates: Rates) -> LayerLoop:
    """The layer of a step's stack.

    Args:
        graph: The step, traced with policy `none`.
        num_layers: Layers of the stack.
        rates: Of the target.

    Returns:
        Of the loops that run a multiple of `num_layers` times, the one with most FLOPs.

    Raises:
        StepError: There is none.
    """
    loops = [loop for loop in layer_loops(graph, rates=rates) if loop.calls % num_layers == 0]
    if not loops:
        raise StepError(
            f"no loop over {num_layers} layers keeps values for the backward pass in this step: trace it with policy none, and "
            "run its layers with jax.lax.scan, nn.scan or remat_kit.stack."
        )
    return max(loops, key=lambda loop: sum(op.flops or 0 for op in loop.block.ops) * loop.calls)


def layer_loops(graph: StepGraph, *, rates: Rates) -> tuple[LayerLoop, ...]:
    """Every loop that keeps values for its backward pass, in forward order.

    Args:
        graph: The step, traced with policy `none`.
        rates: Of the target.
    """
    return tuple(_loop(graph, body, rates) for body in _bodies(graph))


def _bodies(graph: StepGraph) -> list[Body]:
    maker = {value: index for index, op in enumerate(graph.ops) for value in op.outputs}
    bodies = []
    for run in _stack_runs(graph.ops):
        kept = tuple(op.inputs[0] for op in run if op.inputs and _is_read_later(graph, op.outputs[0]))
        if kept:
            indices = _walk_back(graph, maker, kept, calls=run[0].calls)
            bodies.append(
                Body(ops=_grouped(graph.ops, indices, run[0].calls), kept=kept, calls=run[0].calls, source=run[0].source)
            )
    return bodies


def _stack_runs(ops: Sequence[TracedOp]) -> list[list[TracedOp]]:
    """Neighbouring operations that stack the results of one forward loop."""
    runs: list[list[TracedOp]] = []
    last = -2
    for index, op in enumerate(ops):
        if op.kind == Crossing.LOOP_STACK and op.phase is Phase.FORWARD:
            if index != last + 1:
                runs.append([])
            runs[-1].append(op)
            last = index
    return runs


def _is_read_later(graph: StepGraph, value: int) -> bool:
    """Whether the backward pass reads a value, be it through operations of the forward pass that hand it on."""
    waiting, seen = [value], {value}
    while waiting:
        current = waiting.pop()
        for op in graph.ops:
            if current in op.inputs and op.is_live:
                if op.phase is not Phase.FORWARD:
                    return True
                if op.kind in _FREE or op.kind in (Crossing.SHARD_IN, Crossing.SHARD_OUT):
                    waiting += [output for output in op.outputs if output not in seen]
                    seen.update(op.outputs)
    return False


def _walk_back(graph: StepGraph, maker: dict[int, int], kept: Iterable[int], *, calls: int) -> list[int]:
    """Indices of the body's operations that the kept values depend on; the loop's own border and what is outside end the walk."""
    found: set[int] = set()
    waiting = list(kept)
    while waiting:
        index = maker.get(waiting.pop())
        if index is None or index in found:
            continue
        op = graph.ops[index]
        is_border = op.calls == calls and op.kind in (Crossing.LOOP_CARRY, Crossing.LOOP_SLICE)
        if op.calls >= calls and not is_border:
            found.add(index)
            waiting += op.inputs
    return sorted(found)


def _grouped(ops: Sequence[TracedOp], indices: Sequence[int], calls: int) -> tuple[tuple[TracedOp, ...], ...]:
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


def _loop(graph: StepGraph, body: Body, rates: Rates) -> LayerLoop:
    made = {value for group in body.ops for op in group for value in op.outputs}
    names, rule_names = _names(body)
    listed = sorted(made | {value for group in body.ops for op in group for value in op.inputs})
    number = {value: position for position, value in enumerate(listed)}
    values = tuple(
        BlockValue(num_bytes=_device_bytes(graph, value), name=names.get(value), is_read=value in body.kept) for value in listed
    )
    written = body.written
    ops = tuple(_block_op(graph, group, number, body=body, written=written, rates=rates) for group in body.ops)
    carried = {value for op in graph.ops if op.kind == Crossing.LOOP_CARRY and op.calls == body.calls for value in op.outputs}
    block = BlockGraph(
        values=values,
        ops=ops,
        input_bytes=sum(_device_bytes(graph, value) for value in carried.intersection(listed) - made),
        rule_names=rule_names,
        notes=_notes(body),
    )
    return LayerLoop(calls=body.calls, source=body.source, block=block, forward_s=sum(op.seconds or 0.0 for op in ops))


def _names(body: Body) -> tuple[dict[int, str], tuple[str, ...]]:
    """Names of values; kernels whose results nobody named go by the rule `kernels`."""
    flat = [op for group in body.ops for op in group]
    names = {op.outputs[0]: op.name for op in flat if op.kind == "name" and op.name is not None}
    named = {op.inputs[0] for op in flat if op.kind == "name" and op.inputs}
    kernels = [op for op in flat if is_kernel(op) and not named.intersection(op.outputs)]
    by_rule = {value: KERNELS for op in kernels for value in op.outputs}
    return names | by_rule, (KERNELS,) if by_rule else ()


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
        is_replayable=not any(_is_fixed(op, body, rates) for op in group),
    )


def _price(graph: StepGraph, op: TracedOp, *, calls: int, written: frozenset[int], rates: Rates) -> tuple[int | None, float]:
    """FLOPs and seconds per layer and device; None = unknown."""
    times = op.calls // calls
    if op.flops is None:
        return None, 0.0
    flops = op.flops * times // graph.num_devices
    if op.flops or is_kernel(op):
        moved = op.num_bytes * times / graph.num_devices
        return flops, max(flops / rates.flops_per_s, moved / rates.bytes_per_s)
    if op.kind in _FREE or op.kind in tuple(Crossing):
        return 0, 0.0
    if op.kind in COLLECTIVES:
        moved = sum(_device_bytes(graph, value) for value in op.outputs) * times
        return 0, moved / (rates.link_bytes_per_s or rates.bytes_per_s / 10)
    return 0, sum(_device_bytes(graph, value) for value in written.intersection(op.outputs)) * times / rates.bytes_per_s


def _is_fixed(op: TracedOp, body: Body, rates: Rates) -> bool:
    """Whether an operation must not run again: collectives if so wished, decisions where a name can keep them."""
    if op.kind in COLLECTIVES:
        return not rates.replays_collectives
    return op.kind in DECISIONS and _is_named(op, body)


def _is_named(op: TracedOp, body: Body) -> bool:
    return any(other.kind == "name" and other.inputs[0] in op.outputs for group in body.ops for other in group if other.inputs)


def _notes(body: Body) -> tuple[str, ...]:
    loose = [op for group in body.ops for op in group if op.kind in DECISIONS and not _is_named(op, body)]
    return tuple(
        dict.fromkeys(
            f"{op.kind} at {op.source or 'an unknown line'} may run again in the backward pass, where a tie could fall another "
            "way: name its result with checkpoint_name, so that a plan can keep it."
            for op in loose
        )
    )


def _device_bytes(graph: StepGraph, value: int) -> int:
    found = graph.values[value]
    return found.device_bytes if found.device_bytes is not None else -(-found.num_bytes // graph.num_devices)
