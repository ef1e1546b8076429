"""Findings about the state of training: arguments that nobody donated, and a state that fills the memory by itself.

In: `StepFacts`. Out: `Finding`. An argument counts as state when an output of its shape is made from it in the update. What
sharding, 8-bit moments and adapters would give is computed from the bytes of parameters and optimizer state.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from remat_kit.analysis.findings.facts import StepFacts, is_worth_saying, makers_of, peak_lines
from remat_kit.findings import Change, Finding, FindingKind, Remedy
from remat_kit.graph import Phase, StepGraph, TracedOp
from remat_kit.memory import PeakKind
from remat_kit.units import format_bytes

_BLOCK_VALUES, _SCALE_BYTES = 256, 4  # of block-wise 8-bit moments: Dettmers et al., 2022, arXiv:2110.02861


def not_donated(facts: StepFacts) -> Iterator[Finding]:
    """State whose memory no output may reuse, so that it is there twice."""
    local_bytes = {argument.path: argument.local.num_bytes for argument in facts.arguments}
    updated = _updated_inputs(facts)
    names, positions, num_bytes = [], [], 0
    for position, leaves in _leaves_of_arguments(facts):
        state = [local_bytes.get(facts.graph.input_names[leaf], 0) for leaf in leaves if leaf in updated]
        whole = sum(local_bytes.get(facts.graph.input_names[leaf], 0) for leaf in leaves)
        if position not in facts.donate and 2 * sum(state) > whole:
            names.append(_word(facts.graph.input_names[leaves[0]]))
            positions.append(position)
            num_bytes += sum(state)
    if positions and is_worth_saying(facts, num_bytes):
        donate = tuple(sorted((*facts.donate, *positions)))
        yield Finding(
            kind=FindingKind.NOT_DONATED,
            names=tuple(names),
            message=f"Not donated: {' and '.join(names)}. Old and new state are there at once.",
            bytes_at_stake=num_bytes,
            remedy=Remedy(
                text=f"Donate: donate={donate} in the Step, donate_argnums={donate} in jax.jit. The old state is gone then.",
                change=Change(donate=donate),
            ),
        )


def _leaves_of_arguments(facts: StepFacts) -> Iterator[tuple[int, range]]:
    start = 0
    for position, count in enumerate(facts.num_leaves):
        if count:
            yield position, range(start, start + count)
        start += count


def _word(path: str) -> str:
    """The argument's own name in the path of one of its arrays."""
    return path.partition("[")[0].partition(".")[0]


def _updated_inputs(facts: StepFacts) -> frozenset[int]:
    """Numbers of the flattened arguments of which an output of their type is made in the update, each output of one."""
    graph, makers = facts.graph, makers_of(facts.graph)
    number = {value: index for index, value in enumerate(graph.inputs)}
    found: set[int] = set()
    for output in graph.outputs:
        met = [number[value] for value in _same_shape_sources(graph, makers, output) if value in number]
        found.update(leaf for leaf in met[:1] if _type(graph, graph.inputs[leaf]) == _type(graph, output))
    return frozenset(found)


def _type(graph: StepGraph, value: int) -> tuple[tuple[int, ...], str]:
    return graph.values[value].shape, graph.values[value].dtype


def _same_shape_sources(graph: StepGraph, makers: Mapping[int, TracedOp], output: int) -> Iterator[int]:
    """Values of the output's shape that it is made from without the differentiated code between, nearest first."""
    shape = graph.values[output].shape
    waiting, seen = [output], {output}
    while waiting:
        value = waiting.pop(0)
        maker = makers.get(value)
        if value != output and maker is None:
            yield value
        if maker is None or maker.phase is not Phase.FORWARD:
            continue
        new = [source for source in maker.inputs if source not in seen and graph.values[source].shape == shape]
        seen.update(new)
        waiting += new


def state_fills_memory(facts: StepFacts) -> Iterator[Finding]:
    """Parameters, optimizer state and gradients alone take the budget: no policy can make the step fit."""
    totals = facts.memory.device
    fixed_bytes = totals.argument_bytes + totals.output_bytes - totals.alias_bytes
    needed_bytes = fixed_bytes + sum(line.bytes for line in peak_lines(facts, PeakKind.GRADIENTS))
    if facts.budget_bytes is None or needed_bytes <= facts.budget_bytes:
        return
    by_kind = Counter[PeakKind]()
    for line in facts.memory.peak_classes:
        by_kind[line.kind] += line.bytes
    moments_bytes = by_kind[PeakKind.OPTIMIZER_STATE]
    yield Finding(
        kind=FindingKind.STATE_FILLS_MEMORY,
        message=f"Arguments, results and gradients alone take {format_bytes(needed_bytes)} of {format_bytes(facts.budget_bytes)} "
        f"({format_bytes(by_kind[PeakKind.PARAMETERS])} parameters, {format_bytes(moments_bytes)} optimizer state, "
        f"{format_bytes(by_kind[PeakKind.GRADIENTS])} gradients at the peak): no rematerialization makes this fit.",
        bytes_at_stake=needed_bytes - facts.budget_bytes,
        remedy=Remedy(text=_relief(facts, by_kind, needed_bytes)),
    )


def _relief(facts: StepFacts, by_kind: Mapping[PeakKind, int], needed_bytes: int) -> str:
    assert facts.budget_bytes is not None
    parameters, moments = by_kind[PeakKind.PARAMETERS], by_kind[PeakKind.OPTIMIZER_STATE]
    gradients = by_kind[PeakKind.GRADIENTS]
    parts = _fewest_parts(needed_bytes, facts.budget_bytes)
    narrow = sum(
        2 * argument.local.num_elements if argument.local.dtype in ("f32", "f64") else argument.local.num_bytes
        for argument in facts.arguments
        if argument.kind is PeakKind.PARAMETERS
    )
    found = [
        f"State sharded over {parts * facts.graph.num_devices} devices leaves {format_bytes(needed_bytes // parts)} of it on each"
    ]
    if moments:
        elements = sum(each.local.num_elements for each in facts.arguments if each.kind is PeakKind.OPTIMIZER_STATE)
        eighth = elements + elements // _BLOCK_VALUES * _SCALE_BYTES
        if eighth < moments:
            found.append(f"8-bit moments take {format_bytes(eighth)} instead of {format_bytes(moments)}")
    if parameters:
        saved = format_bytes(needed_bytes - parameters - moments - gradients + narrow)
        found.append(f"adapters on frozen bfloat16 weights leave {saved}, and what the adapters take")
    return "; ".join(found) + ". Accumulating gradients over smaller batches does not help: it shrinks activations only."


def _fewest_parts(needed_bytes: int, budget_bytes: int) -> int:
    """The least power of two that leaves a fifth of the budget to activations."""
    parts = 2
    while needed_bytes > 0.8 * budget_bytes * parts:
        parts *= 2
    return parts
