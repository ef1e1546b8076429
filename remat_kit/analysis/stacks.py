"""Names for what loops stack and carry.

In: the elements that loops carry, and the residuals that the trace found (`graph.Residual`). Out: `Stack`, a stacked buffer
with the name of the values in it. A residual is recognized by element type, shape (whole or divided over devices) and layers;
among equal ones the source line of the code that makes the value decides, then the order.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from remat_kit.analysis.dataflow import Dataflow, Element, ElementUse, element_of_loop, instruction_of, tuple_index
from remat_kit.analysis.hlo import Instruction, source_of
from remat_kit.analysis.loops import trip_count
from remat_kit.analysis.shapes import ArrayShape, arrays_of, element_of
from remat_kit.graph import Origin, Residual

_XLA_DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "bool": "pred",
    "int4": "s4",
    "int8": "s8",
    "int16": "s16",
    "int32": "s32",
    "int64": "s64",
    "uint8": "u8",
    "uint16": "u16",
    "uint32": "u32",
    "uint64": "u64",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}
_THROUGH = frozenset("bitcast copy reshape transpose convert copy-done copy-start optimization-barrier reduce-precision".split())
LAYER_INPUTS = "layer inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """A buffer that a loop fills layer by layer.

    Attributes:
        element: What the loop carries it as.
        array: Its shape.
        layers: Trip count of the loop, 1 when unknown; of a residual that several loops stack, of all of them.
        maker: The instruction that makes one layer of it; None when it is what the loop carries from layer to layer.
        op_name: The program's words for the maker.
        source: `file:line` of the maker.
        residual: What the trace calls it; None = unknown.
    """

    element: Element
    array: ArrayShape
    layers: int
    maker: Instruction | None
    op_name: str
    source: str
    residual: Residual | None = None


def stacks_of(flow: Dataflow, residuals: Sequence[Residual]) -> dict[tuple[str, int], Stack]:
    """Lists the stacks of all loops, with names where the trace knows them.

    Args:
        flow: Indices of the module.
        residuals: What the trace found.

    Returns:
        Stacks by loop and position in what it carries.
    """
    stacks = list(_find(flow))
    stacked = [each for each in residuals if each.origin is Origin.OPERATION and each.num_layers > 1]
    named = _match(stacks, stacked, num_devices=flow.module.num_partitions)
    return {(stack.element.loop.name, stack.element.index): stack for stack in named}


def xla_dtype(dtype: str) -> str:
    """XLA's spelling of a JAX dtype.

    Example:
        >>> xla_dtype("bfloat16")
        'bf16'
    """
    return _XLA_DTYPES.get(dtype, dtype)


def fits(residual: Residual, array: ArrayShape, *, num_devices: int) -> bool:
    """Whether an array of one device can be a residual: same element type, and its dimensions whole or divided over devices."""
    if xla_dtype(residual.dtype) != array.dtype:
        return False
    if residual.device_bytes is not None and residual.device_bytes != array.num_bytes:
        return False
    ratio, rest = divmod(math.prod(residual.shape), max(1, array.num_elements))
    if rest or not 1 <= ratio <= num_devices:
        return False
    wanted = sorted(dim for dim in residual.shape if dim != 1)
    given = sorted(dim for dim in array.dims if dim != 1)
    return wanted == given or (ratio > 1 and num_devices % ratio == 0) or math.prod(wanted) == math.prod(given)


def same_source(left: str, right: str) -> bool:
    """Whether two `file:line` mean the same line; one of them may give a shorter path."""
    if not left or not right:
        return False
    shorter, longer = sorted((left, right), key=len)
    return longer.endswith(shorter)


def _find(flow: Dataflow) -> Iterator[Stack]:
    for computation in flow.module.computations.values():
        for loop in computation.instructions:
            if loop.opcode != "while":
                continue
            layers = trip_count(flow.module, computation, loop) or 1
            for index in range(len(_start(flow, loop))):
                element = element_of_loop(flow, loop, index)
                if element.use is ElementUse.STACK and element.update:
                    yield _stack(flow, element, layers)


def _start(flow: Dataflow, loop: Instruction) -> tuple[str, ...]:
    start = instruction_of(flow, loop.operands[0])
    return start.operands if start and start.opcode == "tuple" else ()


def _stack(flow: Dataflow, element: Element, layers: int) -> Stack:
    assert element.update is not None
    maker = _maker(flow, *element.update)
    return Stack(
        element=element,
        array=arrays_of(element_of(element.loop.shape, element.index))[0],
        layers=layers,
        maker=maker,
        op_name=maker.op_name if maker else element.loop.op_name,
        source=source_of(flow.module, maker.frame) if maker else "",
    )


def _maker(flow: Dataflow, computation: str, name: str) -> Instruction | None:
    """Follows a stacked value back, into and out of fusions, to the operation that makes it; None when the loop carries it."""
    index: int | None = None
    for _ in range(200):
        body = flow.module.computations[computation]
        instruction = body.by_name[name]
        if instruction.opcode in _THROUGH and instruction.operands:
            name = instruction.operands[0]
        elif instruction.opcode == "get-tuple-element":
            name, index = instruction.operands[0], tuple_index(instruction)
        elif instruction.opcode == "fusion":
            computation = instruction.called[0]
            inner = flow.module.computations[computation]
            root = inner.by_name[inner.root]
            name = root.operands[index] if root.opcode == "tuple" and index is not None else root.name
            index = None
        elif instruction.opcode == "parameter":
            caller = _caller(flow, computation)
            if caller is None:
                return None
            computation, name = flow.where[caller.name], caller.operands[int(instruction.literal)]
        else:
            return instruction
    return None


def _caller(flow: Dataflow, computation: str) -> Instruction | None:
    name = flow.callers.get(computation)
    return instruction_of(flow, name) if name else None


def _match(stacks: list[Stack], residuals: list[Residual], *, num_devices: int) -> Iterator[Stack]:
    """Gives residuals to stacks: by name and source line, then by source line, then by shape and order."""
    left = list(residuals)
    chosen: dict[int, Residual] = {}
    for agrees in (_has_name, _has_source, _has_shape):
        for number, stack in enumerate(stacks):
            if number in chosen:
                continue
            found = next((each for each in left if agrees(stack, each) and _may_be(stack, each, num_devices=num_devices)), None)
            if found is not None:
                chosen[number] = found
                left.remove(found)
    for number, stack in enumerate(stacks):
        yield _named(stack, chosen.get(number))


def _has_name(stack: Stack, residual: Residual) -> bool:
    """Modules are often called as what they make: where several stacks come from one line, that tells them apart."""
    return _has_source(stack, residual) and not set(stack.op_name.split("/")).isdisjoint(residual.names)


def _has_source(stack: Stack, residual: Residual) -> bool:
    if residual.kind == "loop_carry" or stack.maker is None:
        return residual.kind == "loop_carry" and stack.maker is None
    return same_source(stack.source, residual.source)


def _has_shape(_: Stack, __: Residual) -> bool:
    return True


def _may_be(stack: Stack, residual: Residual, *, num_devices: int) -> bool:
    if residual.num_layers % stack.layers and stack.layers % residual.num_layers:
        return False
    return fits(residual, stack.array, num_devices=num_devices)


def _named(stack: Stack, residual: Residual | None) -> Stack:
    """With its residual; a loop in a loop stacks stacks, whose layers are those of both."""
    return stack if residual is None else replace(stack, residual=residual, layers=max(stack.layers, residual.num_layers))
