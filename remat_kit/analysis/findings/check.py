"""Remedies, compiled: what does not help is not recommended.

In: findings and `measure`, which compiles a changed step (the verb hands it in, in the worker). Out: the findings with `checked`.
Only the most valuable few are compiled. A suspicion, a finding that only a compile can confirm, is left out unless one does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from remat_kit.errors import RematKitError
from remat_kit.findings import Change, Checked, Finding, FindingKind, Measured, Remedy, Verdict

Measure: TypeAlias = Callable[[Change], Measured]

SUSPICIONS = frozenset({FindingKind.OFFLOAD_GROWS_DEVICE, FindingKind.LAST_LAYER_RECOMPUTED})
"""Kinds that only a compile confirms."""

_SAME_BYTES, _SAME_FLOPS = 0.002, 0.001
"""Parts by which a total may grow while the other one gets smaller."""


def check_remedies(findings: Sequence[Finding], measure: Measure, *, before: Measured, most: int) -> tuple[Finding, ...]:
    """Compiles what the most valuable findings recommend.

    Args:
        findings: Most valuable first.
        measure: Compiles the step with a change.
        before: The step as it is.
        most: Remedies to compile; 0 = none.

    Returns:
        The findings in the same order: without the remedy where it brought nothing, and without suspicions that no compile
        confirmed.
    """
    found = []
    left = most
    for finding in findings:
        if finding.remedy is not None and finding.remedy.change is not None and left > 0:
            left -= 1
            finding = _checked(finding, finding.remedy, finding.remedy.change, measure, before)
        is_confirmed = finding.checked is not None and finding.checked.verdict is Verdict.GAIN
        if is_confirmed or finding.kind not in SUSPICIONS:
            found.append(finding)
    return tuple(found)


def _checked(finding: Finding, remedy: Remedy, change: Change, measure: Measure, before: Measured) -> Finding:
    try:
        after = measure(change)
    except RematKitError as error:
        failed = Checked(verdict=Verdict.FAILED, before=before, reason=str(error).splitlines()[0])
        return replace(finding, checked=failed)
    verdict = Verdict.GAIN if _is_gain(finding.kind, before, after) else Verdict.NO_GAIN
    checked = Checked(verdict=verdict, before=before, after=after)
    if verdict is Verdict.NO_GAIN:
        text = f"Tried: no gain. ({remedy.text})"
        return replace(finding, remedy=Remedy(text=text), checked=checked)
    return replace(_confirmed(finding, before, after), checked=checked)


def _is_gain(kind: FindingKind, before: Measured, after: Measured) -> bool:
    """Fewer bytes, at the same FLOPs unless recomputing is the remedy; or fewer FLOPs at the same bytes."""
    fewer_bytes = after.total_bytes < before.total_bytes
    same_bytes = after.total_bytes <= before.total_bytes * (1 + _SAME_BYTES)
    same_flops = after.flops <= before.flops * (1 + _SAME_FLOPS)
    match kind:
        case FindingKind.LAST_LAYER_RECOMPUTED:
            return same_bytes and after.flops < before.flops
        case FindingKind.OFFLOAD_GROWS_DEVICE | FindingKind.WHOLE_LOGITS:
            return fewer_bytes
        case _:
            return fewer_bytes and same_flops


def _confirmed(finding: Finding, before: Measured, after: Measured) -> Finding:
    """A suspicion's numbers are those of the compile."""
    match finding.kind:
        case FindingKind.OFFLOAD_GROWS_DEVICE:
            return replace(finding, bytes_at_stake=before.total_bytes - after.total_bytes)
        case FindingKind.LAST_LAYER_RECOMPUTED:
            return replace(finding, flops_at_stake=before.flops - after.flops)
        case _:
            return finding
