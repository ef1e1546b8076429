"""The roofline of a traced step: what its time is at least, and what bounds it. No JAX, no compiler.

Each matmul and kernel takes as long as its FLOPs at the peak rate or its bytes at the memory's rate, whichever is longer; the
step's arguments are read and its results written once. What fuses into others costs nothing, and collectives that the compiler
inserts are not in the trace: so it is a floor, and ratios of it mean more than seconds.
"""

from dataclasses import dataclass

from remat_kit.graph import StepGraph, is_kernel
from remat_kit.planner.from_trace import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step on a device, by the roofline.

    Attributes:
        step_s: Of the step.
        compute_s: Of its FLOPs alone, at the peak rate.
        memory_s: Of its bytes alone, at the memory's rate.
        unpriced: Kernels without a price, which are left out.
    """

    step_s: float
    compute_s: float
    memory_s: float
    unpriced: tuple[str, ...] = ()


def step_time(graph: StepGraph, rates: Rates) -> StepTime:
    """Prices a step.

    Args:
        graph: Its trace, under any policy.
        rates: Of the target.
    """
    heavy = [op for op in graph.ops if op.is_live and (op.flops != 0 or is_kernel(op))]
    priced = [
        ((op.flops or 0) * op.calls / graph.num_devices, op.num_bytes * op.calls / graph.num_devices)
        for op in heavy
        if op.flops is not None
    ]
    state_s = sum(_device_bytes(graph, value) for value in (*graph.inputs, *graph.outputs)) / rates.bytes_per_s
    return StepTime(
        step_s=state_s + sum(max(flops / rates.flops_per_s, moved / rates.bytes_per_s) for flops, moved in priced),
        compute_s=sum(flops for flops, _ in priced) / rates.flops_per_s,
        memory_s=state_s + sum(moved for _, moved in priced) / rates.bytes_per_s,
        unpriced=tuple(dict.fromkeys(op.name or op.kind for op in heavy if op.flops is None)),
    )


def _device_bytes(graph: StepGraph, value: int) -> int:
    found = graph.values[value]
    return found.device_bytes if found.device_bytes is not None else -(-found.num_bytes // graph.num_devices)
