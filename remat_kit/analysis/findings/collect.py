"""All findings of a step, most valuable first.

In: `StepFacts`. Out: `Finding` records. What is at stake is weighed as a part of the peak, of the step's FLOPs and of the bytes
on its links, added up. A policy that does not do what it says comes before everything else.
"""

from dataclasses import replace

from remat_kit.analysis.findings import activations, recompute, state, weights
from remat_kit.analysis.findings.facts import StepFacts
from remat_kit.analysis.findings.plans import without_names
from remat_kit.findings import Change, Finding, FindingKind, Remedy
from remat_kit.grammar import parse_plan
from remat_kit.policy import Preset, matches, patterns

_DETECTORS = (
    recompute.same_program,
    weights.weight_copies,
    state.not_donated,
    activations.whole_logits,
    weights.extra_weight_gathers,
    recompute.recompute_merged,
    activations.offload_grows_device,
    recompute.unrolled_layers,
    state.state_fills_memory,
    recompute.last_layer_recomputed,
    activations.on_chip_toy,
    recompute.unknown_kernels,
    recompute.double_wrapping,
)
_FIRST = (
    FindingKind.NAME_UNMATCHED,
    FindingKind.NEVER_RESIDUAL,
    FindingKind.RECOMPUTE_MERGED,
    FindingKind.STATE_FILLS_MEMORY,
    FindingKind.ON_CHIP_TOY,
    FindingKind.SAME_PROGRAM,
)


def find_findings(facts: StepFacts) -> tuple[Finding, ...]:
    """Looks for everything that can be wrong.

    Args:
        facts: What is known of the step.

    Returns:
        Findings, most valuable first. Those of kinds in `check.SUSPICIONS` still have to be compiled to be believed.
    """
    traced = [_complete(facts, finding) for finding in facts.residuals.findings if _is_asked_for(facts, finding)]
    found = [finding for detector in _DETECTORS for finding in detector(facts)]
    return tuple(sorted((*traced, *found), key=lambda finding: -value_of(facts, finding)))


def value_of(facts: StepFacts, finding: Finding) -> float:
    """What is at stake, as a part of all there is."""
    wire_bytes = sum(each.wire_bytes * each.count for each in facts.work.collectives)
    parts = (
        (finding.bytes_at_stake, facts.memory.peak_bytes),
        (finding.flops_at_stake, facts.trace.flops),
        (finding.wire_bytes_at_stake, wire_bytes),
    )
    share = sum(amount / whole for amount, whole in parts if amount and whole)
    return share + (10 if finding.kind in _FIRST else 0)


def _is_asked_for(facts: StepFacts, finding: Finding) -> bool:
    """Whether an idle name is the user's own: a preset lists what other models keep, and does not mean every one of them."""
    plan = parse_plan(facts.policy)
    if finding.kind is not FindingKind.NEVER_RESIDUAL or not any(isinstance(policy, Preset) for policy in plan.policies):
        return True
    return any(matches(pattern, name) for policy in plan.policies for pattern in patterns(policy) for name in finding.names)


def _complete(facts: StepFacts, finding: Finding) -> Finding:
    """A finding of the trace with bytes of the compiled program and a remedy that a machine can try."""
    finding = recompute.with_peak_bytes(facts, finding)
    if finding.kind is not FindingKind.SAVED_BUT_RECOMPUTED or finding.remedy is None:
        return finding
    changed = without_names(facts.policy, finding.names)
    if changed is None:
        return finding
    return replace(finding, remedy=Remedy(text=f"{finding.remedy.text} Without: {changed}.", change=Change(policy=changed)))
