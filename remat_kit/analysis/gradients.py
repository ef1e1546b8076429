"""Which parameter a gradient belongs to.

In: a value of a parameter's shape that the backward pass makes. Out: the parameter's path. Where the value meets a parameter of
its shape in the update, that is the one; else the shape decides, and parameters of equal shape that differ in a number share a
name.
"""

import re
from collections.abc import Sequence

from remat_kit.analysis.arguments import Argument, forms_of, same_dims
from remat_kit.analysis.carried import carried_as
from remat_kit.analysis.dataflow import Dataflow, ElementUse, argument_of, instruction_of, tuple_index
from remat_kit.analysis.hlo import Instruction
from remat_kit.analysis.shapes import arrays_of
from remat_kit.memory import PeakKind

_MAX_READERS = 64


def weights_of_shape(arguments: Sequence[Argument], dims: tuple[int, ...]) -> tuple[Argument, ...]:
    """Parameters that have a form with these dimensions, those in the same order of dimensions first; () for vectors.

    Where optimizer state is split over more devices than its parameter, gradients and updates may be too.

    Args:
        arguments: Of the step.
        dims: Dimensions of some array.

    Returns:
        Parameters.
    """
    real = tuple(dim for dim in dims if dim != 1)
    if len(real) < 2:
        return ()
    weights = [each for each in arguments if each.kind is PeakKind.PARAMETERS]
    if found := _of_shape(weights, real):
        return found
    state = _of_shape([each for each in arguments if each.kind is PeakKind.OPTIMIZER_STATE], real)
    wholes = {each.global_dims for each in state}
    return tuple(each for each in weights if each.global_dims in wholes)


def _of_shape(arguments: Sequence[Argument], real: tuple[int, ...]) -> tuple[Argument, ...]:
    exact = tuple(each for each in arguments if any(_real(form) == real for form in forms_of(each)))
    return exact or tuple(each for each in arguments if any(same_dims(form, real) for form in forms_of(each)))


def name_of_gradient(flow: Dataflow, candidates: Sequence[Argument], name: str, index: int | None) -> str:
    """Path of the parameter whose gradient a value is.

    Args:
        flow: Indices of the module.
        candidates: Parameters of its shape, at least one.
        name: The instruction that makes the value.
        index: Which element of its tuple.

    Returns:
        A path; with `*` for numbers in which the candidates differ.
    """
    allowed = {candidate.number: candidate.path for candidate in candidates}
    queue, seen = _readers(flow, name, index), set[str]()
    while queue and len(seen) < _MAX_READERS:
        reader = queue.pop(0)
        instruction = instruction_of(flow, reader)
        if reader in seen or instruction is None:
            continue
        seen.add(reader)
        met = next((number for operand in instruction.operands if (number := argument_of(flow, operand)) in allowed), None)
        if met is not None:
            return allowed[met]
        if instruction.opcode not in ("while", "tuple"):
            queue += _outside(flow, instruction)
            queue += flow.users.get(reader, ()) if _keeps_shape(instruction.shape, candidates) else ()
    return common_name([candidate.path for candidate in candidates])


def _outside(flow: Dataflow, instruction: Instruction) -> list[str]:
    """Readers, behind the loop, of what an instruction of its body hands on or stacks."""
    element = carried_as(flow, instruction, None)
    if element is None or element.use is ElementUse.INVARIANT:
        return []
    return _readers(flow, element.loop.name, element.index)


def common_name(paths: Sequence[str]) -> str:
    """One name for several paths.

    Example:
        >>> common_name(["p['h_0']['up']", "p['h_1']['up']"])
        "p['h_*']['up']"
        >>> common_name(["p['q']", "p['o']"])
        "p['q'] or of equal shape"
    """
    if len(paths) == 1:
        return paths[0]
    patterns = {re.sub(r"\d+", "*", path) for path in paths}
    return patterns.pop() if len(patterns) == 1 else f"{paths[0]} or of equal shape"


def _readers(flow: Dataflow, name: str, index: int | None) -> list[str]:
    users = flow.users.get(name, ())
    if index is None:
        return list(users)
    elements = [instruction_of(flow, user) for user in users]
    return [
        reader
        for each in elements
        if each is not None and each.opcode == "get-tuple-element" and tuple_index(each) == index
        for reader in flow.users.get(each.name, ())
    ]


def _keeps_shape(shape: str, candidates: Sequence[Argument]) -> bool:
    return any(
        same_dims(array.dims, form) for array in arrays_of(shape) for candidate in candidates for form in forms_of(candidate)
    )


def _real(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in dims if dim != 1)
