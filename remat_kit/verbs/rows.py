"""From what a worker answered to the rows of a comparison: totals held against the budget, the best one marked."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from remat_kit.errors import CompileError, FactoryError
from remat_kit.records import CompareRow, Status
from remat_kit.targets import Target
from remat_kit.units import format_bytes
from remat_kit.verbs.question import Answer

Outcome: TypeAlias = Answer | CompileError | FactoryError


def make_rows(texts: Sequence[str], target: Target, limit: int | None, outcomes: Sequence[Outcome]) -> list[CompareRow]:
    """The rows of one target.

    Args:
        texts: How each row is spelled.
        target: The target.
        limit: Budget in bytes, None = none.
        outcomes: What the worker answered for each row.

    Returns:
        A row for each, the best one marked: the least floor time among those that fit, ties by bytes.
    """
    return _mark_best([make_row(text, target, limit, outcome) for text, outcome in zip(texts, outcomes, strict=True)])


def make_row(policy: str, target: Target, limit: int | None, outcome: Outcome) -> CompareRow:
    """One row, see `make_rows`."""
    if not isinstance(outcome, Answer):
        return CompareRow(policy=policy, target=target.text, status=Status.FAILED, budget_bytes=limit, error=str(outcome))
    device, host = outcome.compiled.device, outcome.compiled.host
    host_bytes = None if host is None else host.total_bytes
    floor_s, floor_notes = _floor(target, outcome.trace.flops, host_bytes)
    recompute_flops = outcome.trace.flops - outcome.baseline.flops
    over = limit is not None and device.total_bytes > limit
    refused = outcome.compiled.refused
    if refused is not None and not over:
        error = f"the compiler refused the step although its {format_bytes(device.total_bytes)} are within the budget: {refused}"
        return CompareRow(policy=policy, target=target.text, status=Status.FAILED, budget_bytes=limit, error=error)
    return CompareRow(
        policy=policy,
        target=target.text,
        status=Status.OVER_BUDGET if over else Status.OK,
        argument_bytes=device.argument_bytes,
        output_bytes=device.output_bytes,
        alias_bytes=device.alias_bytes,
        temp_bytes=device.temp_bytes,
        host_bytes=host_bytes,
        total_bytes=device.total_bytes,
        budget_bytes=limit,
        fits=None if limit is None else not over,
        flops=outcome.trace.flops,
        recompute_flops=recompute_flops,
        inherent_recompute_flops=outcome.baseline.remat_flops,
        baseline_flops=outcome.baseline.flops,
        recompute_fraction=recompute_flops / outcome.baseline.flops if outcome.baseline.flops else None,
        floor_s=floor_s,
        compile_s=outcome.compiled.compile_s,
        from_cache=outcome.compiled.from_cache,
        kernels=tuple(dict.fromkeys(kernel.name for kernel in outcome.trace.kernels)),
        xla_remat_instructions=outcome.compiled.num_xla_remat,
        notes=(*outcome.notes, *outcome.trace.notes, *outcome.compiled.notes, *floor_notes),
        versions=outcome.compiled.versions,
    )


def _floor(target: Target, flops: int, host_bytes: int | None) -> tuple[float | None, tuple[str, ...]]:
    if target.flops_per_s is None:
        return None, ()
    compute_s = flops / target.flops_per_s
    if not host_bytes:
        return compute_s, ()
    if target.host_bytes_per_s is None:
        return None, (f"not ranked: the host link of {target.kind} has no published rate",)
    return compute_s + host_bytes / target.host_bytes_per_s, ()


def _mark_best(rows: list[CompareRow]) -> list[CompareRow]:
    ranked = [row for row in rows if row.fits and row.floor_s is not None]
    if not ranked:
        return rows
    best = min(ranked, key=lambda row: (row.floor_s, row.total_bytes))
    return [dataclasses.replace(row, is_best=row is best) for row in rows]
