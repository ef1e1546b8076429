"""Every record that crosses a stage: plain, frozen data without JAX, that JSON can hold.

`StepTrace` comes out of `trace`, `CompiledStep` out of `compile`, `CompareRow` and `Comparison` out of the verbs; `report` writes
them down. Bytes and FLOPs are per device. A number that could not be had is None, and a note beside it says why.
"""

from dataclasses import dataclass
from enum import StrEnum

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedValue:
    """A value that `checkpoint_name` named.

    Attributes:
        name: Its name.
        shape: Of one instance (one layer of a scanned stack), global.
        dtype: Name of its dtype.
        count: Instances in a step (layers, micro-batches …).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """A custom kernel that the step calls.

    Attributes:
        name: `cudnn_attention`, `splash_attention`, or the primitive's name for one that we don't know.
        phase: `forward`, `recompute` or `backward`.
        count: Calls in a step, loop lengths included.
        flops: Priced FLOPs of all calls per device; None = unknown kernel.
    """

    name: str
    phase: str
    count: int
    flops: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What the traced step says about itself, before any compiler.

    Attributes:
        flops: Matmul, convolution and priced-kernel FLOPs of the whole step per device, dead code removed.
        remat_flops: The part of `flops` inside recomputation (`rematted_computation`).
        num_remat_regions: `jax.checkpoint` regions in the program, a loop's body counted once.
        names: Named values, in order of appearance.
        kernels: Custom kernels.
        dtypes: Names of the floating dtypes that matmuls, convolutions and kernels read.
        num_devices: Devices that the step runs on.
        notes: What could not be counted exactly.
    """

    flops: int
    remat_flops: int
    num_remat_regions: int
    names: tuple[NamedValue, ...]
    kernels: tuple[KernelUse, ...]
    dtypes: tuple[str, ...]
    num_devices: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """The compiler's own totals for one memory space of one device, in bytes.

    Attributes:
        argument_bytes: Parameters of the program.
        output_bytes: Its results, aliased ones included.
        alias_bytes: Results that reuse a donated argument.
        temp_bytes: Everything else that is live at some time.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """Argument + output - alias + temp."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """What the target's compiler made of a step; no handle of any device.

    Attributes:
        device: Totals of device memory.
        host: Totals of host memory; None = this backend does not model it.
        refused: The compiler's words when it refused the program for its size; the bytes are then from its dump.
        num_xla_remat: Instructions that XLA's own rematerialization pass added.
        compile_s: Seconds of the XLA compile (of the first one, when this came from the cache).
        from_cache: Whether no compile ran now.
        versions: Pairs of component and version: jax, jaxlib, libtpu, ….
        notes: What a reader should know.
    """

    device: MemoryBytes
    host: MemoryBytes | None
    refused: str | None = None
    num_xla_remat: int = 0
    compile_s: float
    from_cache: bool = False
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


class Status(StrEnum):
    """How a row ended: over budget is a result, failed is not."""

    OK = "ok"
    OVER_BUDGET = "over_budget"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One policy on one target. Bytes and FLOPs are per device.

    Attributes:
        policy: As the user spelled it.
        target: As the user spelled it.
        status: See `Status`.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: Device memory, the compiler's totals.
        host_bytes: Total of host memory.
        total_bytes: Argument + output - alias + temp.
        budget_bytes: What `total_bytes` is held against; None = no budget.
        fits: total <= budget; None without a budget.
        flops: Of the whole step.
        recompute_flops: flops - flops of the same step with policy none.
        inherent_recompute_flops: What the step recomputes whatever the policy.
        baseline_flops: flops of the same step with policy none.
        recompute_fraction: recompute_flops / baseline_flops.
        floor_s: flops / peak FLOP/s + host bytes / host rate: a lower bound, not a prediction.
        is_best: Least floor among the rows of its target that fit.
        compile_s: Seconds of the XLA compile.
        from_cache: Whether the result was read instead of compiled.
        kernels: Names of the attention and other kernels that run, `xla` when none does.
        xla_remat_instructions: Added by XLA's own rematerialization pass.
        error: Why it failed; None otherwise.
        notes: What a reader should know about this row.
        versions: Pairs of component and version.
    """

    policy: str
    target: str
    status: Status
    argument_bytes: int | None = None
    output_bytes: int | None = None
    alias_bytes: int | None = None
    temp_bytes: int | None = None
    host_bytes: int | None = None
    total_bytes: int | None = None
    budget_bytes: int | None = None
    fits: bool | None = None
    flops: int | None = None
    recompute_flops: int | None = None
    inherent_recompute_flops: int | None = None
    baseline_flops: int | None = None
    recompute_fraction: float | None = None
    floor_s: float | None = None
    is_best: bool = False
    compile_s: float | None = None
    from_cache: bool = False
    kernels: tuple[str, ...] = ()
    xla_remat_instructions: int | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole answer of `compare`.

    Attributes:
        step: The factory, as spelled.
        options: Pairs of option and value, as given.
        flags: Pairs of compiler flag source and value that were in force (XLA_FLAGS, LIBTPU_INIT_ARGS, --xla …).
        rows: In the order asked for: policies within targets.
        notes: What holds for all rows.
    """

    step: str
    options: tuple[tuple[str, str], ...]
    flags: tuple[tuple[str, str], ...]
    rows: tuple[CompareRow, ...]
    notes: tuple[str, ...] = ()
