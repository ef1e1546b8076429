"""The progress line: loss, speed, utilization, memory against its promise, remaining time. Numbers in, one line of text out."""

from dataclasses import dataclass

from remat_kit.units import format_bytes, format_scaled, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A logged step.

    Attributes:
        step: Steps done.
        steps: Steps in all.
        loss: Of the last step, in nats.
        grad_norm: Before clipping; None = the step doesn't say.
        learning_rate: Of the last step; None = not known.
        step_time_s: Mean since the last line.
        units_per_s: Tokens or images that the run takes in a second, over all devices.
        unit: Which.
        flops_per_s: Model FLOP/s of a device: those of the step without rematerialization.
        peak_flops_per_s: What the device could do; None = unknown.
        peak_bytes: See `train.memory`; None = unknown.
        promised_bytes: What it is compared with; None = unknown.
        is_growth: Whether they are the growth of a CPU's process.
    """

    step: int
    steps: int
    loss: float
    grad_norm: float | None
    learning_rate: float | None
    step_time_s: float
    units_per_s: float
    unit: str
    flops_per_s: float
    peak_flops_per_s: float | None
    peak_bytes: int | None
    promised_bytes: int | None
    is_growth: bool

    @property
    def utilization(self) -> float | None:
        """Model-FLOPs utilization, 0 to 1; None = the device's peak is unknown."""
        return None if self.peak_flops_per_s is None else self.flops_per_s / self.peak_flops_per_s

    @property
    def remaining_s(self) -> float:
        """At the present speed."""
        return (self.steps - self.step) * self.step_time_s


def progress_line(progress: Progress) -> str:
    """The line.

    Example:
        >>> progress_line(Progress(step=20, steps=100, loss=2.5, grad_norm=1.0, learning_rate=1e-3, step_time_s=0.5,
        ...     units_per_s=2048.0, unit="tokens", flops_per_s=4e12, peak_flops_per_s=1e13, peak_bytes=2**30,
        ...     promised_bytes=2**30, is_growth=False))
        'step 20/100  loss 2.5000  2.05 ktokens/s  MFU 40.0 %  peak 1.00 GiB of 1.00 GiB compiled  40.0 s left'
    """
    parts = (
        f"step {progress.step}/{progress.steps}",
        f"loss {progress.loss:.4f}",
        format_scaled(progress.units_per_s, f"{progress.unit}/s"),
        _utilization(progress),
        _memory(progress),
        f"{format_seconds(progress.remaining_s)} left" if progress.step < progress.steps else "",
    )
    return "  ".join(part for part in parts if part)


def _utilization(progress: Progress) -> str:
    if progress.utilization is None:
        return f"{format_scaled(progress.flops_per_s, 'FLOP/s')}"
    return f"MFU {100 * progress.utilization:.1f} %"


def _memory(progress: Progress) -> str:
    if progress.peak_bytes is None or progress.promised_bytes is None:
        return ""
    measured, promised = format_bytes(progress.peak_bytes), format_bytes(progress.promised_bytes)
    return f"process +{measured}, compiled {promised}" if progress.is_growth else f"peak {measured} of {promised} compiled"
