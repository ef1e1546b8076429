"""What two explanations differ in, by name: two policies, two targets, or the same step under another compiler.

In: two `Explanation`s, each new or read from a file. Out: `Difference`. Lines of the peak are the same when kind and name are.
"""

from collections.abc import Iterator

from remat_kit.explanation import AmountChange, ClassChange, Difference, Explanation
from remat_kit.memory import CollectiveMeaning, PeakClass, StepPhase


def difference(before: Explanation, after: Explanation) -> Difference:
    """Holds two explanations against each other.

    Args:
        before: The first.
        after: The second.

    Returns:
        What appeared, grew, shrank and vanished at the peak, with totals and settings.
    """
    changes = list(_changes(before, after))
    names = _distinct(before, after)
    temp_bytes = before.memory.device.arena_bytes, after.memory.device.arena_bytes
    return Difference(
        before=names[0],
        after=names[1],
        amounts=tuple(_amounts(before, after)),
        appeared=_sorted(change for change in changes if not change.before_bytes),
        vanished=_sorted(change for change in changes if not change.after_bytes),
        grew=_sorted(change for change in changes if 0 < change.before_bytes < change.after_bytes),
        shrank=_sorted(change for change in changes if change.before_bytes > change.after_bytes > 0),
        settings=tuple(_settings(before, after)),
        temps_grew_by=temp_bytes[1] / temp_bytes[0] - 1 if temp_bytes[0] else None,
    )


def _sorted(changes: Iterator[ClassChange]) -> tuple[ClassChange, ...]:
    return tuple(sorted(changes, key=lambda change: -abs(change.added_bytes)))


def _changes(before: Explanation, after: Explanation) -> Iterator[ClassChange]:
    first, second = (_by_name(each.memory.peak_classes) for each in (before, after))
    for key in dict.fromkeys((*first, *second)):
        lines = first.get(key, ()), second.get(key, ())
        old, new = (sum(line.bytes for line in side) for side in lines)
        if old != new:
            source = next((line.source for line in (*lines[1], *lines[0]) if line.source), "")
            yield ClassChange(kind=(*lines[0], *lines[1])[0].kind, name=key[1], source=source, before_bytes=old, after_bytes=new)


def _by_name(lines: tuple[PeakClass, ...]) -> dict[tuple[str, str], tuple[PeakClass, ...]]:
    groups: dict[tuple[str, str], tuple[PeakClass, ...]] = {}
    for line in lines:
        key = line.kind.value, line.name
        groups[key] = (*groups.get(key, ()), line)
    return groups


def _distinct(before: Explanation, after: Explanation) -> tuple[str, str]:
    """Words for both: what they differ in, else everything."""
    for words in (lambda each: each.policy, lambda each: each.target, lambda each: each.step):
        if words(before) != words(after):
            return words(before), words(after)
    return "first", "second"


def _amounts(before: Explanation, after: Explanation) -> Iterator[AmountChange]:
    for what in ("total_bytes", "argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "host_bytes"):
        yield AmountChange(what=what, before=_bytes(before, what), after=_bytes(after, what))
    for phase in (None, *StepPhase):
        word = "all" if phase is None else phase.value
        yield AmountChange(what=f"{word}_flops", before=_flops(before, phase), after=_flops(after, phase))
    counted = {f"num_{meaning.value.replace(' ', '_')}": meaning for meaning in CollectiveMeaning}
    for what, meaning in counted.items():
        yield AmountChange(what=what, before=_count(before, meaning, None), after=_count(after, meaning, None))
    for word, is_async in (("async", True), ("sync", False)):
        what = f"num_{word}_collectives"
        yield AmountChange(what=what, before=_count(before, None, is_async), after=_count(after, None, is_async))


def _bytes(explanation: Explanation, what: str) -> int | None:
    if what == "host_bytes":
        return explanation.row.host_bytes
    return getattr(explanation.compiled.device, what)


def _flops(explanation: Explanation, phase: StepPhase | None) -> int:
    return sum(each.hlo_flops for each in explanation.agreement if phase in (None, each.phase))


def _count(explanation: Explanation, meaning: CollectiveMeaning | None, is_async: bool | None) -> int:
    return sum(
        each.count
        for each in explanation.work.collectives
        if meaning in (None, each.meaning) and is_async in (None, each.is_async)
    )


def _settings(before: Explanation, after: Explanation) -> Iterator[tuple[str, str, str]]:
    pairs = {
        "step": (before.step, after.step),
        "policy": (before.policy, after.policy),
        "target": (before.target, after.target),
    }
    for what, (old, new) in pairs.items():
        if old != new:
            yield what, old, new
    for name, left, right in (
        ("option", before.options, after.options),
        ("flag", before.flags, after.flags),
        ("version", before.versions, after.versions),
    ):
        old, new = dict(left), dict(right)
        for key in dict.fromkeys((*old, *new)):
            if old.get(key) != new.get(key):
                yield f"{name} {key}", old.get(key, ""), new.get(key, "")
