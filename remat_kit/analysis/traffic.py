"""Bytes that an instruction reads and writes in memory, from its HLO: an upper bound, as caches and on-chip memory are left out.

A fusion that takes a slice of an operand reads the slice; one that writes a slice in place writes the slice.
"""

from remat_kit.analysis.hlo import Computation, HloModule, Instruction
from remat_kit.analysis.shapes import arrays_of

_SLICES = ("dynamic-slice", "slice", "gather")


def shape_bytes(shape: str) -> int:
    """Logical bytes of all arrays of a shape."""
    return sum(array.num_bytes for array in arrays_of(shape))


def traffic_bytes(instruction: Instruction, computation: Computation, module: HloModule) -> int:
    """Bytes read and written by one run.

    Args:
        instruction: An instruction outside of fusions.
        computation: The one that it stands in.
        module: The module.

    Returns:
        Bytes.
    """
    if instruction.opcode == "fusion":
        return _fusion_bytes(instruction, module)
    if instruction.opcode in _SLICES:
        return 2 * shape_bytes(instruction.shape)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * shape_bytes(computation.by_name[instruction.operands[1]].shape)
    read = sum(shape_bytes(computation.by_name[name].shape) for name in instruction.operands)
    return read + shape_bytes(instruction.shape)


def _fusion_bytes(fusion: Instruction, module: HloModule) -> int:
    inner = module.computations[fusion.called[0]]
    users: dict[str, list[Instruction]] = {}
    for instruction in inner.instructions:
        for operand in instruction.operands:
            users.setdefault(operand, []).append(instruction)
    total = sum(_written(inner.by_name[name], inner) for name in _results(inner))
    for instruction in inner.instructions:
        if instruction.opcode == "parameter":
            total += _read(instruction, users.get(instruction.name, []))
    return total


def _results(inner: Computation) -> tuple[str, ...]:
    root = inner.by_name[inner.root]
    return root.operands if root.opcode == "tuple" else (root.name,)


def _written(result: Instruction, inner: Computation) -> int:
    while result.opcode in ("bitcast", "copy") and result.operands:
        result = inner.by_name[result.operands[0]]
    if result.opcode == "dynamic-update-slice":
        return shape_bytes(inner.by_name[result.operands[1]].shape)
    return shape_bytes(result.shape)


def _read(parameter: Instruction, users: list[Instruction]) -> int:
    whole = shape_bytes(parameter.shape)
    part = 0
    for user in users:
        if user.opcode in _SLICES and user.operands[0] == parameter.name:
            part += shape_bytes(user.shape)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != parameter.name:
            return whole
    return min(whole, part)
