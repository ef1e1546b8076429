"""What can be set when planning, and how a question is read from it.

In: texts and numbers as a user gives them. Out: a `PlanQuestion` for one target. What is wrong is said here, before any work.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from remat_kit.budget import DEFAULT_MEMORY_FRACTION, budget_bytes, parse_budget, parse_fraction
from remat_kit.errors import BudgetError, PolicyError, nearest
from remat_kit.planner.ledger import Limits
from remat_kit.planning import Objective
from remat_kit.policy import NONE
from remat_kit.targets import Target, load_rows, parse_target
from remat_kit.units import format_bytes
from remat_kit.verbs.compare import cache_text
from remat_kit.verbs.plan.session import PlanQuestion, Progress
from remat_kit.verbs.question import question_of

LIMITS = Limits()


def quiet(_what: str, _index: int, _total: int) -> None:
    """A `Progress` that tells nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What can be set when planning.

    Attributes:
        budget: Bytes per device (`"16GiB"`) or a part of the memory (`"90%"`); None = the target's default.
        wraps: Module patterns to plan for, in a model that nobody edits; () = the step's own stacks.
        objective: `"time"` (predicted seconds) or `"flops"` (recomputed FLOPs); None = time where the target's rates are known.
        offload: Values may wait in host memory, as many as the host link moves in this part of a layer's forward pass, from 0
            (nothing) to 1.
        options: Options of the factory.
        memory_fraction: Part of a GPU's memory in the default budget.
        xla: Compiler options of the real run.
        targets_file: TOML file with more targets.
        cache_dir: Folder of the compile cache; None = the default one, `os.devnull` = none.
        timeout_s: Most seconds for one compile.
        progress: Told what is compiled.
    """

    budget: str | int | None = None
    wraps: tuple[str, ...] = ()
    objective: str | None = None
    offload: float = 0.0
    options: Mapping[str, object] = field(default_factory=dict)
    memory_fraction: str | float = DEFAULT_MEMORY_FRACTION
    xla: Mapping[str, str] = field(default_factory=dict)
    targets_file: str | os.PathLike[str] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    timeout_s: float | None = None
    progress: Progress = quiet


def read_question(
    step: str | Callable[..., object], target: str, settings: PlanSettings, *, default_budget_bytes: int | None = None
) -> PlanQuestion:
    """Reads and checks what is asked of one target.

    Args:
        step: A step factory, or its `module:function`.
        target: Text of the target.
        settings: What was set.
        default_budget_bytes: Where neither the settings nor the target give one; None = that is an error.

    Raises:
        TargetError, StepError, BudgetError, PolicyError: Something given does not make sense.
    """
    file = settings.targets_file
    found = parse_target(target, load_rows(None if file is None else str(file)))
    question = dataclasses.replace(
        question_of(step, options=settings.options, targets_file=file),
        target=found.text,
        wraps=tuple((pattern, str(NONE)) for pattern in dict.fromkeys(settings.wraps)),
        xla=tuple(settings.xla.items()),
        cache_dir=cache_text(settings.cache_dir),
    )
    return PlanQuestion(
        question=question,
        target=found,
        budget_bytes=_budget(found, settings, default_budget_bytes),
        objective=_objective(settings.objective),
        offload=_offload(settings.offload),
        timeout_s=settings.timeout_s,
        progress=settings.progress,
        max_compiles=LIMITS.max_compiles,
    )


def _budget(target: Target, settings: PlanSettings, default_bytes: int | None) -> int:
    fraction = parse_fraction(settings.memory_fraction)
    limit = budget_bytes(parse_budget(settings.budget), target, memory_fraction=fraction) or default_bytes
    if limit is None:
        raise BudgetError(f"target {target.text!r} has no memory of its own: say how much may be used, like --budget 16GiB.")
    if target.memory_bytes is not None and limit > target.memory_bytes:
        raise BudgetError(
            f"a budget of {format_bytes(limit)} is more than {target.kind} has: {format_bytes(target.memory_bytes)}. Give less, "
            "or leave it out."
        )
    return limit


def _objective(text: str | None) -> Objective | None:
    if text is None or text in tuple(Objective):
        return None if text is None else Objective(text)
    raise PolicyError(f"unknown objective {text!r}: choose from {', '.join(Objective)}.{nearest(text, Objective)}")


def _offload(share: float) -> float:
    if not 0 <= share <= 1:
        raise BudgetError(f"offload={share}: it is a part of a layer's forward pass, from 0 to 1.")
    return share
