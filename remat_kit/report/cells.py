"""The cells of a comparison: what the table and the markdown report both show, as text."""

from remat_kit.records import CompareRow, Comparison, Status
from remat_kit.units import format_bytes, format_seconds

COLUMNS = ("policy", "target", "total", "arguments", "temps", "host", "recompute", "fits?", "compile")
UNAVAILABLE = "n/a"


def cells(row: CompareRow) -> tuple[str, ...]:
    """One row of the report, a text per column of `COLUMNS`."""
    mark = " <- best" if row.is_best else ""
    return (
        row.policy + mark,
        row.target,
        _bytes(row.total_bytes),
        _bytes(row.argument_bytes),
        _bytes(row.temp_bytes),
        _bytes(row.host_bytes),
        UNAVAILABLE if row.recompute_fraction is None else f"{row.recompute_fraction:.1%}",
        _fits(row),
        _compile(row),
    )


def footnotes(comparison: Comparison) -> tuple[str, ...]:
    """What is said under the table: errors, notes of rows (once, with the rows they hold for), notes of the whole, flags."""
    lines = [f"{row.policy} on {row.target} failed: {row.error}" for row in comparison.rows if row.error]
    seen: dict[str, list[CompareRow]] = {}
    for row in comparison.rows:
        for note in row.notes:
            seen.setdefault(note, []).append(row)
    lines += [f"{_where(rows, comparison)}{note}" for note, rows in seen.items()]
    lines += [
        f"{row.policy} on {row.target}: XLA's own pass rematerialized {row.xla_remat_instructions} instructions besides."
        for row in comparison.rows
        if row.xla_remat_instructions
    ]
    lines += comparison.notes
    if comparison.flags:
        lines.append("Compiler flags: " + ", ".join(f"{name}={value}" for name, value in comparison.flags))
    return tuple(lines)


def verdicts(comparison: Comparison) -> tuple[str, ...]:
    """What to do, a sentence per target."""
    return tuple(_verdict(target, comparison) for target in dict.fromkeys(row.target for row in comparison.rows))


def _verdict(target: str, comparison: Comparison) -> str:
    rows = [row for row in comparison.rows if row.target == target]
    best = next((row for row in rows if row.is_best), None)
    if best is not None and best.total_bytes is not None and best.budget_bytes is not None:
        share = f"{format_bytes(best.total_bytes)} of {format_bytes(best.budget_bytes)}"
        again = UNAVAILABLE if best.recompute_fraction is None else f"{best.recompute_fraction:.1%}"
        return f"{target}: use {best.policy} ({share} per device, {again} recomputed)."
    measured = [row for row in rows if row.total_bytes is not None]
    over = [row for row in measured if row.status is Status.OVER_BUDGET]
    if measured and len(over) == len(measured):
        least = min(measured, key=lambda row: row.total_bytes or 0)
        used = f"{_bytes(least.total_bytes)} of {_bytes(least.budget_bytes)}"
        return f"{target}: nothing fits; the least is {least.policy} with {used}."
    if not measured:
        return f"{target}: nothing could be measured."
    if measured[0].budget_bytes is None:
        return f"{target}: not ranked, there is no budget (--budget)."
    return f"{target}: not ranked, a rate of the target is unknown, so there is no floor of the step's time."


def _where(rows: list[CompareRow], comparison: Comparison) -> str:
    if len(rows) == len(comparison.rows):
        return ""
    targets = list(dict.fromkeys(row.target for row in rows))
    whole = all(
        sum(row.target == target for row in rows) == sum(r.target == target for r in comparison.rows) for target in targets
    )
    if whole:
        return f"{', '.join(targets)}: "
    return ", ".join(f"{row.policy} on {row.target}" for row in rows) + ": "


def _bytes(num_bytes: int | None) -> str:
    return UNAVAILABLE if num_bytes is None else format_bytes(num_bytes)


def _fits(row: CompareRow) -> str:
    if row.status is Status.FAILED:
        return "failed"
    return {True: "yes", False: "NO", None: UNAVAILABLE}[row.fits]


def _compile(row: CompareRow) -> str:
    if row.compile_s is None:
        return UNAVAILABLE
    return "cached" if row.from_cache else format_seconds(row.compile_s)
