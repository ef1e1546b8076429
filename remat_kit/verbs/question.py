"""What goes to the worker process and what comes back, and how a step factory is named, sent and found.

A factory is `module:function` where it can be imported, and cloudpickle bytes where it can't (a notebook, `__main__`): those
travel over the pipe to our own worker only, never through a file.
"""

import base64
import dataclasses
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import cloudpickle

from remat_kit.errors import StepError, nearest
from remat_kit.explanation import PhaseFlops
from remat_kit.findings import Change, Finding
from remat_kit.graph import ResidualReport
from remat_kit.memory import MemoryReport, WorkReport
from remat_kit.records import CompiledStep, StepTrace

MOST_CHECKS = 3
"""Remedies that an explanation compiles unless told otherwise."""


class Task(StrEnum):
    """What can be asked about a step under a policy on a target."""

    MEASURE = "measure"
    RESIDUALS = "residuals"
    EXPLAIN = "explain"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row to measure.

    Attributes:
        task: What is asked about it.
        factory: `module:function`, or `pickle:` and base64 of a cloudpickled factory.
        options: Pairs of option and text, for the factory.
        policy: Text of the plan.
        wraps: Pairs of module pattern and policy, for a model that nobody edits; the plan is then `none`.
        target: Text of the target.
        targets_file: TOML file with more targets, None = only ours.
        xla: Pairs of compiler option and value.
        cache_dir: Folder of the compile cache; None = no cache.
        donate: Positions of the arguments to donate; None = those that the step names.
        casts: Where stacked weights are cast (`apply.casts.CastPlace`); None = where the step does it. Measured only.
        budget_bytes: What an explanation is held against; None = no budget.
        most_checks: Remedies of findings that an explanation compiles.
    """

    task: Task = Task.MEASURE
    factory: str
    options: tuple[tuple[str, str], ...] = ()
    policy: str = "none"
    wraps: tuple[tuple[str, str], ...] = ()
    target: str = "cpu"
    targets_file: str | None = None
    xla: tuple[tuple[str, str], ...] = ()
    cache_dir: str | None = None
    donate: tuple[int, ...] | None = None
    casts: str | None = None
    budget_bytes: int | None = None
    most_checks: int = MOST_CHECKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A measured row.

    Attributes:
        trace: Of the step under the policy.
        baseline: Of the same step without rematerialization.
        compiled: What the compiler said.
        notes: From the factory, and what is wrong with what the policy saves.
    """

    trace: StepTrace
    baseline: StepTrace
    compiled: CompiledStep
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Insides:
    """An explained row.

    Attributes:
        measured: The row.
        memory: Where its memory goes.
        work: What its compiled program does.
        agreement: Matmul FLOPs of trace and compiled program.
        residuals: What the trace keeps and recomputes.
        findings: What is wrong, most valuable first, remedies compiled.
        analysis_s: Seconds that reading and analysing took, without compiling remedies.
    """

    measured: Answer
    memory: MemoryReport
    work: WorkReport
    agreement: tuple[PhaseFlops, ...]
    residuals: ResidualReport
    findings: tuple[Finding, ...]
    analysis_s: float


def question_of(
    step: str | Callable[..., object],
    *,
    options: Mapping[str, object] | None,
    targets_file: str | os.PathLike[str] | None,
) -> Question:
    """A question about a step, everything that a worker process must be told in texts; the rest is the caller's to fill in.

    Raises:
        StepError: See `spell_factory`.
    """
    return Question(
        factory=spell_factory(step),
        options=tuple((name, _option_text(value)) for name, value in (options or {}).items()),
        targets_file=None if targets_file is None else os.path.abspath(targets_file),
    )


def changed_question(question: Question, change: Change) -> Question:
    """The question about the same step with a change, to be measured."""
    replaced = {name for name, _ in change.options}
    kept = tuple(pair for pair in question.options if pair[0] not in replaced)
    return dataclasses.replace(
        question,
        task=Task.MEASURE,
        policy=question.policy if change.policy is None else change.policy,
        options=(*kept, *change.options),
        donate=question.donate if change.donate is None else change.donate,
        casts=question.casts if change.casts is None else change.casts,
    )


def _option_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def step_name(step: str | Callable[..., object]) -> str:
    """What reports call a step."""
    return step if isinstance(step, str) else getattr(step, "__qualname__", repr(step))


def spell_factory(factory: str | Callable[..., object]) -> str:
    """Names a factory so that another process finds it.

    Raises:
        StepError: A text that is not `module:function`.
    """
    if isinstance(factory, str):
        module, separator, function = factory.partition(":")
        if not (module and separator and function):
            raise StepError(f"{factory!r} does not name a step factory: write module:function, like models:gpt2_small.")
        return factory
    if not callable(factory):
        raise StepError(f"{factory!r} is not a step factory: give f(policies, devices, **options), or its 'module:function'.")
    module = getattr(factory, "__module__", None) or "__main__"
    name = f"{module}:{getattr(factory, '__qualname__', '')}"
    if module != "__main__" and _is_importable(name, factory):
        return name
    try:
        return "pickle:" + base64.b64encode(cloudpickle.dumps(factory)).decode()
    except (TypeError, pickle.PicklingError) as error:
        raise StepError(
            f"the step factory can't be sent to the worker process: {error}. Put it into a module of its own."
        ) from error


def load_factory(spelled: str) -> Callable[..., object]:
    """Finds the factory that `spell_factory` named.

    Raises:
        StepError: There is no such module or function; the message names the near miss.
    """
    module_name, _, path = spelled.partition(":")
    if module_name == "pickle":
        return cloudpickle.loads(base64.b64decode(path))
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise StepError(
                f"importing {module_name!r} failed: it needs the module {error.name!r}, which is not installed."
            ) from error
        raise StepError(f"no module {error.name!r} for step {spelled!r}; looked in {_search_path()}.") from None
    except Exception as error:  # whatever the module of a user raises
        if "/" in module_name or module_name.startswith(".") or not module_name:
            raise StepError(f"{spelled!r} is no module: write module:function, not a path, like models:gpt2_small.") from None
        raise StepError(f"importing {module_name!r} failed: {type(error).__name__}: {error}.") from error
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise StepError(f"{module_name!r} has no {path!r}.{nearest(path, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise StepError(f"{spelled!r} is a {type(found).__name__}, not a step factory f(policies, devices, **options).")
    return found


def _search_path() -> str:
    return "the current folder and the installed packages" if "" in sys.path or "." in sys.path else "the installed packages"


def _is_importable(name: str, factory: object) -> bool:
    try:
        return load_factory(name) is factory
    except StepError:
        return False
