"""`explain`: one training step, one policy, one target -> where its memory goes, what runs again, and what to change.

In the caller's process, which needs no JAX: a worker process compiles and reads; what comes back is held against the budget and
the target's rates. A program that the target's compiler refused is explained too: that is the one to be explained most.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from remat_kit.analysis.roofline import step_floor
from remat_kit.budget import DEFAULT_MEMORY_FRACTION, budget_bytes, parse_budget, parse_fraction
from remat_kit.compile.pool import Worker
from remat_kit.errors import StepError
from remat_kit.explanation import Explanation
from remat_kit.grammar import parse_plan, parse_policy
from remat_kit.plans import Plan
from remat_kit.policy import Policy
from remat_kit.report.explain_json import read_explanation
from remat_kit.targets import Target, load_rows, parse_target
from remat_kit.verbs.compare import cache_text, flags_in_force, notes_of
from remat_kit.verbs.question import MOST_CHECKS, Insides, Question, Task, question_of, step_name
from remat_kit.verbs.rows import make_row


def explain(
    step: str | Callable[..., object],
    *,
    policy: str | Policy | Plan = "none",
    wraps: Mapping[str, str | Policy] | None = None,
    target: str,
    options: Mapping[str, object] | None = None,
    budget: str | int | None = None,
    memory_fraction: str | float = DEFAULT_MEMORY_FRACTION,
    xla: Mapping[str, str] | None = None,
    targets_file: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    most_checks: int = MOST_CHECKS,
) -> Explanation:
    """Explains one training step under one policy on one target.

    Args:
        step: A step factory, or its `module:function`.
        policy: A plan: a text like `"save(q,k,v)"`, a preset, or a record.
        wraps: Module pattern -> policy, for a model that nobody edits; then `policy` stays `none`.
        target: A text like `"h100:8"` or `"v5p:2x2x4"`.
        options: Options of the factory.
        budget: Bytes per device (`"16GiB"`) or a part of the memory (`"90%"`); None = the target's default.
        memory_fraction: Part of a GPU's memory in the default budget.
        xla: Compiler options of the real run.
        targets_file: TOML file with more targets.
        cache_dir: Folder of the compile cache; None = the default one, `os.devnull` = none.
        timeout_s: Most seconds.
        most_checks: Remedies of the most valuable findings that are compiled to see what they bring; 0 = none.

    Returns:
        The explanation. `load_explanation` reads one that was saved.

    Raises:
        PolicyError, TargetError, StepError, BudgetError: Something given does not make sense.
        CompileError: The compiler failed on the step, for another reason than its size.
        DumpError: What the compiler wrote down disagrees with its own totals.
    """
    parsed = parse_target(target, load_rows(None if targets_file is None else str(targets_file)))
    fraction = parse_fraction(memory_fraction)
    limit = budget_bytes(parse_budget(budget), parsed, memory_fraction=fraction)
    question = dataclasses.replace(
        question_of(step, options=options, targets_file=targets_file),
        task=Task.EXPLAIN,
        policy=str(policy),
        wraps=tuple((pattern, str(of_modules)) for pattern, of_modules in (wraps or {}).items()),
        target=target,
        xla=tuple((xla or {}).items()),
        cache_dir=cache_text(cache_dir),
        budget_bytes=limit,
        most_checks=most_checks,
    )
    _check(question)
    with Worker() as worker:
        insides = msgspec.convert(worker.ask(msgspec.to_builtins(question), timeout_s=timeout_s), Insides)
    return _explanation(step_name(step), question, parsed, limit, insides, notes_of([parsed], budget, fraction))


def load_explanation(path: str | os.PathLike[str]) -> Explanation:
    """Reads a report that `explain --format json` wrote.

    Raises:
        StepError: There is no such file, or it holds something else.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise StepError(f"{os.fspath(path)}: {error.strerror}.") from None
    return read_explanation(text, name=os.fspath(path))


def _check(question: Question) -> None:
    parse_plan(question.policy)
    for _, policy in question.wraps:
        parse_policy(policy)


def _explanation(
    name: str, question: Question, target: Target, limit: int | None, insides: Insides, notes: tuple[str, ...]
) -> Explanation:
    measured = insides.measured
    text = question.policy if not question.wraps else "; ".join(f"{pattern}={policy}" for pattern, policy in question.wraps)
    row = make_row(text, target, limit, measured)
    told = {finding.message for finding in insides.residuals.findings}  # compare has them as notes, here they are findings
    return Explanation(
        step=name,
        options=question.options,
        flags=flags_in_force(question.xla, [target]),
        row=dataclasses.replace(row, notes=(), versions=()),
        trace=measured.trace,
        baseline=measured.baseline,
        compiled=measured.compiled,
        memory=insides.memory,
        work=insides.work,
        agreement=insides.agreement,
        residuals=insides.residuals,
        findings=insides.findings,
        floor=step_floor(insides.work, insides.agreement, insides.memory, target),
        analysis_s=insides.analysis_s,
        notes=tuple(dict.fromkeys((*(note for note in row.notes if note not in told), *insides.memory.notes, *notes))),
    )
