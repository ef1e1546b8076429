"""Findings about recomputation: merged away, done twice, done for nothing, or of layers that stand one behind the other.

In: `StepFacts`. Out: `Finding`. What the trace recomputes is held against the recompute phase of the compiled program: outside of
loops a compiler's CSE takes recomputation for the forward pass unless a barrier stands between (`prevent_cse`).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from remat_kit.analysis.agreement import agreement
from remat_kit.analysis.findings.facts import SMALL_SHARE, StepFacts, flops_of, live_ops, peak_lines
from remat_kit.analysis.findings.plans import last_layer_kept
from remat_kit.analysis.stacks import same_source
from remat_kit.findings import Change, Finding, FindingKind, Remedy
from remat_kit.graph import Origin, Phase, StepGraph, TracedOp, is_kernel
from remat_kit.memory import PeakClass, PeakKind, StepPhase
from remat_kit.records import CompareRow

_FEWEST_COPIES = 4
_MERGED_SHARE = 0.05


def recompute_merged(facts: StepFacts) -> Iterator[Finding]:
    """The compiled program recomputes less than the trace: the compiler merged it with the forward pass."""
    counted = agreement(facts.graph, facts.work)
    (found,) = (each for each in counted if each.phase is StepPhase.RECOMPUTE)
    missing = found.trace_flops - found.hlo_flops
    lost = sum(each.trace_flops - each.hlo_flops for each in counted)
    outside = flops_of(facts.graph, [op for op in _matmuls(facts.graph, Phase.RECOMPUTE) if op.calls == 1])
    if missing <= _MERGED_SHARE * found.trace_flops or 2 * lost < missing or missing > outside * (1 + SMALL_SHARE):
        return
    kept = _kept_against_the_policy(facts)
    reason, text = "outside of a loop only a barrier keeps the two apart", ""
    if facts.platform == "cpu":
        reason += ", and jaxlib 0.10 drops barriers on CPU (0.12 keeps them)"
        text = "Compile it for the GPU or TPU that it is meant for. "
    yield Finding(
        kind=FindingKind.RECOMPUTE_MERGED,
        names=tuple(dict.fromkeys(line.name for line in kept)),
        message=f"The compiler merged {missing / max(1, found.trace_flops):.0%} of the recomputation with the forward pass, so "
        f"what was to be recomputed is kept: {reason}.",
        bytes_at_stake=sum(line.bytes for line in kept) if kept else None,
        source=next((region.source for region in facts.graph.regions if region.calls == 1 and region.source), ""),
        remedy=Remedy(text=text + "Wrap with prevent_cse=True where the layers are unrolled, or scan over the layers."),
    )


def _kept_against_the_policy(facts: StepFacts) -> list[PeakClass]:
    """Residuals at the peak that the trace doesn't know of."""
    known = [each for each in facts.residuals.residuals if each.origin is Origin.OPERATION]
    lines = peak_lines(facts, PeakKind.RESIDUALS)
    return [line for line in lines if not any(same_source(line.source, each.source) for each in known)]


def _matmuls(graph: StepGraph, *phases: Phase) -> Iterator[TracedOp]:
    return (op for op in live_ops(graph, *phases) if op.flops)


def unrolled_layers(facts: StepFacts) -> Iterator[Finding]:
    """The same code stands in the program once for each layer instead of in a loop."""
    groups = Counter[tuple[str, int, tuple[int, ...]]]()
    flops = Counter[tuple[str, int, tuple[int, ...]]]()
    source: dict[tuple[str, int, tuple[int, ...]], str] = {}
    for op in _matmuls(facts.graph, Phase.FORWARD):
        key = (op.kind, op.code, facts.graph.values[op.outputs[0]].shape)
        flops[key] += (op.flops or 0) * op.calls
        if op.calls == 1:
            groups[key] += 1
            source.setdefault(key, op.source)
    many = [key for key, count in groups.items() if count >= _FEWEST_COPIES]
    if not many or 2 * sum(flops[key] for key in many) < sum(flops.values()):
        return
    num_copies = Counter(groups[key] for key in many).most_common(1)[0][0]
    yield Finding(
        kind=FindingKind.UNROLLED_LAYERS,
        message=f"The program holds {num_copies} copies of one layer's code instead of a loop: it compiles that much longer, and "
        "schedulers may keep buffers of several layers at once.",
        source=source[max(many, key=lambda key: flops[key])],
        remedy=Remedy(text="Stack the layers' parameters and scan over them (jax.lax.scan, nn.scan, remat_kit.stack)."),
    )


def double_wrapping(facts: StepFacts) -> Iterator[Finding]:
    """A rematerialized region directly inside another one; a region in a loop of another one is nesting on purpose."""
    regions = facts.graph.regions
    nested = [
        (number, region.parent)
        for number, region in enumerate(regions)
        if region.parent is not None and regions[region.parent].calls == region.calls
    ]
    if not nested:
        return
    twice = 0
    for inner, outer in nested:
        first = {_code(facts.graph, op) for op in _matmuls(facts.graph, Phase.RECOMPUTE) if op.region == outer}
        again = [op for op in _matmuls(facts.graph, Phase.RECOMPUTE) if op.region == inner]
        twice += flops_of(facts.graph, [op for op in again if _code(facts.graph, op) in first])
    source = next(
        (regions[number].source for pair in nested for number in pair if number is not None and regions[number].source), ""
    )
    kept = "matmuls inside run a third time" if twice else "the inner one decides what is kept while the outer one is recomputed"
    yield Finding(
        kind=FindingKind.DOUBLE_WRAPPING,
        message=f"{len(nested)} of {len(regions)} rematerialized regions stand directly inside another one: {kept}.",
        flops_at_stake=twice,
        source=source,
        remedy=Remedy(text="Wrap once; say in the one policy what is kept."),
    )


def _code(graph: StepGraph, op: TracedOp) -> tuple[str, int, tuple[int, ...]]:
    return op.kind, op.code, graph.values[op.outputs[0]].shape


def last_layer_recomputed(facts: StepFacts) -> Iterator[Finding]:
    """A suspicion: the last layer is recomputed right after it ran, so keeping it may cost no memory. Only a compile tells."""
    recomputed = facts.trace.flops - facts.baseline.flops
    if len(facts.stacks) != 1 or not facts.stacks[0].accepts_mixed:
        return
    (stack,) = facts.stacks
    changed = last_layer_kept(facts.policy, stack.num_layers)
    at_stake = recomputed // stack.num_layers
    if changed is None or at_stake < SMALL_SHARE * facts.trace.flops:
        return
    yield Finding(
        kind=FindingKind.LAST_LAYER_RECOMPUTED,
        names=(stack.name,),
        message=f"The last layer of {stack.name} is recomputed right after its forward pass: nothing is gained by forgetting it.",
        flops_at_stake=at_stake,
        remedy=Remedy(text=f"Keep the last layer: {changed}.", change=Change(policy=changed)),
    )


def same_program(facts: StepFacts) -> Iterator[Finding]:
    """A policy that keeps nothing but the inputs of regions: it gives the program of `full`."""
    regions = facts.graph.regions
    if not any(region.rules for region in regions) or any(region.rules is None for region in regions):
        return
    if any(each.rule not in (None, "input") for each in (*facts.residuals.residuals, *facts.residuals.during_recompute)):
        return
    yield Finding(
        kind=FindingKind.SAME_PROGRAM,
        names=(facts.policy, "full"),
        message=f"{facts.policy} and full give the same program: nothing that {facts.policy} asks for is kept.",
        remedy=Remedy(text="Ask for names that `remat-kit residuals --policy none` lists as kept."),
    )


def same_numbers(rows: Sequence[CompareRow]) -> tuple[Finding, ...]:
    """Policies that a comparison can't tell apart: the same bytes and FLOPs on a target."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for row in rows:
        if row.total_bytes is not None:
            parts = (row.argument_bytes, row.output_bytes, row.alias_bytes, row.temp_bytes, row.host_bytes)
            groups.setdefault((row.target, *parts, row.flops), []).append(row.policy)
    return tuple(
        Finding(
            kind=FindingKind.SAME_PROGRAM,
            names=tuple(policies),
            message=f"{' and '.join(policies)} give the same bytes and FLOPs on {key[0]}: most likely the same program.",
        )
        for key, policies in groups.items()
        if len(set(policies)) > 1
    )


def with_peak_bytes(facts: StepFacts, finding: Finding) -> Finding:
    """A finding of the trace with the bytes that the compiled program gives its values, where the trace could not tell."""
    if finding.kind is not FindingKind.SAVED_BUT_RECOMPUTED or finding.bytes_at_stake is not None:
        return finding
    name = "+".join(finding.names)
    found = [line.logical_bytes for line in facts.memory.peak_classes if line.kind is PeakKind.RESIDUALS and line.name == name]
    return replace(finding, bytes_at_stake=sum(found)) if found else finding


def unknown_kernels(facts: StepFacts) -> Iterator[Finding]:
    """Kernels without a known price."""
    names = tuple(dict.fromkeys(kernel.name for kernel in facts.trace.kernels if kernel.flops is None))
    if not names:
        return
    source = next((op.source for op in live_ops(facts.graph) if is_kernel(op) and op.name in names), "")
    yield Finding(
        kind=FindingKind.UNKNOWN_KERNEL,
        names=names,
        message=f"{', '.join(names)}: a kernel whose FLOPs are unknown. No total here counts them.",
        source=source,
        remedy=Remedy(text="Give a Pallas kernel its cost_estimate; save its results by name if it should not run again."),
    )
