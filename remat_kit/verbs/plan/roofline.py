"""The roofline of a step: what its time is at least, and what bounds it. No JAX.

Each matmul and kernel takes as long as its FLOPs at the peak rate or its bytes at the memory's rate, whichever is longer; the
step's arguments are read and its results written once. What fuses into others costs nothing. Collectives (counted in the
compiled program) and transfers to the host run beside all that, at their links' rates. So it is a floor: compare it, don't
promise it.
"""

from dataclasses import dataclass

from remat_kit.graph import StepGraph, is_kernel
from remat_kit.planner.from_trace import Rates
from remat_kit.targets import Target


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time of a step under a plan.

    Attributes:
        step_s: Seconds; None = the target's rates are not known.
        bound: `compute`, `memory`, `collectives` or `host link`; empty = not known.
        notes: What is not in it.
    """

    step_s: float | None
    bound: str
    notes: tuple[str, ...]


def predict_time(
    time: StepTime | None, target: Target, *, recompute_s: float | None, host_bytes: int, wire_bytes: int | None
) -> Prediction:
    """The time under a plan, from that without rematerialization.

    Args:
        time: Without rematerialization; None = the target's rates are not known.
        target: Its links.
        recompute_s: What the plan adds.
        host_bytes: That wait in host memory: they cross the link twice.
        wire_bytes: That collectives send from a device, as compiled; None = not counted.
    """
    if time is None or recompute_s is None:
        return Prediction(step_s=None, bound="", notes=(f"{target.kind} has no published rates: no seconds, planned by FLOPs.",))
    kind = "compute" if time.compute_s >= time.memory_s else "memory"
    times = {kind: time.step_s + recompute_s}
    notes = ["Seconds are a roofline at the target's peak rates, a floor: compare them, don't promise them."]
    is_one_network = target.platform != "cuda" or target.num_hosts == 1  # rows know the links inside a host of GPUs
    for what, amount, rate in (
        ("collectives", wire_bytes, target.link_bytes_per_s if is_one_network else None),
        ("host link", 2 * host_bytes, target.host_bytes_per_s),
    ):
        if amount and rate:
            times[what] = amount / rate
        elif amount or (amount is None and target.num_devices > 1):
            notes.append(f"Not in the predicted seconds, for want of a rate or a count: {what}.")
    if time.unpriced:
        notes.append(f"Without a price, and left out of the seconds: {', '.join(time.unpriced)}.")
    bound = max(times, key=lambda what: times[what])
    return Prediction(step_s=times[bound], bound=bound, notes=tuple(notes))


def _device_bytes(graph: StepGraph, value: int) -> int:
    found = graph.values[value]
    return found.device_bytes if found.device_bytes is not None else -(-found.num_bytes // graph.num_devices)
