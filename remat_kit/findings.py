"""What is wrong with a step, what it costs and what to do: the findings of `residuals` and `explain`, as plain data.

`trace` makes those that the traced program shows, `analysis.findings` the others; `report` writes them down, JSON holds them.
Bytes and FLOPs are per device. A remedy may carry a `Change` that a machine can make; then it can be compiled, and `checked` says
what came out. A number that could not be had is None.
"""

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    """What can be wrong."""

    NAME_UNMATCHED = "name_unmatched"
    NEVER_RESIDUAL = "never_residual"
    SAVED_BUT_RECOMPUTED = "saved_but_recomputed"
    SAME_PROGRAM = "same_program"
    WEIGHT_COPIES = "weight_copies"
    NOT_DONATED = "not_donated"
    WHOLE_LOGITS = "whole_logits"
    EXTRA_WEIGHT_GATHERS = "extra_weight_gathers"
    RECOMPUTE_MERGED = "recompute_merged"
    OFFLOAD_GROWS_DEVICE = "offload_grows_device"
    UNROLLED_LAYERS = "unrolled_layers"
    STATE_FILLS_MEMORY = "state_fills_memory"
    LAST_LAYER_RECOMPUTED = "last_layer_recomputed"
    ON_CHIP_TOY = "on_chip_toy"
    UNKNOWN_KERNEL = "unknown_kernel"
    DOUBLE_WRAPPING = "double_wrapping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to ask differently of the same step factory; what is not given stays.

    Attributes:
        policy: Text of another plan.
        options: Pairs of option and text, for the factory.
        donate: Positions of the arguments to donate, all of them.
        casts: Where stacked weights are cast, to be measured only: `inside` the loop over layers or `outside`.
    """

    policy: str | None = None
    options: tuple[tuple[str, str], ...] = ()
    donate: tuple[int, ...] | None = None
    casts: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to do about a finding.

    Attributes:
        text: In a sentence.
        change: The same for a machine; None = only a person can do it, in the step's code.
    """

    text: str
    change: Change | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a compile of a changed step gave.

    Attributes:
        total_bytes: Device memory.
        flops: Of the traced step.
    """

    total_bytes: int
    flops: int


class Verdict(StrEnum):
    """What compiling a remedy showed."""

    GAIN = "gain"
    NO_GAIN = "no gain"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A remedy that was compiled.

    Attributes:
        verdict: Whether it is worth recommending.
        before: The step as it is.
        after: With the remedy; None = it failed.
        reason: Why it failed; empty otherwise.
    """

    verdict: Verdict
    before: Measured
    after: Measured | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong with a step.

    Attributes:
        kind: What.
        message: In a sentence.
        names: Values, arguments, kernels or stacks that it is about.
        needed_by: For `saved_but_recomputed`: what still needs the recomputed operation.
        bytes_at_stake: Memory that it takes; None = not known, or it is not about memory.
        flops_at_stake: FLOPs that it costs; None = not known, or it is not about work.
        wire_bytes_at_stake: Bytes that it sends over links; None = not known, or it is not about communication.
        source: `file:line` of the user's code; may be empty.
        remedy: What to do; None = nothing is recommended (see `checked`).
        checked: What compiling the remedy gave; None = it was not compiled.
    """

    kind: FindingKind
    message: str
    names: tuple[str, ...] = ()
    needed_by: tuple[str, ...] = ()
    bytes_at_stake: int | None = None
    flops_at_stake: int | None = None
    wire_bytes_at_stake: int | None = None
    source: str = ""
    remedy: Remedy | None = None
    checked: Checked | None = None
