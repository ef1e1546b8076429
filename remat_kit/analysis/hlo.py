"""A compiled module as plain records: computations with their instructions in schedule order, and stack frames.

`hlo_reader` makes them. What few readers need (windows, dimension numbers, replica groups …) stays text in `attributes` and is
read by `attribute`. Trip counts are in `loops`, where values come from in `dataflow`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

LIBRARY_FOLDER = "site-packages/"
"""What paths of installed libraries start with, once the folders of a machine are removed from a dump."""

FRAMEWORKS = ("jax", "jaxlib", "flax", "optax", "chex", "einops")
"""Installed libraries whose lines say nothing of a model; those of a library of models do."""

_LIBRARIES = (*(f"{LIBRARY_FOLDER}{name}/" for name in FRAMEWORKS), "remat_kit/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where in the user's program an operation was written.

    Attributes:
        file: Path of the source file.
        function: Qualified name.
        line: Line number.
        parent: Number of the calling frame; 0 = none.
    """

    file: str
    function: str
    line: int
    parent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Unique in the module.
        shape: Text of its shape, layout included; see `shapes`.
        opcode: `fusion`, `while`, `custom-call` ….
        operands: Names of instructions of the same computation; for a constant or parameter () .
        literal: Text between the parentheses of a constant or a parameter.
        attributes: Everything behind the operands, as text.
        op_name: The program's own words for it, from its metadata; may be empty.
        frame: Number of its stack frame; 0 = unknown.
        called: Names of the computations that it calls.
        started_by: For what runs beside the schedule: the instruction that starts it; this one waits for its result. Else empty.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: str
    op_name: str
    frame: int
    called: tuple[str, ...]
    started_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """A computation.

    Attributes:
        name: Unique in the module.
        instructions: In schedule order.
        by_name: The same, by name.
        root: Name of the instruction that is its result.
    """

    name: str
    instructions: tuple[Instruction, ...]
    by_name: Mapping[str, Instruction]
    root: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HloModule:
    """A compiled module.

    Attributes:
        name: Of the program.
        computations: By name.
        entry: Name of the entry computation.
        frames: Stack frames by number.
        num_partitions: Devices that the program is partitioned over.
        donated: Numbers of the entry parameters whose memory results reuse.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    frames: Mapping[int, Frame]
    num_partitions: int
    donated: frozenset[int] = frozenset()


def attribute(instruction: Instruction, key: str) -> str | None:
    """The text of one attribute.

    Args:
        instruction: An instruction.
        key: Such as `window`, `dim_labels`, `replica_groups`.

    Returns:
        What stands behind `key=`, braces included; None when it has no such attribute.
    """
    match = re.search(rf'(?:^|[ ,{{]){key}=(\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|"[^"]*"|[^\s,]+)', instruction.attributes)
    return match[1] if match else None


def source_of(module: HloModule, frame: int) -> str:
    """`file:line` of the innermost frame outside frameworks and remat-kit, else of the innermost; empty when unknown."""
    innermost = module.frames.get(frame)
    found = innermost
    while found is not None and found.file.startswith(_LIBRARIES):
        found = module.frames.get(found.parent)
    chosen = found or innermost
    return f"{chosen.file.removeprefix(LIBRARY_FOLDER)}:{chosen.line}" if chosen else ""
