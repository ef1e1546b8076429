"""The graph of a traced step: its operations and the values between them, flat, without JAX.

`trace` builds it; residual tables, findings and the planner read it. Programs inside programs (jit, scan, cond, shard_map,
checkpoint, custom rules) are inlined, and what crosses a loop or a shard is an operation of its own (`Crossing`): so a value is
followed from the layer that made it, through the stack that kept it, to the layer that reads it. FLOPs and bytes are those of one
call over all devices; `calls` says how often an operation runs in a step. See `records` for what comes out.
"""

from dataclasses import dataclass
from enum import StrEnum

from remat_kit.findings import Finding


class Phase(StrEnum):
    """What part of a step an operation belongs to; everything that is neither recomputation nor backward is forward."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class Crossing(StrEnum):
    """Kinds of operations that no primitive stands for: a value crosses into or out of a loop, a branch or a shard."""

    LOOP_SLICE = "loop_slice"
    LOOP_STACK = "loop_stack"
    LOOP_CARRY = "loop_carry"
    LOOP_RESULT = "loop_result"
    BRANCH_RESULT = "branch_result"
    SHARD_IN = "shard_in"
    SHARD_OUT = "shard_out"


class Origin(StrEnum):
    """Where a value comes from; what no argument reaches is a constant, however it is computed."""

    ARGUMENT = "argument"
    CONSTANT = "constant"
    OPERATION = "operation"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedValue:
    """An array of the step; its number is its position in `StepGraph.values`.

    Attributes:
        shape: As the program sees it: global, or of one shard inside shard_map.
        dtype: Name of its dtype.
        num_bytes: Over all devices (inside shard_map: of all shards, replicas included).
        device_bytes: On one device; None = the compiler decides the sharding.
        is_on_host: Whether it lives in host memory.
        origin: Argument of the step, constant, or result of an operation.
    """

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    device_bytes: int | None
    is_on_host: bool
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOp:
    """An operation of the step.

    Attributes:
        kind: Name of the JAX primitive, or a `Crossing`.
        name: The `checkpoint_name` of a `name` operation, the kernel's name of a kernel; None for others.
        inputs: Numbers of the values it reads; literals are left out.
        outputs: Numbers of the values it makes.
        phase: Forward, recompute or backward.
        region: Number of the recomputed region that it is in; None outside.
        after: Number of the hand-made region whose layer's backward pass it is part of; None elsewhere.
        loop: Number of the innermost loop whose body it is in; None outside.
        scope: Named scopes and transformations around it, outermost first, joined by `/`.
        source: `file:line` of the user's code; empty when unknown.
        code: The same for operations that the same code made, called from the same places, as a recomputation and its original.
        calls: How often it runs in a step; 0 = in the cheaper branch of a conditional.
        flops: Of one call over all devices, matmuls, convolutions and kernels only; None = a kernel without a known price.
        num_bytes: Read and written by one call over all devices.
        is_live: Whether an output of the step or an effect depends on it.
    """

    kind: str
    name: str | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    phase: Phase
    region: int | None
    after: int | None
    loop: int | None
    scope: str
    source: str
    code: int
    calls: int
    flops: int | None
    num_bytes: int
    is_live: bool


def is_kernel(op: TracedOp) -> bool:
    """Whether an operation is a kernel call rather than one of JAX's own operations or a named value."""
    return op.name is not None and op.kind != "name"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRegion:
    """Code that is recomputed in the backward pass: one `jax.checkpoint`, or a layer of a loop of ours; a loop's body once.

    Attributes:
        rules: Texts of the policy's rules, () = none, so everything is recomputed; None = a policy that is not ours, or
            recomputation that shows none (jax_remat3).
        source: `file:line` of the user's code.
        calls: How often it is recomputed in a step.
        parent: Number of the region that it is in; None = of none.
    """

    rules: tuple[str, ...] | None
    source: str
    calls: int
    parent: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """A traced step, whole, with its dead code marked.

    Attributes:
        values: Position = number of the value.
        ops: In program order, but what carries a value around a loop comes at the end of its body.
        regions: Position = number of the region.
        inputs: Values that are the arguments, flattened.
        input_names: What the user's code calls each of them, such as `params['up']`.
        outputs: Values that are the results; literals are left out.
        num_devices: Devices that the step runs on.
        notes: What could not be told exactly.
    """

    values: tuple[TracedValue, ...]
    ops: tuple[TracedOp, ...]
    regions: tuple[TracedRegion, ...]
    inputs: tuple[int, ...]
    input_names: tuple[str, ...]
    outputs: tuple[int, ...]
    num_devices: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """A value that is kept from where it is made until the backward pass reads it.

    Attributes:
        names: Every name that `checkpoint_name` gave it, innermost first; () = none.
        kind: Operation that made it: a primitive, `loop_carry` for what a loop hands from layer to layer, `argument`, `constant`.
        source: `file:line` of the code that made it; for an argument, its name.
        origin: Arguments and constants need no memory of their own.
        shape: As kept, stacked over the loops around it; inside shard_map of one shard.
        dtype: Name of its dtype.
        num_layers: Iterations whose values are stacked; 1 = not stacked.
        num_bytes: Over all devices and layers.
        device_bytes: On one device, all layers; None = the compiler decides the sharding.
        is_on_host: Whether it waits in host memory.
        rule: Text of the rule that keeps it; `input` = the recomputed region reads it from outside; None = outside any region, or
            in one whose policy is unknown (see `TracedRegion`).
        region: Region while whose recomputation it is kept; None = from the forward pass to the backward pass.
    """

    names: tuple[str, ...]
    kind: str
    source: str
    origin: Origin
    shape: tuple[int, ...]
    dtype: str
    num_layers: int
    num_bytes: int
    device_bytes: int | None
    is_on_host: bool
    rule: str | None
    region: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """An operation that runs again in the backward pass.

    Attributes:
        kind: Name of the primitive.
        names: Names of what it makes.
        source: `file:line` of its code.
        shape: Of its first result.
        calls: How often it is recomputed in a step.
        forward_calls: How often it runs in the forward pass; 0 = only in recomputation.
        flops: Of all recomputations, per device; None = a kernel without a known price.
        num_bytes: Read and written by all recomputations, per device.
    """

    kind: str
    names: tuple[str, ...]
    source: str
    shape: tuple[int, ...]
    calls: int
    forward_calls: int
    flops: int | None
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualReport:
    """What a differentiated program keeps and what it computes again.

    Attributes:
        findings: What is wrong with it: to be said first.
        residuals: Kept from the forward to the backward pass, largest first, arguments and constants last.
        during_recompute: Kept while a region is recomputed.
        recomputed: Operations that run again, most FLOPs first.
    """

    findings: tuple[Finding, ...]
    residuals: tuple[Residual, ...]
    during_recompute: tuple[Residual, ...]
    recomputed: tuple[Recomputed, ...]
