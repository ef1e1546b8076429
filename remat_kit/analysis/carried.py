"""Which element of what a loop carries a value is.

In: the instruction that makes a value. Out: `dataflow.Element`, also for the value that starts it and for what the body makes
of it: all of them share one buffer, and the loop tells what it is for.
"""

from remat_kit.analysis.dataflow import Dataflow, Element, ElementUse, element_of_loop, instruction_of, tuple_index
from remat_kit.analysis.hlo import Instruction


def carried_as(flow: Dataflow, instruction: Instruction, position: int | None) -> Element | None:
    """The element of a loop that a value is.

    Args:
        flow: Indices of the module.
        instruction: Makes the value.
        position: Which element of its tuple; None = it makes one value.

    Returns:
        The element: the loop's own, its body's parameter's, what starts it or comes out of the body; None = no loop carries it.
    """
    if position is not None:
        if instruction.opcode == "while":
            return element_of_loop(flow, instruction, position)
        loop = instruction_of(flow, flow.loops.get(flow.where[instruction.name], ""))
        if instruction.opcode == "parameter" and loop is not None:
            return element_of_loop(flow, loop, position)
    return _element_that_starts(flow, instruction, position) or _element_that_ends(flow, instruction, position)


def _element_that_starts(flow: Dataflow, instruction: Instruction, position: int | None) -> Element | None:
    for name in _readers(flow, instruction, position):
        reader = instruction_of(flow, name)
        if reader is None or reader.opcode != "tuple":
            continue
        for user in flow.users.get(name, ()):
            loop = instruction_of(flow, user)
            if loop is not None and loop.opcode == "while":
                heads = _names(flow, instruction, position)
                index = next((at for at, operand in enumerate(reader.operands) if operand in heads), None)
                if index is not None and element_of_loop(flow, loop, index).use is not ElementUse.INVARIANT:
                    return element_of_loop(flow, loop, index)
    return None


def _element_that_ends(flow: Dataflow, instruction: Instruction, position: int | None) -> Element | None:
    computation = flow.where[instruction.name]
    loop = instruction_of(flow, flow.loops.get(computation, ""))
    if loop is None:
        return None
    body = flow.module.computations[computation]
    root = body.by_name[body.root]
    if root.opcode != "tuple":
        return None
    heads = _names(flow, instruction, position)
    index = next((at for at, operand in enumerate(root.operands) if operand in heads), None)
    return None if index is None else element_of_loop(flow, loop, index)


def _names(flow: Dataflow, instruction: Instruction, position: int | None) -> frozenset[str]:
    """Names under which a value is read: its own, bitcasts of it, and the elements that are taken of a tuple."""
    names = set()
    queue = [instruction.name] if position is None else []
    for user in flow.users.get(instruction.name, ()):
        reader = instruction_of(flow, user)
        if reader and position is not None and reader.opcode == "get-tuple-element" and tuple_index(reader) == position:
            queue.append(user)
    while queue:
        name = queue.pop()
        names.add(name)
        for user in flow.users.get(name, ()):
            reader = instruction_of(flow, user)
            if reader and reader.opcode in ("bitcast", "copy-done", "async-done", "all-gather-done", "all-reduce-done"):
                queue.append(user)
    return frozenset(names)


def _readers(flow: Dataflow, instruction: Instruction, position: int | None) -> tuple[str, ...]:
    return tuple(user for name in _names(flow, instruction, position) for user in flow.users.get(name, ()))
