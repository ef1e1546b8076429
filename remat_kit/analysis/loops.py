"""Loops of a compiled module, and how often each instruction runs.

In: `HloModule`. Out: `Execution`, an instruction with the number of its runs in a step. A loop's trip count is what the
compiler wrote down (`known_trip_count`, CPU and GPU), else the constant that the loop's condition compares its counter with
(TPU), less the counter's first value; never the program's own idea of it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from remat_kit.analysis.hlo import Computation, HloModule, Instruction

_KNOWN = re.compile(r'known_trip_count":?=?\{"?n"?:"?(\d+)')
_PASS_THROUGH = ("copy", "bitcast", "convert", "reshape", "copy-done", "optimization-barrier")
_FLIPPED = {"GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """An instruction outside of fusions, and how often it runs.

    Attributes:
        instruction: The instruction.
        computation: The computation that it stands in.
        times: Runs in a step.
        loop: Name of the innermost `while` around it; empty outside.
        op_name: The program's words for it; those of the loop, or of what runs before it, where the compiler left none.
        is_async: Whether it runs beside the schedule, from an `async-start` on.
    """

    instruction: Instruction
    computation: Computation
    times: int
    loop: str
    op_name: str
    is_async: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a value of a loop's condition: a constant, or an element of what the loop carries."""

    constant: int | None = None
    element: int | None = None


def executions(module: HloModule) -> Iterator[Execution]:
    """Walks what runs, loops times their trip count (once where that is unknown), every branch of a conditional.

    Args:
        module: A module.

    Yields:
        Instructions of the entry, of loops, branches and calls; not of fusions or reducers.
    """
    yield from _walk(module, module.computations[module.entry], _Place(times=1, loop="", op_name=""))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the walk is; see `Execution`."""

    times: int
    loop: str
    op_name: str


def _walk(module: HloModule, computation: Computation, place: _Place) -> Iterator[Execution]:
    before = ""  # what the compiler left without a name belongs to its loop, else to what runs before it
    for instruction in computation.instructions:
        op_name = instruction.op_name or place.op_name or before
        before = before if instruction.opcode in ("parameter", "constant") else op_name
        yield Execution(
            instruction=instruction,
            computation=computation,
            times=place.times,
            loop=place.loop,
            op_name=op_name,
            is_async=bool(instruction.started_by),
        )
        if instruction.opcode == "while":
            times = place.times * (trip_count(module, computation, instruction) or 1)
            inner = replace(place, times=times, loop=instruction.name, op_name=op_name)
        elif instruction.opcode in ("call", "conditional"):
            inner = replace(place, op_name=op_name)
        else:
            continue
        for name in instruction.called:
            yield from _walk(module, module.computations[name], inner)


def loops_of(module: HloModule) -> dict[str, int | None]:
    """Trip count of every loop by its instruction's name; None = the text doesn't tell."""
    return {
        run.instruction.name: trip_count(module, run.computation, run.instruction)
        for run in executions(module)
        if run.instruction.opcode == "while"
    }


def trip_count(module: HloModule, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop's body runs each time that the loop does.

    Args:
        module: The module.
        computation: The computation that the loop stands in.
        loop: A `while` instruction.

    Returns:
        Iterations; None when the text doesn't tell.
    """
    if match := _KNOWN.search(loop.attributes):
        return int(match[1])
    condition = module.computations[condition_of(loop)]
    bound = _bound(module, condition, condition.root)
    if bound is None:
        return None
    counter, limit, direction = bound
    first = _initial(computation, loop, counter) or 0  # JAX's own loops count from 0
    last = limit.constant if limit.constant is not None else _initial(computation, loop, limit)
    if last is None:
        return None
    distance = max(0, last - first + (1 if direction == "LE" else 0))
    return -(-distance // _step(module, loop, counter))


def _step(module: HloModule, loop: Instruction, counter: Known) -> int:
    """What the body adds to the loop's counter: 1, or 2 where the compiler lets both directions of a ring do a half."""
    body = module.computations[body_of(loop)]
    root = body.by_name[body.root]
    if counter.element is None or root.opcode != "tuple" or counter.element >= len(root.operands):
        return 1
    return max(1, _added(module, body, root.operands[counter.element], {}))


def _added(module: HloModule, computation: Computation, name: str, outside: dict[str, int]) -> int:
    """Sum of the constants that are added on the way to a value; `outside` has those that a fusion's parameters stand for."""
    instruction = computation.by_name[name]
    if instruction.opcode in _PASS_THROUGH:
        return _added(module, computation, instruction.operands[0], outside)
    if instruction.opcode == "constant":
        return _integer(instruction) or 0
    if instruction.opcode == "parameter":
        return outside.get(instruction.literal, 0)
    if instruction.opcode == "add":
        return sum(_added(module, computation, operand, outside) for operand in instruction.operands)
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        given = {str(at): _added(module, computation, operand, outside) for at, operand in enumerate(instruction.operands)}
        return _added(module, inner, inner.root, given)
    return 0


def condition_of(loop: Instruction) -> str:
    """Name of a loop's condition."""
    match = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    return match[1] if match else loop.called[0]


def body_of(loop: Instruction) -> str:
    """Name of a loop's body."""
    match = re.search(r"body=%?([\w.\-]+)", loop.attributes)
    return match[1] if match else loop.called[-1]


def _bound(module: HloModule, computation: Computation, name: str) -> tuple[Known, Known, str] | None:
    """Follows a condition's result to its comparison: counter, limit, direction."""
    instruction = computation.by_name[name]
    if instruction.opcode == "compare":
        left, right = (_known(computation, operand) for operand in instruction.operands)
        return _oriented(instruction, left, right)
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        found = _bound(module, inner, inner.root)
        if found is None:
            return None
        outside = [_known(computation, operand) for operand in instruction.operands]
        counter, limit, direction = found
        return _through(counter, outside), _through(limit, outside), direction
    if instruction.opcode in _PASS_THROUGH:
        return _bound(module, computation, instruction.operands[0])
    return None


def _oriented(compare: Instruction, left: Known, right: Known) -> tuple[Known, Known, str]:
    match = re.search(r"direction=(\w+)", compare.attributes)
    direction = match[1] if match else "LT"
    if left.constant is not None and direction in _FLIPPED:
        return right, left, _FLIPPED[direction]
    return left, right, direction


def _through(known: Known, outside: list[Known]) -> Known:
    """A fusion's parameter (its element is minus one minus the parameter's number) seen from outside."""
    if known.element is not None and known.element < 0:
        return outside[-1 - known.element]
    return known


def _known(computation: Computation, name: str) -> Known:
    instruction = computation.by_name[name]
    match instruction.opcode:
        case "constant":
            return Known(constant=_integer(instruction))
        case "get-tuple-element":
            return Known(element=int(re.search(r"index=(\d+)", instruction.attributes)[1]))  # type: ignore[index]
        case "parameter":
            return Known(element=-1 - int(instruction.literal))
        case opcode if opcode in _PASS_THROUGH:
            return _known(computation, instruction.operands[0])
    return Known()


def _initial(computation: Computation, loop: Instruction, counter: Known) -> int | None:
    """The value that an element of the loop's tuple starts with."""
    start = computation.by_name[loop.operands[0]]
    if counter.element is None or start.opcode != "tuple" or counter.element >= len(start.operands):
        return counter.constant
    return _known(computation, start.operands[counter.element]).constant


def _integer(constant: Instruction) -> int | None:
    return int(constant.literal) if re.fullmatch(r"-?\d+", constant.literal) else None
