"""Blocks of a traced step: the layer loops of a step traced *without* rematerialization, as the planner sees them.

In: a `StepGraph` and the target's rates. Out: a `LayerLoop` for each loop whose forward pass stacks values for its backward pass.
What is stacked is what the backward pass reads; the operations of the loop's body are what recomputation would run. Layers that
are not a loop are found in `unrolled`; both are priced in `body`.
"""

from collections.abc import Iterable, Sequence

from remat_kit.errors import StepError
from remat_kit.graph import Crossing, Phase, StepGraph, TracedOp
from remat_kit.planner.body import FREE, Body, LayerLoop, Rates, grouped, layer_of


def block_graph(graph: StepGraph, *, num_layers: int, rates: Rates) -> LayerLoop:
    """The layer of a step's stack.

    Args:
        graph: The step, traced with policy `none`.
        num_layers: Layers of the stack.
        rates: Of the target.

    Returns:
        Of the loops that run a multiple of `num_layers` times, the one with most FLOPs.

    Raises:
        StepError: There is none, or a single layer.
    """
    loops = loops_of(layer_loops(graph, rates=rates), num_layers=num_layers, stack="this stack")
    if not loops:
        raise StepError(
            f"no loop over {num_layers} layers keeps values for the backward pass in this step: trace it with policy none, and "
            "run its layers with jax.lax.scan, nn.scan or remat_kit.stack."
        )
    return max(loops, key=lambda loop: sum(op.flops or 0 for op in loop.block.ops) * loop.calls)


def loops_of(loops: Iterable[LayerLoop], *, num_layers: int, stack: str) -> list[LayerLoop]:
    """The loops that may be a stack's: those that run a multiple of its layers.

    Raises:
        StepError: It has a single layer: any loop runs a multiple of once.
    """
    if num_layers == 1:
        raise StepError(f"{stack} has 1 layer, and a single layer is no loop: plan with 2 layers or more, or compare policies.")
    return [loop for loop in loops if loop.calls % num_layers == 0]


def layer_loops(graph: StepGraph, *, rates: Rates) -> tuple[LayerLoop, ...]:
    """Every loop that keeps values for its backward pass, in forward order.

    Args:
        graph: The step, traced with policy `none`.
        rates: Of the target.
    """
    return tuple(layer_of(graph, body, rates) for body in _bodies(graph))


def _bodies(graph: StepGraph) -> list[Body]:
    maker = {value: index for index, op in enumerate(graph.ops) for value in op.outputs}
    bodies = []
    for run in _stack_runs(graph.ops):
        kept = tuple(op.inputs[0] for op in run if op.inputs and _is_read_later(graph, op.outputs[0]))
        if kept:
            calls = run[0].calls
            carries = (op for op in graph.ops if op.kind == Crossing.LOOP_CARRY and op.calls == calls)
            bodies.append(
                Body(
                    ops=grouped(graph.ops, _walk_back(graph, maker, kept, calls=calls), calls=calls),
                    kept=kept,
                    inputs=tuple(value for op in carries for value in op.outputs),
                    calls=calls,
                    source=run[0].source,
                )
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
                if op.kind in FREE or op.kind in (Crossing.SHARD_IN, Crossing.SHARD_OUT):
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
