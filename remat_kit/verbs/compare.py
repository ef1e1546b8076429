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
from remat_kit.grammar import parse_plan, parse_policy
from remat_kit.plans import Plan
from remat_kit.policy import NONE, Policy
from remat_kit.records import Comparison
from remat_kit.targets import Target, load_rows, parse_target
from remat_kit.verbs.question import Answer, Question, question_of
from remat_kit.verbs.rows import Outcome, make_rows

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called before each row with what is measured, its index from 0, and the number of rows."""


def compare(
    step: str | Callable[..., object],
    *,
    policies: Sequence[str | Policy | Plan] = (),
    wraps: Sequence[Mapping[str, str | Policy]] = (),
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
        wraps: More rows: each a module pattern -> policy table for a model that nobody edits, see `rematerialize`.
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
    parsed = [parse_target(text, rows_of_targets) for text in _distinct_targets(targets)]
    asked = _asked(policies, wraps)
    parsed_budget, fraction = parse_budget(budget), parse_fraction(memory_fraction)
    budgets = [budget_bytes(parsed_budget, target, memory_fraction=fraction) for target in parsed]
    template = dataclasses.replace(
        question_of(step, options=options, targets_file=targets_file),
        xla=tuple((xla or {}).items()),
        cache_dir=cache_text(cache_dir),
    )
    questions = [
        [dataclasses.replace(template, policy=row.policy, wraps=row.wraps, target=target.text) for row in asked]
        for target in parsed
    ]
    outcomes = _ask_all(questions, [row.text for row in asked], timeout_s=timeout_s, progress=progress)
    rows = [
        row
        for target, limit, of_target in zip(parsed, budgets, outcomes, strict=True)
        for row in make_rows([row.text for row in asked], target, limit, of_target)
    ]
    return Comparison(
        step=template.factory if isinstance(step, str) else getattr(step, "__qualname__", repr(step)),
        options=template.options,
        flags=flags_in_force(template.xla, parsed),
        rows=tuple(rows),
        notes=notes_of(parsed, budget, fraction),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A row of every target: how it is spelled, its plan, its module patterns."""

    text: str
    policy: str
    wraps: tuple[tuple[str, str], ...] = ()


def _asked(policies: Sequence[str | Policy | Plan], wraps: Sequence[Mapping[str, str | Policy]]) -> tuple[_Asked, ...]:
    if isinstance(policies, str):
        raise PolicyError(f"give a list of policies, like [{policies!r}], not one text.")
    tables = [tuple((pattern, str(policy)) for pattern, policy in table.items()) for table in wraps]
    asked = [_Asked(str(policy), str(policy)) for policy in policies]
    asked += [_Asked("; ".join(f"{pattern}={policy}" for pattern, policy in table), str(NONE), table) for table in tables]
    if not asked:
        raise PolicyError("give at least one policy, or patterns of modules to wrap.")
    for row in asked:
        parse_plan(row.policy)
        for _, policy in row.wraps:
            parse_policy(policy)
    return tuple(dict.fromkeys(asked))


def _distinct_targets(texts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise TargetError(f"give a list of targets, like [{texts!r}], not one text.")
    if not texts:
        raise TargetError("give at least one target.")
    return tuple(dict.fromkeys(texts))


def _ask_all(
    questions: Sequence[Sequence[Question]], texts: Sequence[str], *, timeout_s: float | None, progress: Progress
) -> list[list[Outcome]]:
    outcomes: list[list[Outcome]] = []
    for number, of_target in enumerate(questions):
        outcomes.append([])
        with Worker() as worker:
            for offset, question in enumerate(of_target):
                done = number * len(of_target) + offset
                progress(f"{texts[offset]} on {question.target}", done, len(questions) * len(of_target))
                outcomes[-1].append(_ask(worker, question, timeout_s))
    _raise_if_factory_never_worked([outcome for of_target in outcomes for outcome in of_target])
    return outcomes


def _ask(worker: Worker, question: Question, timeout_s: float | None) -> Outcome:
    try:
        return msgspec.convert(worker.ask(msgspec.to_builtins(question), timeout_s=timeout_s), Answer)
    except (CompileError, FactoryError) as error:
        return error


def _raise_if_factory_never_worked(outcomes: Sequence[Outcome]) -> None:
    last = outcomes[-1]
    if isinstance(last, FactoryError) and all(isinstance(outcome, FactoryError) for outcome in outcomes):
        raise last


def flags_in_force(xla: tuple[tuple[str, str], ...], targets: Sequence[Target]) -> tuple[tuple[str, str], ...]:
    """Pairs of where a compiler flag comes from and its value: environment, `--xla`, rows of targets."""
    of_rows = tuple((f"{target.kind}: {name}", str(value)) for target in targets for name, value in target.compiler_options)
    return (*compiler_flags(), *((f"--xla {name}", value) for name, value in xla), *dict.fromkeys(of_rows))


def notes_of(targets: Sequence[Target], budget: str | int | None, memory_fraction: float) -> tuple[str, ...]:
    """What holds for every row of these targets."""
    notes = []
    platforms = {target.platform for target in targets}
    if budget is None and "cuda" in platforms:
        notes.append(f"Budget of a GPU: {memory_fraction:.0%} of its memory, what JAX reserves (--memory-fraction).")
    if budget is None and "tpu" in platforms:
        notes.append("Budget of a TPU: what its compiler accepts.")
    if "cpu" in platforms:
        notes.append(
            "CPU shows neither offloading (it ignores host memory) nor, with jaxlib 0.10, rematerialization outside loops (it "
            "drops the barriers; 0.12 keeps them): compile for the real target."
        )
    return tuple(notes)


def cache_text(cache_dir: str | os.PathLike[str] | None) -> str | None:
    """The folder as a worker is told: None = no cache."""
    if cache_dir is None:
        return str(default_folder())
    return None if os.fspath(cache_dir) == os.devnull else str(Path(cache_dir).absolute())
