"""The parts of an explanation as texts: what its table and its markdown both show."""

from remat_kit.analysis.summary import Column, columns, headline, short_peak, sum_collectives
from remat_kit.explanation import AmountChange, ClassChange, Difference, Explanation, StepFloor
from remat_kit.findings import Finding
from remat_kit.memory import PeakClass
from remat_kit.report.cells import UNAVAILABLE
from remat_kit.units import format_bytes, format_scaled, format_seconds

PEAK_COLUMNS = ("what", "name", "layers", "bytes", "of peak", "source")
PHASE_COLUMNS = ("phase", "traced", "compiled", "kernels", "traffic", "differs because")
COLLECTIVE_COLUMNS = ("collectives", "phase", "operation", "async", "count", "payload", "on the wire")
CHANGE_COLUMNS = ("change", "what", "name", "before", "after", "source")
TIMELINE_WIDTH = 72
_BARS = "▁▂▃▄▅▆▇█"


def title(explanation: Explanation) -> str:
    """The step, its options, policy and target."""
    options = " ".join(f"{name}={value}" for name, value in explanation.options)
    return f"{' '.join((explanation.step, options)).strip()} · {explanation.policy} · {explanation.target}"


def opening(explanation: Explanation) -> str:
    """The first sentence."""
    return headline(explanation)


def finding_lines(finding: Finding) -> tuple[str, ...]:
    """A finding with what is at stake, and what to do."""
    at_stake = [format_bytes(finding.bytes_at_stake)] if finding.bytes_at_stake else []
    at_stake += [format_scaled(finding.flops_at_stake, "FLOP")] if finding.flops_at_stake else []
    amount = f" ({', '.join(at_stake)})" if at_stake else ""
    lines = [f"{finding.message}{amount}"]
    if finding.remedy is not None:
        lines.append(f"{finding.remedy.text}{_checked(finding)}")
    return tuple(lines)


def _checked(finding: Finding) -> str:
    checked = finding.checked
    if checked is None:
        return ""
    if checked.after is None:
        return f" [compiled: {checked.verdict}: {checked.reason}]"
    return f" [compiled: {format_bytes(checked.before.total_bytes)} -> {format_bytes(checked.after.total_bytes)}]"


def peak_rows(explanation: Explanation, *, everything: tuple[PeakClass, ...] | None = None) -> list[tuple[str, ...]]:
    """Rows of `PEAK_COLUMNS`: a dozen, or the lines given."""
    total = explanation.memory.peak_bytes
    if everything is not None:
        return [_peak_row(line, total) for line in everything]
    short = short_peak(explanation.memory.peak_classes)
    rows = [_peak_row(line, total) for line in short.lines]
    if short.num_smaller:
        kinds = ", ".join(short.smaller_kinds)
        rows.append(("smaller", f"{short.num_smaller}: {kinds}", "", *_share(short.smaller_bytes, total), ""))
    return rows


def _peak_row(line: PeakClass, total: int) -> tuple[str, ...]:
    layers = str(line.layers) if line.layers > 1 else ""
    return (line.kind.value, line.name, layers, *_share(line.bytes, total), line.source)


def _share(num_bytes: int, total: int) -> tuple[str, str]:
    return format_bytes(num_bytes), f"{num_bytes / total:.1%}" if total else UNAVAILABLE


def phase_rows(explanation: Explanation) -> list[tuple[str, ...]]:
    """Rows of `PHASE_COLUMNS`."""
    by_phase = {each.phase: each for each in explanation.work.phases}
    return [
        (
            each.phase.value,
            format_scaled(each.trace_flops, "FLOP"),
            format_scaled(each.hlo_flops, "FLOP"),
            str(by_phase[each.phase].num_kernels),
            format_bytes(by_phase[each.phase].traffic_bytes),
            " ".join(each.reasons),
        )
        for each in explanation.agreement
    ]


def collective_rows(explanation: Explanation) -> list[tuple[str, ...]]:
    """Rows of `COLLECTIVE_COLUMNS`."""
    return [
        (
            each.meaning.value,
            each.phase.value,
            each.opcode,
            "yes" if each.is_async else "no",
            str(each.count),
            format_bytes(each.payload_bytes),
            format_bytes(each.wire_bytes),
        )
        for each in sum_collectives(explanation.work.collectives)
    ]


def timeline(explanation: Explanation) -> tuple[str, ...]:
    """Live bytes over the schedule: a row of bars, the phases under them, and the peak marked; () without a timeline."""
    shown = columns(explanation.memory, width=TIMELINE_WIDTH)
    if not shown:
        return ()
    low, high = (edge(column.live_bytes for column in shown) for edge in (min, max))
    bars = "".join(_bar(column, low, high) for column in shown)
    phases = "".join(column.phase.value[0] for column in shown)
    at = next((number for number, column in enumerate(shown) if column.is_peak), 0)
    mark = f"^ peak: {format_bytes(high)} live at {explanation.memory.peak_instruction}"
    pad = at if at + len(mark) <= TIMELINE_WIDTH else max(0, at + 1 - len(mark))
    words = mark if pad == at else f"{mark[2:]} ^"
    return bars, phases, f"{' ' * pad}{words}"


def _bar(column: Column, low: int, high: int) -> str:
    return _BARS[-1] if high == low else _BARS[(column.live_bytes - low) * (len(_BARS) - 1) // (high - low)]


def timeline_words(explanation: Explanation) -> str:
    """What the timeline shows."""
    shown = columns(explanation.memory, width=TIMELINE_WIDTH)
    lowest = format_bytes(min((column.live_bytes for column in shown), default=0))
    return f"Live bytes over the schedule from {lowest} up (f forward, r recompute, b backward, u update; a loop's body once)"


def floor_line(floor: StepFloor) -> str:
    """The roofline model in a sentence."""
    if floor.floor_s is None:
        return "Step-time model: not available for this target."
    parts = {
        "compute": floor.compute_s,
        "memory": floor.memory_s,
        "collectives": floor.collectives_s,
        "host link": floor.host_s,
    }
    listed = ", ".join(
        f"{what} {UNAVAILABLE if time_s is None else format_seconds(time_s)}" for what, time_s in parts.items() if time_s != 0
    )
    return f"Step-time model (roofline, not a measurement): {format_seconds(floor.floor_s)}, bound by {floor.bound}; {listed}."


def footnotes(explanation: Explanation) -> tuple[str, ...]:
    """Notes, flags, versions."""
    lines = [*explanation.notes, *explanation.floor.notes]
    if explanation.row.error:
        lines.insert(0, explanation.row.error)
    if explanation.work.num_xla_remat:
        lines.append(f"XLA's own pass rematerialized {explanation.work.num_xla_remat} instructions besides.")
    if explanation.flags:
        lines.append("Compiler flags: " + ", ".join(f"{name}={value}" for name, value in explanation.flags))
    lines.append(
        f"Compiled in {format_seconds(explanation.compiled.compile_s)}"
        f"{' (cached)' if explanation.compiled.from_cache else ''}, analysed in {format_seconds(explanation.analysis_s)}; "
        + ", ".join(f"{name} {version}" for name, version in explanation.versions)
    )
    return tuple(lines)


def change_rows(difference: Difference) -> list[tuple[str, ...]]:
    """Rows of `CHANGE_COLUMNS`: what appeared, grew, shrank and vanished."""
    groups = {
        "appeared": difference.appeared,
        "grew": difference.grew,
        "shrank": difference.shrank,
        "vanished": difference.vanished,
    }
    return [_change_row(word, change) for word, changes in groups.items() for change in changes]


def _change_row(word: str, change: ClassChange) -> tuple[str, ...]:
    before, after = (format_bytes(each) if each else "" for each in (change.before_bytes, change.after_bytes))
    return word, change.kind.value, change.name, before, after, change.source


def amount_row(change: AmountChange) -> tuple[str, str, str]:
    """A number of both: what, before, after."""
    return change.what, _amount(change.what, change.before), _amount(change.what, change.after)


def _amount(what: str, value: int | None) -> str:
    if value is None:
        return UNAVAILABLE
    if what.endswith("_bytes"):
        return format_bytes(value)
    return format_scaled(value, "FLOP") if what.endswith("_flops") else str(value)
