"""What a temporary buffer holds, in words that a person understands.

In: a value of the arena and the point at which it lives. Out: `Label`. Evidence, strongest first: what a loop does with it
(stack, carry), which argument it is a copy or cast of, collectives, shapes of parameters (gradients) and of the vocabulary
(logits), words of its operation's name, and last the phase that it was made in.
"""

import re
from dataclasses import replace
from itertools import pairwise

from remat_kit.analysis.arguments import Argument
from remat_kit.analysis.carried import carried_as
from remat_kit.analysis.collectives import holds_collective
from remat_kit.analysis.dataflow import Dataflow, Element, ElementUse, Origin, instruction_of, origin_of, tuple_index
from remat_kit.analysis.gradients import name_of_gradient, weights_of_shape
from remat_kit.analysis.hlo import Instruction, source_of
from remat_kit.analysis.labels import Evidence, Label, residual_name, short_name
from remat_kit.analysis.phases import phase_of
from remat_kit.analysis.shapes import ArrayShape, arrays_of, element_of
from remat_kit.analysis.stacks import LAYER_INPUTS, Stack, fits, same_source
from remat_kit.graph import Residual
from remat_kit.memory import PeakKind, StepPhase

_RNG = re.compile(r"random_bits|random_gamma|threefry|bernoulli|dropout|rng_|random_seed|random_wrap")
_ATTENTION = re.compile(r"attention|attn|softmax|bhqk|bqhk|bhst|fmha|flash|splash", re.IGNORECASE)
_LOGITS = re.compile(
    r"logits|cross_entropy|log_softmax|logsumexp|take_along_axis|(?:^|[/(])(?:lm_)?head\b|\bloss\b|unembed", re.IGNORECASE
)


def label_of(evidence: Evidence, name: str, index: str, point: StepPhase) -> Label:
    """Says what a value is.

    Args:
        evidence: What is known of the program.
        name: Its defining instruction.
        index: Text of its index in that one's tuple.
        point: Phase of the schedule point at which it lives.

    Returns:
        Its label.
    """
    instruction = instruction_of(evidence.flow, name)
    if instruction is None:
        return Label(kind=PeakKind.OTHER, name=name)
    if instruction.opcode == "async-start" and name in evidence.flow.waits and index:
        # Its tuple holds operands, result and context: the result is what the waiting instruction has.
        return label_of(evidence, evidence.flow.waits[name], index.partition(",")[2], point)
    position = int(index.split(",")[0]) if index else None
    if instruction.shape.startswith("(") and position is None:
        return Label(kind=PeakKind.OTHER, name="tables of tuples")
    element = carried_as(evidence.flow, instruction, position)
    if element is not None and (label := _label_of_element(evidence, element, point)):
        return label
    return _label_of_instruction(evidence, instruction, position, point)


def _label_of_element(evidence: Evidence, element: Element, point: StepPhase) -> Label | None:
    loop = element.loop
    array = arrays_of(element_of(loop.shape, element.index))
    if not array:
        return None
    if element.use is ElementUse.INVARIANT:
        return _label_of_start(evidence, element, point)
    backward = phase_of(loop.op_name) is StepPhase.BACKWARD
    weights = weights_of_shape(evidence.arguments, array[0].dims)
    if not backward:  # a forward loop with its own backward pass (a chunked loss) adds up gradients of whole parameters only
        weights = tuple(each for each in weights if array[0].dims in (each.local.dims, each.global_dims))
    if element.use is ElementUse.STACK and (copied := _stacked_weight(evidence, element)):
        return copied
    source = source_of(evidence.flow.module, loop.frame)
    is_stacked_gradient = backward and element.use is ElementUse.STACK
    if weights and (is_stacked_gradient or not _is_activation(array[0], evidence)):
        name = name_of_gradient(evidence.flow, weights, loop.name, element.index)
        return Label(kind=PeakKind.GRADIENTS, name=name, op_name=loop.op_name, source=source, certainty=9)
    if element.use is ElementUse.STACK:
        return _label_of_stack(evidence.stacks[loop.name, element.index], backward=backward)
    name = "activation gradient between layers" if backward else "activation between layers"
    return Label(kind=PeakKind.CARRIES, name=name, op_name=loop.op_name, source=source, certainty=6)


def _stacked_weight(evidence: Evidence, element: Element) -> Label | None:
    """A stack of what was only sliced or cast of the parameters: a copy of them, made layer by layer."""
    if element.update is None:
        return None
    origin = origin_of(evidence.flow, element.update[1]) or Origin()
    argument = next((each for each in evidence.arguments if each.number == origin.argument), None)
    if argument is None or argument.kind is not PeakKind.PARAMETERS:
        return None
    stack = evidence.stacks[element.loop.name, element.index]
    return Label(
        kind=PeakKind.WEIGHT_COPIES,
        name=argument.path,
        layers=stack.layers,
        op_name=stack.op_name,
        source=stack.source,
        certainty=10,
    )


def _label_of_start(evidence: Evidence, element: Element, point: StepPhase) -> Label | None:
    """A loop only reads it: it is what it was before the loop."""
    start = instruction_of(evidence.flow, element.loop.operands[0])
    if start is None:
        return None
    index: int | None = element.index
    if start.opcode == "tuple":
        start, index = instruction_of(evidence.flow, start.operands[element.index]), None
    for _ in range(50):
        if start is None:
            return None
        if start.opcode == "get-tuple-element":
            index = tuple_index(start)
            start = instruction_of(evidence.flow, start.operands[0])
        elif start.opcode in ("bitcast", "copy-done", "optimization-barrier") and start.operands:
            start = instruction_of(evidence.flow, start.operands[0])
        else:
            return label_of(evidence, start.name, "" if index is None else str(index), point)
    return None


def _label_of_stack(stack: Stack, *, backward: bool) -> Label:
    name, source = residual_name(stack.residual, stack.op_name), stack.source
    kind = PeakKind.ACTIVATION_GRADIENTS if backward else PeakKind.RESIDUALS
    if stack.residual is None and stack.maker is None:
        name = LAYER_INPUTS
    if stack.residual is not None:
        source = stack.residual.source or source
    key = f"{stack.element.loop.name}{{{stack.element.index}}}"
    return Label(kind=kind, name=name, layers=stack.layers, op_name=stack.op_name, source=source, certainty=10, stack=key)


def _label_of_instruction(evidence: Evidence, instruction: Instruction, position: int | None, point: StepPhase) -> Label:
    flow = evidence.flow
    shape = element_of(instruction.shape, position) if position is not None else instruction.shape
    arrays = arrays_of(shape)
    array = arrays[0] if arrays else ArrayShape(dtype="opaque", dims=())
    origin = origin_of(flow, instruction.name, position) or Origin()
    if origin.element is not None and origin.element.use is ElementUse.STACK:
        return _label_of_stack_copy(evidence, origin.element, array)
    if origin.element is not None and (label := _label_of_element(evidence, origin.element, point)):
        return label
    named = _named(flow, instruction)
    source = source_of(flow.module, named.frame)
    argument = next((each for each in evidence.arguments if each.number == origin.argument), None)
    kind, name, certainty = _judge(evidence, instruction, position, array, named.op_name, argument, point)
    residual = _residual_of(evidence, array, source, named.op_name) if kind is PeakKind.RESIDUALS else None
    if residual is not None:
        name = residual_name(residual, named.op_name)
    return Label(kind=kind, name=name, op_name=named.op_name, source=source, certainty=certainty, residual=residual)


def _residual_of(evidence: Evidence, array: ArrayShape, source: str, op_name: str) -> Residual | None:
    """What the trace calls a residual that no loop stacks: by the path of the module that makes it, else by source line."""
    module = f"/{short_name(op_name).rpartition('/')[0]}"
    single = [each for each in evidence.residuals if each.num_layers == 1 and _fits(evidence, each, array)]
    by_path = (each for each in single if any(module.endswith(f"/{name}") for name in each.names))
    return next(by_path, None) or next((each for each in single if same_source(each.source, source)), None)


def _fits(evidence: Evidence, residual: Residual, array: ArrayShape) -> bool:
    return fits(residual, array, num_devices=evidence.flow.module.num_partitions)


def _named(flow: Dataflow, instruction: Instruction) -> Instruction:
    """The instruction, or where the compiler left it without a name the nearest before or behind it that has one."""
    current: Instruction | None = instruction
    for _ in range(10):
        if current is None or current.op_name:
            break
        current = instruction_of(flow, current.operands[0]) if current.operands else None
    if current is not None and current.op_name and current.opcode != "parameter":
        return current
    for user in flow.users.get(instruction.name, ()):
        reader = instruction_of(flow, user)
        if reader is not None and reader.op_name:
            return reader
    loop = instruction_of(flow, flow.loops.get(flow.where[instruction.name], ""))
    return loop or instruction


def _judge(
    evidence: Evidence,
    instruction: Instruction,
    position: int | None,
    array: ArrayShape,
    op_name: str,
    argument: Argument | None,
    point: StepPhase,
) -> tuple[PeakKind, str, int]:
    """Class, name and certainty of a value that no loop carries; `argument` is what it is a copy of."""
    flow, short = evidence.flow, short_name(op_name) or instruction.opcode
    phase = phase_of(op_name)
    weights = weights_of_shape(evidence.arguments, array.dims)
    if holds_collective(flow.module, instruction):
        is_new_weight = phase is StepPhase.UPDATE and argument is None and weights
        name = name_of_gradient(flow, weights, instruction.name, position) if is_new_weight else short
        return PeakKind.COLLECTIVES, argument.path if argument else name, 8
    if argument is not None:
        return _kind_of_copy(argument), argument.path, 8
    if instruction.opcode.startswith("rng") or _RNG.search(op_name):
        return PeakKind.RNG, short, 7
    if weights and phase in (StepPhase.BACKWARD, StepPhase.UPDATE) and not _is_activation(array, evidence):
        name = name_of_gradient(flow, weights, instruction.name, position)
        return (PeakKind.GRADIENTS if phase is StepPhase.BACKWARD else PeakKind.UPDATES), name, 7
    if evidence.vocabulary.intersection(array.dims) or (_LOGITS.search(op_name) and not _in_loop(flow, instruction)):
        return PeakKind.LOGITS, short, 6
    if phase is StepPhase.FORWARD and point in (StepPhase.RECOMPUTE, StepPhase.BACKWARD) and not _in_loop(flow, instruction):
        return PeakKind.RESIDUALS, short, 5
    if _ATTENTION.search(op_name):
        return PeakKind.ATTENTION, short, 5
    if phase is StepPhase.UPDATE and point is not StepPhase.UPDATE and op_name:  # a mask or a table, made before all layers
        return PeakKind.ACTIVATIONS, short, 3
    return _KIND_OF_PHASE[phase], short, 4 if op_name else 0


_KIND_OF_PHASE = {
    StepPhase.FORWARD: PeakKind.ACTIVATIONS,
    StepPhase.RECOMPUTE: PeakKind.RECOMPUTED,
    StepPhase.BACKWARD: PeakKind.ACTIVATION_GRADIENTS,
    StepPhase.UPDATE: PeakKind.OTHER,
}


def _label_of_stack_copy(evidence: Evidence, element: Element, array: ArrayShape) -> Label:
    """A copy or cast of a whole stack, or of one layer of it."""
    stack = evidence.stacks[element.loop.name, element.index]
    label = _label_of_element(evidence, element, StepPhase.BACKWARD)
    assert label is not None, "a stack has a label"
    if label.kind is PeakKind.GRADIENTS:
        return replace(label, certainty=8)
    if array.num_elements < stack.array.num_elements:
        return replace(
            label, kind=PeakKind.ACTIVATIONS, name=f"{label.name}, taken from its stack", layers=1, certainty=8, stack=""
        )
    return replace(label, is_copy=True, certainty=8, logical_bytes=stack.array.num_bytes)


def _kind_of_copy(argument: Argument) -> PeakKind:
    match argument.kind:
        case PeakKind.PARAMETERS:
            return PeakKind.WEIGHT_COPIES
        case PeakKind.OPTIMIZER_STATE:
            return PeakKind.UPDATES
        case _:
            return PeakKind.BATCH


def _is_activation(array: ArrayShape, evidence: Evidence) -> bool:
    """Whether an array has a batch's dimensions, one behind the other: then a weight of the same shape is chance."""
    batches = {each.local.dims[:2] for each in evidence.arguments if each.kind is PeakKind.BATCH and len(each.local.dims) > 1}
    return len(array.dims) > 2 and any(pair in batches for pair in pairwise(array.dims))


def _in_loop(flow: Dataflow, instruction: Instruction) -> bool:
    return flow.where[instruction.name] in flow.loops
