"""Records of a compiled step's insides: its buffers, what its memory peak is made of, its timeline, and the work that it does.

`analysis` makes them from the compiler's dump, `report` writes them down, saved reports hold them; no JAX. Bytes and FLOPs are
per device. Schedule points count the flattened program: the body of a loop stands once, before its loop. A number that could
not be had is None, and a note says why.
"""

from dataclasses import dataclass
from enum import StrEnum


class Space(StrEnum):
    """Where a buffer lies."""

    DEVICE = "device"
    HOST = "host"
    ON_CHIP = "on_chip"


class BufferKind(StrEnum):
    """What a buffer is to the program; donated = an argument whose memory a result reuses."""

    PARAMETER = "parameter"
    DONATED = "donated"
    OUTPUT = "output"
    TEMP = "temp"
    CONSTANT = "constant"


class StepPhase(StrEnum):
    """What part of the step an instruction belongs to; update = outside of the differentiated code (optimizer, constants …)."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    UPDATE = "update"


class PeakKind(StrEnum):
    """What the bytes at the peak hold."""

    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    BATCH = "batch"
    OTHER_ARGUMENTS = "other arguments"
    OUTPUTS = "outputs"
    GRADIENTS = "gradients"
    RESIDUALS = "saved residuals"
    CARRIES = "carries"
    RECOMPUTED = "recomputed activations"
    ACTIVATIONS = "forward activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    ATTENTION = "attention workspace"
    LOGITS = "logits and loss"
    WEIGHT_COPIES = "casts or copies of weights"
    UPDATES = "optimizer update"
    COLLECTIVES = "collectives' buffers"
    RNG = "RNG masks"
    PADDING = "padding"
    HOLES = "arena holes"
    COMPILER_RESERVED = "compiler_reserved"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One value in memory, for as long as it lives.

    Attributes:
        name: Its defining instruction, with the index in that one's tuple: `while.3{2}`.
        instruction: The defining instruction alone.
        shape: As the compiler writes it, layout included.
        space: Where it lies.
        kind: What it is to the program.
        allocation: Number of the allocation in the compiler's dump.
        offset_bytes: From the start of the allocation.
        size_bytes: With the padding of its layout.
        logical_bytes: Without.
        start: First schedule point at which it lives; None = the whole step.
        end: Last one.
        op_name: The program's words for its defining operation; may be empty.
        source: `file:line` of the user's code; may be empty.
    """

    name: str
    instruction: str
    shape: str
    space: Space
    kind: BufferKind
    allocation: int
    offset_bytes: int
    size_bytes: int
    logical_bytes: int
    start: int | None
    end: int | None
    op_name: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakClass:
    """A line of the peak: all lines of a space sum to its bytes.

    Attributes:
        kind: What the bytes hold.
        name: Which of the kind: the argument's path, the residual's name, the operation.
        layers: Layers that are stacked in it, or were added up (the name then has a star); 1 = neither.
        bytes: Memory that it takes, padding not included (padding has lines of its own).
        logical_bytes: Product of shape and element size of its values.
        source: `file:line` of the user's code; may be empty.
        shape: Of the value, of all layers; may be empty.
        num_buffers: Buffers that were added up.
    """

    kind: PeakKind
    name: str
    layers: int
    bytes: int
    logical_bytes: int
    source: str
    shape: str = ""
    num_buffers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """Memory at one point of the schedule at which it changes.

    Attributes:
        point: Schedule point.
        instruction: What runs there.
        live_bytes: Arguments, outputs and living temporaries; holes between them not included.
        phase: Of the instruction.
        loop: Loop whose body it is in, by its instruction's name; empty outside. The body stands for every iteration.
    """

    point: int
    instruction: str
    live_bytes: int
    phase: StepPhase
    loop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceTotals:
    """Bytes of one memory space, from the dump.

    Attributes:
        space: Which.
        argument_bytes: Parameters of the program.
        output_bytes: Results, donated ones included.
        alias_bytes: Results that lie in donated arguments.
        arena_bytes: The allocation of all temporaries.
        live_bytes: Temporaries that live at the peak; the rest of the arena is holes.
        reserved_bytes: Temporaries that the compiler counts and its dump doesn't show.
    """

    space: Space
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    arena_bytes: int
    live_bytes: int
    reserved_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Argument + output - alias + arena + reserved."""
        kept = self.argument_bytes + self.output_bytes - self.alias_bytes
        return kept + self.arena_bytes + self.reserved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Where the memory of a step goes.

    Attributes:
        peak_bytes: Total of device memory: the sum of `peak_classes`.
        peak_point: Schedule point with the most living bytes.
        peak_phase: Phase of its instruction.
        peak_instruction: The instruction that runs there.
        peak_classes: Largest first.
        host_classes: The same for host memory; () = nothing there.
        device: Totals of device memory.
        host: Totals of host memory; None = the program uses none.
        on_chip_bytes: Fast memory on the chip that the compiler assigned, 0 on CPU and GPU.
        timeline: Points at which memory changes.
        schedule_length: Schedule points in all.
        notes: What a reader should know.
    """

    peak_bytes: int
    peak_point: int
    peak_phase: StepPhase
    peak_instruction: str
    peak_classes: tuple[PeakClass, ...]
    host_classes: tuple[PeakClass, ...]
    device: SpaceTotals
    host: SpaceTotals | None
    on_chip_bytes: int
    timeline: tuple[TimelinePoint, ...]
    schedule_length: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """What runs in one phase, loop lengths included.

    Attributes:
        phase: Which.
        matmul_flops: Matmuls and convolutions, custom calls of known libraries included; valid window positions only.
        num_kernels: Instructions that start work on the device.
        traffic_bytes: Bytes that they read and write, slices counted by what they touch: an upper bound of memory traffic.
    """

    phase: StepPhase
    matmul_flops: int
    num_kernels: int
    traffic_bytes: int


class CollectiveMeaning(StrEnum):
    """What a collective is for, whatever operation the compiler chose."""

    WEIGHT_GATHER = "weight gather"
    GRADIENT_REDUCTION = "gradient reduction"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One operand of a collective.

    Attributes:
        meaning: What it is for.
        opcode: `all-gather`, `all-reduce`, `reduce-scatter`, `all-to-all`, `collective-permute` ….
        instruction: Its name.
        phase: Where it runs.
        count: Runs in a step.
        parameter: Path of the argument that is gathered or whose gradient is reduced; empty = unknown.
        shape: Of the result.
        payload_bytes: Of the result of one run (for reduce-scatter of the operand).
        wire_bytes: That one run sends over links per device, by a ring.
        group_size: Devices that take part.
        is_async: Whether it was split into start and done.
        op_name: The program's words for it.
    """

    meaning: CollectiveMeaning
    opcode: str
    instruction: str
    phase: StepPhase
    count: int
    parameter: str
    shape: str
    payload_bytes: int
    wire_bytes: int
    group_size: int
    is_async: bool
    op_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomCall:
    """Calls of a custom kernel that the HLO does not show inside.

    Attributes:
        target: What is called.
        phase: Where.
        count: Calls in a step.
        flops: Of all calls, where the call is a known matmul; None = unknown.
        op_name: The program's words for one of them.
    """

    target: str
    phase: StepPhase
    count: int
    flops: int | None
    op_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkReport:
    """What a step computes and moves, from its HLO alone.

    Attributes:
        phases: One of each phase.
        collectives: One entry per operand.
        custom_calls: By target and phase.
        opcodes: Pairs of opcode and instructions in the text, a loop's body once, insides of fusions left out.
        num_xla_remat: Instructions that XLA's own rematerialization pass added.
        loops: Pairs of loop and trip count; None = the text doesn't tell, and its body was counted once.
    """

    phases: tuple[PhaseWork, ...]
    collectives: tuple[Collective, ...]
    custom_calls: tuple[CustomCall, ...]
    opcodes: tuple[tuple[str, int], ...]
    num_xla_remat: int
    loops: tuple[tuple[str, int | None], ...]

    @property
    def matmul_flops(self) -> int:
        """Of all phases."""
        return sum(phase.matmul_flops for phase in self.phases)
