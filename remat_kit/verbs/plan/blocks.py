"""Inside the worker process: what the planner must know of a step, from one trace without rematerialization.

In: a question whose plan is `none`, and its traced step. Out: `StepBlocks`, plain data for the caller's process: the layer of
each stack, the options that the step's knobs stand for, the roofline of its time, a fingerprint of the program. No compiler runs.
"""

import inspect
from collections.abc import Mapping, Sequence

from remat_kit.apply.paths import PathRule
from remat_kit.compile.topology import devices_for
from remat_kit.errors import StepError
from remat_kit.graph import StepGraph
from remat_kit.planner.from_trace import LayerLoop, Rates, block_graph, layer_loops, loops_of
from remat_kit.planner.unrolled import unrolled_stacks
from remat_kit.plans import NO_REMAT
from remat_kit.step import Knobs, Stack, Step
from remat_kit.targets import Target
from remat_kit.verbs.build import build, read_options
from remat_kit.verbs.fingerprint import fingerprint_of
from remat_kit.verbs.plan.described import StackBlocks, StepBlocks
from remat_kit.verbs.plan.roofline import step_time
from remat_kit.verbs.question import Question, load_factory

SMALL_DEPTH = 2
"""Layers of the build that shows whether the depth option does what it says."""

NOMINAL = Rates(flops_per_s=1e12, bytes_per_s=1e11)
"""For targets whose rates nobody published: only FLOPs are counted there, seconds are not shown."""


def step_blocks(question: Question, target: Target, step: Step, graph: StepGraph) -> StepBlocks:
    """Describes a step to the planner.

    Args:
        question: The question.
        target: What it is planned for.
        step: The step without rematerialization.
        graph: Its trace.

    Raises:
        StepError: The step declares no stack, or a stack is no loop that keeps values for the backward pass.
    """
    rates = rates_of(target)
    stacks = _module_stacks(question, graph, rates or NOMINAL) if question.wraps else _stacks(step, graph, rates or NOMINAL)
    return StepBlocks(
        stacks=stacks,
        knobs=_knobs(step.knobs),
        options=options_in_force(question),
        alternatives=tuple((way.text, tuple(way.options.items())) for way in step.alternatives),
        has_depth=not _is_interleaved(question, stacks) and step.knobs.depth is not None and _depth_works(question, target, step),
        num_devices=graph.num_devices,
        flops=sum((op.flops or 0) * op.calls for op in graph.ops if op.is_live) // graph.num_devices,
        time=None if rates is None else step_time(graph, rates),
        program=fingerprint_of(step, graph),
        notes=(*step.notes, *graph.notes),
    )


def rates_of(target: Target) -> Rates | None:
    """What a device of the target does in a second; None = not known."""
    if target.flops_per_s is None or target.memory_bytes_per_s is None:
        return None
    return Rates(flops_per_s=target.flops_per_s, bytes_per_s=target.memory_bytes_per_s, link_bytes_per_s=target.link_bytes_per_s)


def _stacks(step: Step, graph: StepGraph, rates: Rates) -> tuple[StackBlocks, ...]:
    if not step.stacks:
        raise StepError(
            "the step declares no stack to plan for. Add stacks=(Stack(name=…, num_layers=…),) to its Step, or plan for modules "
            "by path: --wrap 'layers/*'."
        )
    loops = match_loops(step.stacks, graph, rates)
    return tuple(_stack_blocks(stack, loops[stack.name]) for stack in step.stacks)


def _module_stacks(question: Question, graph: StepGraph, rates: Rates) -> tuple[StackBlocks, ...]:
    """The layers that module patterns match, each pattern by itself."""
    return tuple(
        StackBlocks(
            name=stack.name,
            num_layers=len(stack.paths),
            accepts_mixed=True,
            repeats=max(1, stack.layer.calls // len(stack.paths)),
            forward_s=stack.layer.forward_s,
            block=stack.layer.block,
            paths=stack.paths,
        )
        for pattern, _ in question.wraps
        for stack in unrolled_stacks(graph, pattern=pattern, is_match=PathRule(pattern=pattern, policy=None).matches, rates=rates)
    )


def match_loops(stacks: Sequence[Stack], graph: StepGraph, rates: Rates) -> Mapping[str, LayerLoop]:
    """Finds the loop of each stack: by its number of layers, stacks of equal length in forward order.

    Raises:
        StepError: A stack has none.
    """
    if len(stacks) == 1:
        return {stacks[0].name: block_graph(graph, num_layers=stacks[0].num_layers, rates=rates)}
    free = list(layer_loops(graph, rates=rates))
    found: dict[str, LayerLoop] = {}
    for num_layers in sorted({stack.num_layers for stack in stacks}, reverse=True):
        names = [stack.name for stack in stacks if stack.num_layers == num_layers]
        fitting = loops_of(free, num_layers=num_layers, stack=f"stack {names[-1]!r}")
        heaviest = sorted(fitting, key=_loop_flops, reverse=True)[: len(names)]
        if len(heaviest) < len(names):
            raise StepError(
                f"stack {names[-1]!r}: no loop over {num_layers} layers is left that keeps values for the backward pass: run its "
                "layers with jax.lax.scan, nn.scan or remat_kit.stack."
            )
        found |= dict(zip(names, (loop for loop in fitting if loop in heaviest), strict=True))
        free = [loop for loop in free if loop not in heaviest]
    return found


def _loop_flops(loop: LayerLoop) -> int:
    return sum(op.flops or 0 for op in loop.block.ops) * loop.calls


def _stack_blocks(stack: Stack, loop: LayerLoop) -> StackBlocks:
    return StackBlocks(
        name=stack.name,
        num_layers=stack.num_layers,
        accepts_mixed=stack.accepts_mixed,
        repeats=max(1, loop.calls // stack.num_layers),
        forward_s=loop.forward_s,
        block=loop.block,
    )


def _knobs(knobs: Knobs) -> tuple[tuple[str, str], ...]:
    named = (("batch", knobs.batch), ("seq", knobs.seq), ("depth", knobs.depth))
    return tuple((knob, option) for knob, option in named if option is not None)


def options_in_force(question: Question) -> tuple[tuple[str, str], ...]:
    """Every option of the factory that has a value: what was given, else the default."""
    factory = load_factory(question.factory)
    parameters = list(inspect.signature(factory).parameters.values())[2:]
    defaults = {each.name: str(each.default) for each in parameters if isinstance(each.default, bool | int | float | str)}
    return tuple((defaults | dict(question.options)).items())


def _is_interleaved(question: Question, stacks: Sequence[StackBlocks]) -> bool:
    """Whether modules of several kinds were matched: which of them a smaller depth leaves, nobody says."""
    return bool(question.wraps) and len(stacks) > 1


def _depth_works(question: Question, target: Target, step: Step) -> bool:
    """Whether the depth option shortens all stacks alike, as small compiles need it."""
    factory = load_factory(question.factory)
    texts = tuple((dict(question.options) | {str(step.knobs.depth): str(SMALL_DEPTH)}).items())
    small = build(factory, NO_REMAT, devices_for(target), read_options(factory, texts))
    expected = [(stack.name, min(SMALL_DEPTH, stack.num_layers)) for stack in step.stacks]
    return [(stack.name, stack.num_layers) for stack in small.stacks] == expected
