"""What runs again in the backward pass, and which saved values do not prevent it.

In: a graph, its `Links` and what it keeps. Out: `Recomputed` and `Finding` records. Recomputed and forward operations are
matched by their code (`originals.py`). A saved value is held against the nearest matmul, kernel or convolution that made it: when
that still runs in a region that reads the value, something else of it is needed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat_kit.analysis.labels import layer_patterns
from remat_kit.errors import nearest
from remat_kit.findings import Finding, FindingKind, Remedy
from remat_kit.graph import Crossing, Origin, Phase, Recomputed, Residual, StepGraph, TracedOp, is_kernel
from remat_kit.policy import Action, Kind, Named, matches
from remat_kit.trace.kept import Kept, parsed_rules
from remat_kit.trace.links import Links, same_value
from remat_kit.trace.originals import Code, Originals, code_of, originals_of

_CROSSINGS = frozenset(Crossing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rerun:
    """A saved value, the work behind it that runs again, and for what."""

    record: Residual
    again: list[TracedOp]
    needed_by: tuple[str, ...]


def recomputed_ops(graph: StepGraph, links: Links) -> tuple[Recomputed, ...]:
    """Operations that run again, those of one line and primitive together, most FLOPs first."""
    groups: dict[Code, list[TracedOp]] = {}
    forward_calls: dict[Code, int] = {}
    for op in graph.ops:
        if op.is_live and op.phase is Phase.FORWARD:
            forward_calls[code_of(graph, op)] = forward_calls.get(code_of(graph, op), 0) + op.calls
        elif op.is_live and op.calls and op.phase is Phase.RECOMPUTE and op.kind not in _CROSSINGS and not same_value(graph, op):
            groups.setdefault(code_of(graph, op), []).append(op)
    found = [
        Recomputed(
            kind=kind,
            names=_names(links, (value for op in ops for value in op.outputs)),
            source=ops[0].source,
            shape=shape,
            calls=sum(op.calls for op in ops),
            forward_calls=forward_calls.get((kind, code, shape), 0),
            flops=_flops(graph, ops),
            num_bytes=sum(op.num_bytes * op.calls for op in ops) // graph.num_devices,
        )
        for (kind, code, shape), ops in groups.items()
    ]
    return tuple(sorted(found, key=lambda op: (-(op.flops or 0), -op.num_bytes)))


def find_faults(graph: StepGraph, links: Links, kept: Sequence[Kept]) -> tuple[Finding, ...]:
    """Saved values that save no work, then rules that save nothing."""
    originals = originals_of(graph, links)
    reruns = [rerun for value in kept if (rerun := _rerun(graph, links, originals, value)) is not None]
    found = [_saved_but_recomputed(graph, layers) for layers in _by_layer(reruns)]
    found.sort(key=lambda fault: -(fault.flops_at_stake or 0))
    return (*found, *_idle_patterns(graph, kept), *_batched_matmuls(graph, kept))


def _by_layer(reruns: Sequence[_Rerun]) -> Iterable[list[_Rerun]]:
    """Those of one value in all unrolled layers, or in all loops over layers, together."""
    texts = [f"{rerun.record.names} {rerun.record.source} {rerun.needed_by}" for rerun in reruns]
    patterns = layer_patterns(dict.fromkeys(texts))
    groups: dict[str, list[_Rerun]] = {}
    for text, rerun in zip(texts, reruns, strict=True):
        groups.setdefault(patterns[text], []).append(rerun)
    return groups.values()


def _rerun(graph: StepGraph, links: Links, originals: Originals, kept: Kept) -> _Rerun | None:
    record = kept.record
    if not record.names or not kept.regions or record.origin is not Origin.OPERATION:
        return None
    work = {code_of(graph, op): op for op in _nearest_work(graph, links, kept.base)}
    running = [op for op in graph.ops if op.is_live and op.calls and op.phase is Phase.RECOMPUTE and op.region in kept.regions]
    again = [op for op in running if (code := code_of(graph, op)) in work and originals.repeats(op, work[code], code=code)]
    needed_by = tuple(dict.fromkeys(need for op in again for need in _needs(links, op)))
    return _Rerun(record=record, again=again, needed_by=needed_by) if needed_by else None


def _saved_but_recomputed(graph: StepGraph, layers: Sequence[_Rerun]) -> Finding:
    """One finding for the same value of layers that are unrolled, or in several loops."""
    first = layers[0]
    names = tuple(dict.fromkeys(name for layer in layers for name in layer.record.names))
    sizes = [layer.record.device_bytes for layer in layers]
    name, work = " = ".join(first.record.names), ", ".join(dict.fromkeys(_words(op) for op in first.again))
    num_layers = sum(layer.record.num_layers for layer in layers)
    num_more = num_layers - first.record.num_layers
    alike = f"like its namesakes in {num_more} more" if names != first.record.names else f"in {num_layers}"
    like_it = f", {alike} layers," if len(layers) > 1 else ""
    return Finding(
        kind=FindingKind.SAVED_BUT_RECOMPUTED,
        names=names,
        needed_by=first.needed_by,
        bytes_at_stake=None if None in sizes else sum(size or 0 for size in sizes),
        flops_at_stake=_flops(graph, [op for layer in layers for op in layer.again]),
        message=f"{name}{like_it} is saved, but {work} still runs again because of {', '.join(first.needed_by)}.",
        source=first.record.source,
        remedy=Remedy(
            text=f"Save that too, by a name where it is made (inside the rule of a custom kernel); or don't save {name}."
        ),
    )


def _nearest_work(graph: StepGraph, links: Links, value: int) -> list[TracedOp]:
    """The matmuls, kernels and convolutions that a value comes from without another one between, in the same loop body."""
    found, seen, waiting = [], set(), [value]
    while waiting:
        op = links.maker.get(waiting.pop())
        if op is None or op.outputs[0] in seen or (op.kind in _CROSSINGS and not same_value(graph, op)):
            continue
        seen.add(op.outputs[0])
        if _is_work(op):
            found.append(op)
        else:
            waiting += op.inputs
    return found


def _needs(links: Links, op: TracedOp) -> tuple[str, ...]:
    """What a recomputed operation runs for: the nearest value, or further work, that its results lead to in the backward pass."""
    return tuple(dict.fromkeys(need for output in op.outputs if (need := _nearest_need(links, op, output)) is not None))


def _nearest_need(links: Links, op: TracedOp, output: int) -> str | None:
    seen, waiting = {output}, [output]
    while waiting:
        value = waiting.pop(0)
        for reader in links.readers.get(value, ()):
            if reader.phase is not Phase.RECOMPUTE:
                return _value_words(links, value, op, output)
            if _is_work(reader):
                return _words(reader)
            waiting += [made for made in reader.outputs if made not in seen]
            seen.update(reader.outputs)
    return None


def _idle_patterns(graph: StepGraph, kept: Sequence[Kept]) -> list[Finding]:
    """Names that a rule asks for and that do not exist, or that nothing in the backward pass reads."""
    present = {op.name: op for op in reversed(graph.ops) if op.kind == "name" and op.name is not None}
    saved = {name for value in kept for name in value.record.names}
    asked = dict.fromkeys(
        pattern
        for region in graph.regions
        for rule in parsed_rules(region)
        if isinstance(rule, Named) and rule.action is not Action.RECOMPUTE
        for pattern in rule.patterns
    )
    found = []
    for pattern in asked:
        names = tuple(name for name in reversed(present) if matches(pattern, name))
        if not names:
            found.append(_unmatched(pattern, tuple(reversed(present))))
        elif not saved.intersection(names):
            found.append(_never_residual(names, present[names[0]].source))
    return found


def _unmatched(pattern: str, present: tuple[str, ...]) -> Finding:
    listing = ", ".join(present) or "none: name values with jax.ad_checkpoint.checkpoint_name"
    return Finding(
        kind=FindingKind.NAME_UNMATCHED,
        names=(pattern,),
        message=f"{pattern} is asked for, but no value has that name. Names in the step: {listing}.{nearest(pattern, present)}",
        remedy=Remedy(text="Name the value, or ask for one of the names that there are."),
    )


def _never_residual(names: tuple[str, ...], source: str) -> Finding:
    return Finding(
        kind=FindingKind.NEVER_RESIDUAL,
        names=names,
        message=f"{', '.join(names)} is never saved: the backward pass of no region reads it. What a region returns "
        "is kept as the input of the next one, if at all: name that input.",
        source=source,
        remedy=Remedy(text="Name the input of the region, at its top, and ask for that name."),
    )


def _batched_matmuls(graph: StepGraph, kept: Sequence[Kept]) -> list[Finding]:
    """The rule `dots_no_batch`, where it keeps nothing because every matmul has batch dimensions."""
    rule = str(Kind.DOTS_NO_BATCH)
    regions = {index for index, region in enumerate(graph.regions) if rule in (region.rules or ())}
    again = [op for op in graph.ops if op.is_live and op.calls and op.phase is Phase.RECOMPUTE and op.region in regions]
    matmuls = [op for op in again if op.kind == "dot_general"]
    if not matmuls or any(value.record.rule == rule for value in kept):
        return []
    work = ", ".join(dict.fromkeys(_words(op) for op in matmuls))
    return [
        Finding(
            kind=FindingKind.NEVER_RESIDUAL,
            names=(rule,),
            flops_at_stake=_flops(graph, matmuls),
            message=f"{rule} keeps nothing: {work} has batch dimensions, as matmuls of experts and those under vmap have.",
            source=matmuls[0].source,
            remedy=Remedy(text="Save the matmuls by weights (rule weights), by name, or all of them (rule dots)."),
        )
    ]


def _is_work(op: TracedOp) -> bool:
    return op.flops != 0


def _flops(graph: StepGraph, ops: Sequence[TracedOp]) -> int | None:
    if any(op.flops is None for op in ops):
        return None
    return sum((op.flops or 0) * op.calls for op in ops) // graph.num_devices


def _names(links: Links, values: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for value in values for name in links.names.get(links.root[value], ())))


def _words(op: TracedOp) -> str:
    return f"{op.name if is_kernel(op) else op.kind} ({op.source or 'unknown line'})"


def _value_words(links: Links, value: int, op: TracedOp, output: int) -> str:
    """A value that the backward pass reads: by name, else by the result of the operation that leads to it."""
    names = links.names.get(links.root[value])
    if names:
        return " = ".join(names)
    if len(op.outputs) > 1:
        return f"result {op.outputs.index(output)} of {_words(op)}, which has no name"
    maker = links.origin_op(value)
    return "its own result, which has no name" if maker is None or maker is op else f"the unnamed {_words(maker)}"
