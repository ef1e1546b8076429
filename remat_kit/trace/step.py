"""A `Step` into JAX's traced object, which the verbs lower, and a `StepTrace`, which says what the step does before any compiler.

FLOPs are per device: over all devices (inside shard_map every shard counts, so replicated work is not forgotten) divided by the
number of devices. Dead code counts nothing; names count where they stand, dead or alive, since a policy may speak of them.
"""

from collections.abc import Iterable
from typing import Any

import jax

from remat_kit.graph import Crossing, Phase, StepGraph, TracedOp, is_kernel
from remat_kit.records import KernelUse, NamedValue, StepTrace
from remat_kit.step import Step
from remat_kit.trace.build import build_graph


def trace_step(step: Step) -> tuple[Any, StepTrace]:
    """Traces a step.

    Args:
        step: The step.

    Returns:
        What `jax.jit(…).trace` gives, ready to be lowered, and what the step says about itself.
    """
    traced = jax.jit(step.fn, donate_argnums=step.donate).trace(*step.args)
    return traced, summarise(graph_of(traced, step.args))


def trace_graph(step: Step) -> StepGraph:
    """Traces a step into its graph of operations and values."""
    traced = jax.jit(step.fn, donate_argnums=step.donate).trace(*step.args)
    return graph_of(traced, step.args)


def graph_of(traced: Any, args: Any) -> StepGraph:
    """The graph of what `jax.jit(…).trace(*args)` gave."""
    return build_graph(traced.jaxpr, num_devices=count_devices(args))


def count_devices(args: Any) -> int:
    """Devices that arrays, or their abstract stand-ins, live on; 1 when none says."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    return max((sharding.num_devices for sharding in shardings if sharding is not None), default=1)


def summarise(graph: StepGraph) -> StepTrace:
    """What a graph says in total."""
    live = [op for op in graph.ops if op.is_live]
    return StepTrace(
        flops=_flops(live) // graph.num_devices,
        remat_flops=_flops(op for op in live if op.phase is Phase.RECOMPUTE) // graph.num_devices,
        num_remat_regions=len(graph.regions),
        names=_names(graph),
        kernels=_kernels(graph, live),
        dtypes=_dtypes(graph, live),
        num_devices=graph.num_devices,
        notes=graph.notes,
    )


def _flops(ops: Iterable[TracedOp]) -> int:
    return sum((op.flops or 0) * op.calls for op in ops)


def _names(graph: StepGraph) -> tuple[NamedValue, ...]:
    """Instances are counted where the value is first made; a name that stands in recomputation only counts there."""
    wholes = _whole_values(graph)
    counts: dict[tuple[str, tuple[int, ...], str], dict[Phase, int]] = {}
    for op in graph.ops:
        if op.kind == "name" and op.name is not None:
            value = graph.values[wholes.get(op.outputs[0], op.outputs[0])]
            phases = counts.setdefault((op.name, value.shape, value.dtype), {})
            phases[op.phase] = phases.get(op.phase, 0) + op.calls
    return tuple(
        NamedValue(name=name, shape=shape, dtype=dtype, count=max(1, phases.get(Phase.FORWARD) or max(phases.values())))
        for (name, shape, dtype), phases in counts.items()
    )


def _whole_values(graph: StepGraph) -> dict[int, int]:
    """Of a shard the value it is part of; where it leaves twice, not as the residual that JAX lays end to end along one axis."""
    found: dict[int, int] = {}
    for op in graph.ops:
        if op.kind == Crossing.SHARD_OUT and op.inputs:
            shard = op.inputs[0]
            found[shard] = max(found.get(shard, op.outputs[0]), op.outputs[0], key=lambda whole: _num_split(graph, shard, whole))
    return found


def _num_split(graph: StepGraph, shard: int, whole: int) -> int:
    return sum(part != size for part, size in zip(graph.values[shard].shape, graph.values[whole].shape, strict=True))


def _kernels(graph: StepGraph, live: Iterable[TracedOp]) -> tuple[KernelUse, ...]:
    uses: dict[tuple[str, Phase], list[TracedOp]] = {}
    for op in live:
        if is_kernel(op) and op.calls:
            uses.setdefault((str(op.name), op.phase), []).append(op)
    return tuple(
        KernelUse(
            name=name,
            phase=phase.value,
            count=sum(op.calls for op in ops),
            flops=None if any(op.flops is None for op in ops) else _flops(ops) // graph.num_devices,
        )
        for (name, phase), ops in uses.items()
    )


def _dtypes(graph: StepGraph, live: Iterable[TracedOp]) -> tuple[str, ...]:
    read = [graph.values[value].dtype for op in live if op.flops != 0 for value in op.inputs]
    return tuple(dict.fromkeys(dtype for dtype in read if "float" in dtype))
