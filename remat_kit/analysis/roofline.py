"""A roofline model of a step's time: every resource at its peak rate, all of them at once. A model, never a measurement.

In: the work of the compiled program, its memory, and a target's rates. Out: `StepFloor`, seconds. Memory traffic counts what each
kernel reads and writes without any cache, so that term is high where neighbours share data; the others are lower bounds.
"""

from collections.abc import Sequence

from remat_kit.explanation import PhaseFlops, StepFloor
from remat_kit.memory import MemoryReport, WorkReport
from remat_kit.targets import Target


def step_floor(work: WorkReport, agreement: Sequence[PhaseFlops], memory: MemoryReport, target: Target) -> StepFloor:
    """The time that a step takes at least, if its busiest resource never waits.

    Args:
        work: What runs.
        agreement: Matmul FLOPs of each phase, kernels priced.
        memory: What lies in host memory.
        target: Its rates.

    Returns:
        Seconds by resource.
    """
    notes: list[str] = []
    wire_bytes = sum(each.wire_bytes * each.count for each in work.collectives)
    host_bytes = 2 * sum(line.bytes for line in memory.host_classes)  # out, and in again
    amounts = {
        "compute": (sum(each.hlo_flops for each in agreement), target.flops_per_s),
        "memory": (sum(each.traffic_bytes for each in work.phases), target.memory_bytes_per_s),
        "collectives": (wire_bytes, _link_rate(target)),
        "host link": (host_bytes, target.host_bytes_per_s),
    }
    times = {what: _time(what, amount, rate, notes) for what, (amount, rate) in amounts.items()}
    known = {what: time_s for what, time_s in times.items() if time_s is not None}
    bound = max(known, key=lambda what: known[what]) if any(known.values()) else ""
    return StepFloor(
        compute_s=times["compute"],
        memory_s=times["memory"],
        collectives_s=times["collectives"],
        host_s=times["host link"],
        floor_s=known[bound] if bound else None,
        bound=bound,
        notes=tuple(notes),
    )


def _link_rate(target: Target) -> float | None:
    """Rows know the links inside a host of GPUs, not those between hosts."""
    return None if target.platform == "cuda" and target.num_hosts > 1 else target.link_bytes_per_s


def _time(what: str, amount: int, rate: float | None, notes: list[str]) -> float | None:
    if not amount:
        return 0.0
    if rate is None:
        notes.append(f"{what}: this target's row has no rate for it, so it is not in the model.")
        return None
    return amount / rate
