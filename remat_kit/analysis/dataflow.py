"""Where a value of a compiled module comes from: through copies, casts, slices, fusions and loops back to an argument.

In: `HloModule`. Out: questions answered by `Dataflow`: which argument a value is a copy, cast, slice or gathered form of; what
a loop does with an element that it carries (hands it through, stacks into it, replaces it).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from remat_kit.analysis.hlo import Computation, HloModule, Instruction
from remat_kit.analysis.loops import body_of, condition_of

_MOVES = frozenset(
    "copy bitcast convert transpose reshape slice dynamic-slice copy-start copy-done optimization-barrier opt-barrier "
    "all-gather all-gather-start all-gather-done all-reduce all-reduce-start all-reduce-done slice-start slice-done "
    "async-done async-update reduce-precision pad bitcast-convert collective-permute collective-permute-start "
    "collective-permute-done".split()
)
# XLA:CPU updates bf16 stacks in f32 and casts them to and fro.
_ALIASES = frozenset("copy bitcast convert copy-start copy-done optimization-barrier opt-barrier".split())
_MAX_DEPTH = 200


class ElementUse(StrEnum):
    """What a loop does with an element of what it carries."""

    INVARIANT = "invariant"
    STACK = "stack"
    CARRY = "carry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """An element of what a loop carries.

    Attributes:
        loop: The `while`.
        parent: The computation that the loop stands in.
        index: Position in the tuple.
        use: What the loop does with it.
        update: For a stack: the instruction of the body, and its computation's name, that makes what is stacked.
    """

    loop: Instruction
    parent: Computation
    index: int
    use: ElementUse
    update: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataflow:
    """Indices over a module.

    Attributes:
        module: The module.
        where: Name of an instruction -> name of its computation.
        loops: Name of a loop's body or condition -> name of the `while`.
        users: Name of an instruction -> names of the instructions that read it.
        callers: Name of a fused computation -> name of the fusion.
        waits: Name of an `async-start` -> name of the instruction that has its result.
    """

    module: HloModule
    where: Mapping[str, str]
    loops: Mapping[str, str]
    users: Mapping[str, tuple[str, ...]]
    callers: Mapping[str, str]
    waits: Mapping[str, str]


def index_dataflow(module: HloModule) -> Dataflow:
    """Builds the indices."""
    where: dict[str, str] = {}
    loops: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    callers: dict[str, str] = {}
    waits: dict[str, str] = {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            where[instruction.name] = computation.name
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction.name)
            if instruction.started_by:
                waits[instruction.started_by] = instruction.name
            if instruction.opcode == "fusion":
                callers[instruction.called[0]] = instruction.name
            if instruction.opcode == "while":
                loops[body_of(instruction)] = loops[condition_of(instruction)] = instruction.name
    return Dataflow(
        module=module,
        where=where,
        loops=loops,
        users={name: tuple(readers) for name, readers in users.items()},
        callers=callers,
        waits=waits,
    )


def instruction_of(flow: Dataflow, name: str) -> Instruction | None:
    """Finds an instruction by name."""
    computation = flow.where.get(name)
    return flow.module.computations[computation].by_name[name] if computation else None


def tuple_index(instruction: Instruction) -> int:
    """The `index` of a get-tuple-element."""
    match = re.search(r"index=(\d+)", instruction.attributes)
    return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a value is a copy, cast, slice or gathered form of; one of both is given.

    Attributes:
        argument: Number of an entry argument.
        element: What a loop has made: a stack that it filled, or what it carried to its end.
    """

    argument: int | None = None
    element: Element | None = None


def argument_of(flow: Dataflow, name: str, index: int | None = None) -> int | None:
    """Number of the entry argument that a value is a copy, cast, slice or gathered form of; None when it is computed."""
    origin = origin_of(flow, name, index)
    return origin.argument if origin else None


def origin_of(flow: Dataflow, name: str, index: int | None = None, depth: int = 0) -> Origin | None:
    """What a value is a copy, cast, slice or gathered form of.

    Args:
        flow: Indices of the module.
        name: The instruction that makes the value.
        index: Which element of its tuple.
        depth: Steps taken so far.

    Returns:
        An argument or a stack; None when the value is computed.
    """
    instruction = instruction_of(flow, name)
    if instruction is None or depth > _MAX_DEPTH:
        return None
    match instruction.opcode:
        case "parameter":
            return _origin_of_parameter(flow, instruction, index, depth)
        case "get-tuple-element":
            return origin_of(flow, instruction.operands[0], tuple_index(instruction), depth + 1)
        case "tuple" if index is not None:
            return origin_of(flow, instruction.operands[index], None, depth + 1)
        case "while" if index is not None:
            element = element_of_loop(flow, instruction, index)
            if element.use is ElementUse.INVARIANT:
                return origin_of(flow, instruction.operands[0], index, depth + 1)
            return Origin(element=element)
        case "fusion":
            inner = _moved_parameter(flow.module.computations[instruction.called[0]], index)
            return None if inner is None else origin_of(flow, instruction.operands[inner], None, depth + 1)
        case "dynamic-update-slice":
            return origin_of(flow, instruction.operands[1], None, depth + 1)
        case "all-gather" | "all-gather-done" | "all-reduce" if index is not None and index < len(instruction.operands):
            return origin_of(flow, instruction.operands[index], None, depth + 1)
        case "custom-call" if '"ConcatBitcast"' in instruction.attributes:  # TPU: slices that were fetched apart, joined again
            return origin_of(flow, instruction.operands[0], None, depth + 1)
        case opcode if opcode in _MOVES and instruction.operands:
            # An asynchronous start is a tuple of operand, result …: what it moves is its operand.
            return origin_of(flow, instruction.operands[0], None, depth + 1)
    return None


def _origin_of_parameter(flow: Dataflow, parameter: Instruction, index: int | None, depth: int) -> Origin | None:
    computation = flow.where[parameter.name]
    if computation == flow.module.entry:
        return Origin(argument=int(parameter.literal))
    if computation in flow.callers:
        fusion = instruction_of(flow, flow.callers[computation])
        return origin_of(flow, fusion.operands[int(parameter.literal)], index, depth + 1) if fusion else None
    loop = instruction_of(flow, flow.loops.get(computation, ""))
    if loop is None or index is None or element_of_loop(flow, loop, index).use is not ElementUse.INVARIANT:
        return None
    return origin_of(flow, loop.operands[0], index, depth + 1)


def _moved_parameter(inner: Computation, index: int | None) -> int | None:
    """Number of the parameter of a fusion that its result only moves (casts, slices, pads into zeros …)."""
    current = inner.by_name[inner.root]
    if current.opcode == "tuple" and index is not None:
        current = inner.by_name[current.operands[index]]
    for _ in range(_MAX_DEPTH):
        if current.opcode == "parameter":
            return int(current.literal)
        if current.opcode == "dynamic-update-slice" or (current.opcode == "select" and _is_zero(inner, current.operands[2])):
            current = inner.by_name[current.operands[1]]
        elif current.opcode in _MOVES and current.operands:
            current = inner.by_name[current.operands[0]]
        else:
            return None
    return None


def _is_zero(computation: Computation, name: str) -> bool:
    instruction = computation.by_name[name]
    while instruction.opcode in ("broadcast", "bitcast", "convert", "copy") and instruction.operands:
        instruction = computation.by_name[instruction.operands[0]]
    return instruction.opcode == "constant" and instruction.literal in ("0", "-0", "false")


def element_of_loop(flow: Dataflow, loop: Instruction, index: int) -> Element:
    """What a loop does with one of the elements that it carries.

    Args:
        flow: Indices of the module.
        loop: A `while`.
        index: Which element.

    Returns:
        The element.
    """
    body = flow.module.computations[body_of(loop)]
    parent = flow.module.computations[flow.where[loop.name]]
    root = body.by_name[body.root]
    result = root.operands[index] if root.opcode == "tuple" and index < len(root.operands) else root.name
    use, update = _use(flow, body, result, index)
    return Element(loop=loop, parent=parent, index=index, use=use, update=update)


def _use(flow: Dataflow, body: Computation, name: str, index: int) -> tuple[ElementUse, tuple[str, str] | None]:
    instruction = body.by_name[name]
    inner_index: int | None = None
    for _ in range(_MAX_DEPTH):
        if instruction.opcode in _ALIASES and instruction.operands:
            instruction = body.by_name[instruction.operands[0]]
        elif instruction.opcode == "get-tuple-element":
            inner_index = tuple_index(instruction)
            instruction = body.by_name[instruction.operands[0]]
        else:
            break
    match instruction.opcode:
        case "parameter" if inner_index == index:
            return ElementUse.INVARIANT, None
        case "dynamic-update-slice":
            if _carried_index(body, instruction.operands[0]) == index:
                return ElementUse.STACK, (body.name, instruction.operands[1])
        case "fusion":
            return _use_in_fusion(flow, body, instruction, inner_index, index)
        case "while" if inner_index is not None:
            return _use_in_loop(flow, body, instruction, inner_index, index)
    return ElementUse.CARRY, None


def _use_in_loop(
    flow: Dataflow, body: Computation, inner: Instruction, inner_index: int, index: int
) -> tuple[ElementUse, tuple[str, str] | None]:
    """An element that an inner loop makes: it is what the inner loop does with it, if it starts from the same element."""
    start = body.by_name[inner.operands[0]]
    if start.opcode != "tuple" or _carried_index(body, start.operands[inner_index]) != index:
        return ElementUse.CARRY, None
    element = element_of_loop(flow, inner, inner_index)
    return element.use, element.update


def _use_in_fusion(
    flow: Dataflow, body: Computation, fusion: Instruction, inner_index: int | None, index: int
) -> tuple[ElementUse, tuple[str, str] | None]:
    inner = flow.module.computations[fusion.called[0]]
    result = inner.by_name[inner.root]
    if result.opcode == "tuple" and inner_index is not None:
        result = inner.by_name[result.operands[inner_index]]
    while result.opcode in _ALIASES and result.operands:
        result = inner.by_name[result.operands[0]]
    if result.opcode != "dynamic-update-slice":
        return ElementUse.CARRY, None
    target = inner.by_name[result.operands[0]]
    while target.opcode in _ALIASES and target.operands:
        target = inner.by_name[target.operands[0]]
    if target.opcode != "parameter" or _carried_index(body, fusion.operands[int(target.literal)]) != index:
        return ElementUse.CARRY, None
    return ElementUse.STACK, (inner.name, result.operands[1])


def _carried_index(body: Computation, name: str) -> int | None:
    """Which element of what the loop carries a value of its body is; None = none."""
    instruction = body.by_name[name]
    while instruction.opcode in _ALIASES and instruction.operands:
        instruction = body.by_name[instruction.operands[0]]
    if instruction.opcode != "get-tuple-element" or body.by_name[instruction.operands[0]].opcode != "parameter":
        return None
    return tuple_index(instruction)
