"""`compare`: one training step, several policies, several targets -> one row each, measured by each target's own compiler.

In the caller's process, which needs no JAX: texts are checked, every row is asked of a worker process, and what comes back is
held against the budget. A compiler that crashes or hangs costs its row, never the table.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from remat_kit.budget import DEFAULT_MEMORY_FRACTION, budget_bytes, parse_budget, parse_fraction
from remat_kit.compile.cache import default_folder
from remat_kit.compile.environment import compiler_flags
from remat_kit.compile.pool import Worker
from remat_kit.errors import CompileError, FactoryError, PolicyError, TargetError
from remat_kit.grammar import parse_plan
from remat_kit.policy import Plan, Policy
from remat_kit.records import CompareRow, Comparison, Status
from remat_kit.targets import Target, load_rows, parse_target
from remat_kit.units import format_bytes
from remat_kit.verbs.question import Answer, Question, spell_factory

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called before each row with what is measured, its index from 0, and the number of rows."""


def compare(
    step: str | Callable[..., object],
    *,
    policies: Sequence[str | Policy | Plan],
    targets: Sequence[str],
    options: Mapping[str, object] | None = None,
    budget: str | int | None = None,
    memory_fraction: str | float = DEFAULT_MEMORY_FRACTION,
    xla: Mapping[str, str] | None = None,
    targets_file: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    progress: Progress = lambda _what, _index, _total: None,
) -> Comparison:
    """Measures policies of one training step on targets.

    Args:
        step: A step factory, or its `module:function`.
        policies: Plans: texts like `"save(q,k,v)"`, presets, or records.
        targets: Texts like `"h100:8"` or `"v5p:2x2x4"`.
        options: Options of the factory.
        budget: Bytes per device (`"16GiB"`) or a part of the memory (`"90%"`); None = each target's default.
        memory_fraction: Part of a GPU's memory in the default budget.
        xla: Compiler options of the real run.
        targets_file: TOML file with more targets.
        cache_dir: Folder of the compile cache; None = the default one, `os.devnull` = none.
        timeout_s: Most seconds for one row.
        progress: Told what is measured.

    Returns:
        Rows in the order asked for: the policies of the first target, then of the next.

    Raises:
        PolicyError, TargetError, StepError, BudgetError: Something given does not make sense.
    """
    rows_of_targets = load_rows(None if targets_file is None else str(targets_file))
    parsed = [parse_target(text, rows_of_targets) for text in _distinct("target", targets, TargetError)]
    plans = _distinct("policy", [str(policy) for policy in policies], PolicyError)
    for text in plans:
        parse_plan(text)
    parsed_budget, fraction = parse_budget(budget), parse_fraction(memory_fraction)
    budgets = [budget_bytes(parsed_budget, target, memory_fraction=fraction) for target in parsed]
    template = Question(
        factory=spell_factory(step),
        options=tuple((name, _option_text(value)) for name, value in (options or {}).items()),
        policy="",
        target="",
        targets_file=None if targets_file is None else os.path.abspath(targets_file),
        xla=tuple((xla or {}).items()),
        cache_dir=_cache_text(cache_dir),
    )
    outcomes: list[_Outcome] = []
    for number, target in enumerate(parsed):
        with Worker() as worker:
            for offset, text in enumerate(plans):
                progress(f"{text} on {target.text}", number * len(plans) + offset, len(parsed) * len(plans))
                question = dataclasses.replace(template, policy=text, target=target.text)
                outcomes.append(_ask(worker, question, timeout_s))
    _raise_if_factory_never_worked(outcomes)
    rows = []
    for number, (target, limit) in enumerate(zip(parsed, budgets, strict=True)):
        of_target = outcomes[number * len(plans) : (number + 1) * len(plans)]
        rows += _mark_best([_row(text, target, limit, outcome) for text, outcome in zip(plans, of_target, strict=True)])
    return Comparison(
        step=template.factory if isinstance(step, str) else getattr(step, "__qualname__", repr(step)),
        options=template.options,
        flags=_flags(template.xla, parsed),
        rows=tuple(rows),
        notes=_notes(parsed, budget, fraction),
    )


_Outcome: TypeAlias = Answer | CompileError | FactoryError


def _distinct(what: str, texts: Sequence[str], error: type[PolicyError] | type[TargetError]) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise error(f"give a list of {what} texts, like [{texts!r}], not one text.")
    if not texts:
        raise error(f"give at least one {what}.")
    return tuple(dict.fromkeys(texts))


def _ask(worker: Worker, question: Question, timeout_s: float | None) -> _Outcome:
    try:
        return msgspec.convert(worker.ask(msgspec.to_builtins(question), timeout_s=timeout_s), Answer)
    except (CompileError, FactoryError) as error:
        return error


def _raise_if_factory_never_worked(outcomes: Sequence[_Outcome]) -> None:
    last = outcomes[-1]
    if isinstance(last, FactoryError) and all(isinstance(outcome, FactoryError) for outcome in outcomes):
        raise last


def _row(policy: str, target: Target, limit: int | None, outcome: _Outcome) -> CompareRow:
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
        notes=(*outcome.notes, *outcome.compiled.notes, *floor_notes),
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


def _flags(xla: tuple[tuple[str, str], ...], targets: Sequence[Target]) -> tuple[tuple[str, str], ...]:
    of_rows = tuple((f"{target.kind}: {name}", str(value)) for target in targets for name, value in target.compiler_options)
    return (*compiler_flags(), *((f"--xla {name}", value) for name, value in xla), *dict.fromkeys(of_rows))


def _notes(targets: Sequence[Target], budget: str | int | None, memory_fraction: float) -> tuple[str, ...]:
    notes = []
    platforms = {target.platform for target in targets}
    if budget is None and "cuda" in platforms:
        notes.append(f"Budget of a GPU: {memory_fraction:.0%} of its memory, what JAX reserves (--memory-fraction).")
    if budget is None and "tpu" in platforms:
        notes.append("Budget of a TPU: what its compiler accepts.")
    if "cpu" in platforms:
        notes.append(
            "CPU shows neither offloading (it ignores host memory) nor rematerialization outside loops (it drops the barriers): "
            "compile for the real target."
        )
    return tuple(notes)


def _option_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cache_text(cache_dir: str | os.PathLike[str] | None) -> str | None:
    if cache_dir is None:
        return str(default_folder())
    return None if os.fspath(cache_dir) == os.devnull else str(Path(cache_dir).absolute())
