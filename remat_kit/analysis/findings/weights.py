"""Findings about weights: copies of them that are kept, and gathers of them that only recomputation needs.

In: `StepFacts`. Out: `Finding`. A copy is the user's when the traced step casts the whole parameter outside of loops; else the
compiler made it, by hoisting a cast out of the loop. A gather is extra when a weight is gathered more often in recomputation and
backward pass together than in the forward pass.
"""

from collections import Counter
from collections.abc import Iterator

from remat_kit.analysis.arguments import same_dims
from remat_kit.analysis.findings.facts import StepFacts, is_worth_saying, live_ops, makers_of, peak_lines
from remat_kit.analysis.shapes import arrays_of, bits_of
from remat_kit.analysis.stacks import xla_dtype
from remat_kit.findings import Change, Finding, FindingKind, Remedy
from remat_kit.graph import Phase, TracedOp
from remat_kit.memory import Collective, CollectiveMeaning, PeakClass, PeakKind, StepPhase
from remat_kit.units import format_bytes

_MOST_NAMES = 4


def weight_copies(facts: StepFacts) -> Iterator[Finding]:
    """Whole stacks of weights that are there a second time at the peak; one finding for each who made them."""
    casts = _casts_outside_loops(facts)
    lines = [line for line in peak_lines(facts, PeakKind.WEIGHT_COPIES) if _is_of_whole_stack(facts, line)]
    for is_users in (True, False):
        found = [line for line in lines if (line.name in casts) is is_users]
        if found and is_worth_saying(facts, sum(line.bytes for line in found)):
            cast = casts[found[0].name] if is_users else None
            dtype = xla_dtype(facts.graph.values[cast.outputs[0]].dtype) if cast is not None else _narrow_dtype(facts, found)
            yield _copies(found, cast, dtype)


def _copies(lines: list[PeakClass], cast: TracedOp | None, dtype: str | None) -> Finding:
    """`dtype` is what the weights are cast to; None = the copies are of the parameters' own."""
    names = tuple(dict.fromkeys(line.name for line in lines))
    if cast is not None:
        who = "the step casts them outside of the loop over layers"
        text = f"Cast each layer's weights inside the block. Gradients then keep the parameters' dtype, not {dtype}."
        remedy = Remedy(text=text, change=Change(casts="inside"))
    elif dtype is not None:
        who = "the compiler moved the cast out of the loop over layers"
        text = f"Cast the stacked weights before the loop: gradients are then rounded to {dtype}."
        remedy = Remedy(text=text, change=Change(casts="outside"))
    else:
        who = "the compiler copies them, in another layout, before the loop over layers"
        remedy = None
    return Finding(
        kind=FindingKind.WEIGHT_COPIES,
        names=names,
        message=f"Copies of {_listing(names)} for all layers at once lie beside the originals at the peak: {who}.",
        bytes_at_stake=sum(line.bytes for line in lines),
        source=lines[0].source if cast is None else cast.source,
        remedy=remedy,
    )


def _narrow_dtype(facts: StepFacts, lines: list[PeakClass]) -> str | None:
    """The element type of copies that have fewer bytes than their parameter's."""
    own = {argument.path: argument.local.dtype for argument in facts.arguments}
    dtypes = {array.dtype: own[line.name] for line in lines for array in arrays_of(line.shape)[:1]}
    return next((dtype for dtype, original in dtypes.items() if bits_of(dtype) < bits_of(original)), None)


def _casts_outside_loops(facts: StepFacts) -> dict[str, TracedOp]:
    """Path of a parameter -> the operation of the traced step that casts or copies all of it, outside of loops."""
    makers, graph = makers_of(facts.graph), facts.graph
    paths = dict(zip(graph.inputs, graph.input_names, strict=True))
    found = {}
    for op in live_ops(graph, Phase.FORWARD):
        if op.kind in ("convert_element_type", "copy", "copy_p", "reduce_precision") and op.calls == 1 and len(op.inputs) == 1:
            value = op.inputs[0]
            while value not in paths and value in makers and len(makers[value].inputs) == 1:
                value = makers[value].inputs[0]
            if value in paths:
                found[paths[value]] = op
    return found


def _is_of_whole_stack(facts: StepFacts, line: PeakClass) -> bool:
    """Whether a line holds all layers of a stacked parameter; a layer, gathered or not, is what a matmul reads."""
    counts = {count for _, count in facts.work.loops if count and count > 1}
    argument = next((each for each in facts.arguments if each.path == line.name), None)
    if argument is None or len(argument.local.dims) < 2 or argument.local.dims[0] not in counts:
        return False
    forms = (argument.local.dims, argument.global_dims)
    return line.layers > 1 or any(same_dims(array.dims, form) for array in arrays_of(line.shape) for form in forms)


def _listing(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def extra_weight_gathers(facts: StepFacts) -> Iterator[Finding]:
    """Weights that are gathered for recomputation besides the gathers of forward and backward pass."""
    gathers = [each for each in facts.work.collectives if each.meaning is CollectiveMeaning.WEIGHT_GATHER]
    again = [each for each in gathers if each.phase is StepPhase.RECOMPUTE]
    extra = _extra_runs(gathers)
    if not extra or not again or facts.trace.remat_flops == 0:
        return
    wire = {each.parameter: each.wire_bytes for each in again}
    wire_bytes = sum(count * wire.get(name, 0) for name, count in extra.items())
    yield Finding(
        kind=FindingKind.EXTRA_WEIGHT_GATHERS,
        names=tuple(extra),
        message=f"Rematerialization gathers {_listing(tuple(extra))} again for the recomputation: {sum(extra.values())} extra "
        f"gathers a step, {format_bytes(wire_bytes)} on the wire of {format_bytes(_wire_bytes(facts.work.collectives))} in all.",
        wire_bytes_at_stake=wire_bytes,
        remedy=Remedy(text="Save what those weights make (rule `weights`, or by name): what is not recomputed gathers nothing."),
    )


def _extra_runs(gathers: list[Collective]) -> dict[str, int]:
    """Parameter -> runs in recomputation and backward pass beyond one for each run of the forward pass."""
    forward, later = Counter[str](), Counter[str]()
    for each in gathers:
        if each.phase is not StepPhase.UPDATE:
            (forward if each.phase is StepPhase.FORWARD else later)[each.parameter] += each.count
    return {name: later[name] - forward[name] for name in later if name and 0 < forward[name] < later[name]}


def _wire_bytes(collectives: tuple[Collective, ...]) -> int:
    return sum(each.wire_bytes * each.count for each in collectives)
