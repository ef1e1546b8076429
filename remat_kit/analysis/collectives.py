"""Collectives by what they are for, whatever operation the compiler chose.

In: a module and what runs in it. Out: `Collective`, one per operand. A weight gather is an all-gather, or an all-reduce of a
shard padded with zeros (TPU), whose result has the unsharded shape of a parameter or of one layer of it. An all-reduce whose
fusion slices its result is a reduce-scatter. Wire bytes are those of a ring.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from remat_kit.analysis.arguments import Argument, arguments_of, same_dims
from remat_kit.analysis.dataflow import Dataflow, argument_of, index_dataflow, instruction_of
from remat_kit.analysis.gradients import name_of_gradient, weights_of_shape
from remat_kit.analysis.hlo import Computation, HloModule, Instruction, attribute
from remat_kit.analysis.loops import Execution
from remat_kit.analysis.phases import phase_of
from remat_kit.analysis.shapes import ArrayShape, arrays_of
from remat_kit.memory import Collective, CollectiveMeaning, PeakKind, StepPhase

OPCODES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_STARTS = {f"{opcode}-start": opcode for opcode in OPCODES}
# A ring of permutes between partial matmuls is a gather, or a reduction, that the compiler took apart.
_GATHERS = ("all-gather", "all-reduce", "collective-permute")
_REDUCTIONS = ("all-reduce", "reduce-scatter", "collective-permute")
_WIRE_SHARE = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A collective instruction in the walk; `outer` is the instruction of the schedule that holds it (itself or a fusion)."""

    inner: Instruction
    outer: Instruction
    run: Execution
    opcode: str
    is_async: bool


def collective_opcode(instruction: Instruction) -> str:
    """The collective that an instruction starts; empty for others, and for what completes one."""
    return _STARTS.get(instruction.opcode, instruction.opcode if instruction.opcode in OPCODES else "")


def collectives_of(module: HloModule, runs: Iterable[Execution]) -> tuple[Collective, ...]:
    """Lists collectives.

    Args:
        module: The module.
        runs: What runs in it.

    Returns:
        One record per operand, in schedule order.
    """
    found = [each for run in runs for each in _find(module, run)]
    if not found:
        return ()
    flow = index_dataflow(module)
    arguments = arguments_of(module)
    return tuple(record for each in found for record in _describe(each, flow, arguments))


def holds_collective(module: HloModule, instruction: Instruction) -> bool:
    """Whether an instruction starts, completes or, as a fusion, holds a collective."""
    if instruction.opcode.removesuffix("-done").removesuffix("-start") in OPCODES:
        return True
    if instruction.opcode != "fusion":
        return False
    return any(collective_opcode(inner) for name in instruction.called for inner in module.computations[name].instructions)


def _find(module: HloModule, run: Execution) -> Iterator[_Found]:
    instruction = run.instruction
    if opcode := collective_opcode(instruction):
        is_async = run.is_async or instruction.opcode in _STARTS
        yield _Found(inner=instruction, outer=instruction, run=run, opcode=opcode, is_async=is_async)
    elif instruction.opcode == "fusion":
        computation = module.computations[instruction.called[0]]
        for inner in computation.instructions:
            if opcode := collective_opcode(inner):
                scattered = opcode == "all-reduce" and _is_sliced(computation, inner)
                is_async = run.is_async or "async" in instruction.name or inner.opcode in _STARTS
                opcode = "reduce-scatter" if scattered else opcode
                yield _Found(inner=inner, outer=instruction, run=run, opcode=opcode, is_async=is_async)


def _is_sliced(computation: Computation, collective: Instruction) -> bool:
    readers = [each for each in computation.instructions if collective.name in each.operands]
    return bool(readers) and all(each.opcode == "dynamic-slice" for each in readers)


def _describe(found: _Found, flow: Dataflow, arguments: tuple[Argument, ...]) -> Iterator[Collective]:
    computation = flow.module.computations[flow.where[found.inner.name]]
    op_name = found.inner.op_name or found.run.op_name
    phase = phase_of(op_name)
    group_size = _group_size(found.inner, flow.module.num_partitions)
    left = arguments
    for operand, result in _operands(found, computation):
        meaning, parameter = _meaning(found, operand, result, phase, flow, arguments, left)
        # One collective carries each weight once: weights of equal shape are taken in order.
        left = tuple(argument for argument in left if argument.path != parameter)
        payload = arrays_of(computation.by_name[operand].shape)[0] if found.opcode == "reduce-scatter" else result
        yield Collective(
            meaning=meaning,
            opcode=found.opcode,
            instruction=found.inner.name,
            phase=phase,
            count=found.run.times,
            parameter=parameter,
            shape=f"{result.dtype}[{','.join(map(str, result.dims))}]",
            payload_bytes=payload.num_bytes,
            wire_bytes=_wire_bytes(found.opcode, payload.num_bytes, group_size),
            group_size=group_size,
            is_async=found.is_async,
            op_name=op_name,
        )


def _operands(found: _Found, computation: Computation) -> Iterator[tuple[str, ArrayShape]]:
    """Operands with their results; a start's tuple holds operands before results, and counters behind."""
    operands = found.inner.operands[:1] if found.opcode == "collective-permute" else found.inner.operands
    results = arrays_of(found.inner.shape)
    if found.inner.opcode in _STARTS and found.opcode != "all-reduce" and len(results) > len(operands):
        results = results[len(operands) :]
    if found.opcode == "all-to-all" and len(operands) > 1:
        operands = operands[: len(results)]
    for operand, result in zip(operands, results, strict=False):
        if operand in computation.by_name:
            yield operand, result


def _meaning(
    found: _Found,
    operand: str,
    result: ArrayShape,
    phase: StepPhase,
    flow: Dataflow,
    arguments: tuple[Argument, ...],
    left: tuple[Argument, ...],
) -> tuple[CollectiveMeaning, str]:
    """Meaning and parameter of one operand; `left` are the arguments that no operand of this collective has matched by shape."""
    by_number = {argument.number: argument for argument in arguments}
    if found.opcode in _GATHERS:
        source = by_number.get(_argument_behind(found, operand, flow))  # type: ignore[arg-type]
        if source and source.kind is PeakKind.PARAMETERS and (found.opcode != "all-reduce" or _is_padded(operand, flow)):
            return CollectiveMeaning.WEIGHT_GATHER, source.path
    match = next(iter(weights_of_shape(left, result.dims)), None)
    if found.opcode == "all-gather" and match and _is_unsharded(match, result.dims):
        return CollectiveMeaning.WEIGHT_GATHER, match.path
    if found.opcode == "all-reduce" and match and _is_padded(operand, flow) and _is_unsharded(match, result.dims):
        return CollectiveMeaning.WEIGHT_GATHER, match.path
    if found.opcode in _REDUCTIONS and phase in (StepPhase.BACKWARD, StepPhase.UPDATE):
        weights = weights_of_shape(left, result.dims) or weights_of_shape(left, _dims_of(operand, flow))
        if weights:
            return CollectiveMeaning.GRADIENT_REDUCTION, _reduced(found, operand, weights, flow)
    return CollectiveMeaning.OTHER, ""


def _reduced(found: _Found, operand: str, weights: tuple[Argument, ...], flow: Dataflow) -> str:
    """Path of the parameter whose gradient is reduced."""
    several = len(found.inner.operands) > 1
    index = found.inner.operands.index(operand) if several else None
    done = [user for user in flow.users.get(found.outer.name, ()) if user.startswith(found.outer.name.split("-start")[0])]
    names = [found.outer.name, *done] if found.inner.opcode in _STARTS else [found.outer.name]
    guesses = [name_of_gradient(flow, weights, name, index) for name in names]
    exact = [guess for guess in guesses if guess in {weight.path for weight in weights}]
    return exact[0] if exact else weights[0].path if several else guesses[0]


def _argument_behind(found: _Found, operand: str, flow: Dataflow) -> int | None:
    """The argument that is gathered; seen from outside when a fusion holds the collective."""
    if found.inner is found.outer:
        return argument_of(flow, operand)
    computation = flow.module.computations[flow.where[operand]]
    instruction = computation.by_name[operand]
    if instruction.opcode == "parameter" and int(instruction.literal) < len(found.outer.operands):
        return argument_of(flow, found.outer.operands[int(instruction.literal)])
    return None


def _dims_of(name: str, flow: Dataflow) -> tuple[int, ...]:
    instruction = instruction_of(flow, name)
    return arrays_of(instruction.shape)[0].dims if instruction and arrays_of(instruction.shape) else ()


def _is_unsharded(argument: Argument, dims: tuple[int, ...]) -> bool:
    whole = argument.global_dims
    return whole != argument.local.dims and (same_dims(whole, dims) or same_dims(whole[1:], dims))


def _is_padded(name: str, flow: Dataflow) -> bool:
    """Whether a value is a shard in a field of zeros: a pad, or an update of, or a choice with, zeros."""
    instruction = instruction_of(flow, name)
    for _ in range(20):
        if instruction is None:
            return False
        if instruction.opcode in ("pad", "dynamic-update-slice", "select"):
            return True
        if instruction.opcode == "fusion":
            inner = flow.module.computations[instruction.called[0]]
            instruction = inner.by_name[inner.root]
        elif (
            instruction.opcode in ("bitcast", "copy", "convert", "reshape", "get-tuple-element", "transpose")
            and instruction.operands
        ):
            instruction = instruction_of(flow, instruction.operands[0])
        else:
            return False
    return False


def _group_size(instruction: Instruction, num_partitions: int) -> int:
    text = instruction.attributes
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=", text):
        return int(match[1].split(",")[-1])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'?([\w.]+)'?=(\d+)", match[1])}
        return math.prod(sizes.get(axis.strip().strip("'"), 1) for axis in match[2].split(","))
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(match[1].split(","))
    return 2 if attribute(instruction, "source_target_pairs") else num_partitions


def _wire_bytes(opcode: str, payload_bytes: int, group_size: int) -> int:
    if opcode not in _WIRE_SHARE:
        return payload_bytes
    return _WIRE_SHARE[opcode] * payload_bytes * (group_size - 1) // max(1, group_size)
