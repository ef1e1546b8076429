"""One target's planning session: the question as read, the worker that answers it, and the compiles that the planner asks for.

In the caller's process, without JAX. A `Session` is one worker process; what it compiled is counted, and remembered on disk by
the compile cache.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import msgspec

from remat_kit.compile.pool import Worker
from remat_kit.errors import CompileError, DumpError
from remat_kit.grammar import parse_plan
from remat_kit.planner.unrolled import wraps_of
from remat_kit.planning import Measured, Objective
from remat_kit.policy import NONE
from remat_kit.targets import Target
from remat_kit.units import format_bytes
from remat_kit.verbs.plan.described import StepBlocks
from remat_kit.verbs.question import Answer, Insides, Question, Task

_Reply = TypeVar("_Reply")

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called before each compile with what is compiled, its index from 0, and the most compiles there can be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is asked of one target.

    Attributes:
        question: Factory, options, target, compiler options, cache; its policy is `none`, as is that of each module pattern.
        target: What is planned for.
        budget_bytes: Of a device.
        objective: What is made least of; None = seconds where the target's rates are known, else FLOPs.
        offload: Part of a layer's forward pass during which the host link may be busy; 0 = nothing goes to host memory.
        timeout_s: Most seconds for a compile.
        reads_collectives: Whether a compile also counts what collectives send.
        modules: For a model that nobody edits: stack -> paths of its modules; empty = plans speak of the step's own stacks.
        progress: Told what is compiled.
        max_compiles: For `progress`.
    """

    question: Question
    target: Target
    budget_bytes: int
    objective: Objective | None
    offload: float
    timeout_s: float | None
    progress: Progress
    max_compiles: int
    reads_collectives: bool = False
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def with_options(self, options: Mapping[str, str]) -> "PlanQuestion":
        """The same question with other options of the factory."""
        changed = tuple((dict(self.question.options) | dict(options)).items())
        return dataclasses.replace(self, question=dataclasses.replace(self.question, options=changed))


@dataclass(slots=True, kw_only=True)
class Session:
    """A worker that answers for one target.

    Attributes:
        worker: The process.
        num_compiles: Measurements so far.
        num_cached: Those that were remembered.
        versions: Of what compiles, once something was compiled.
        wire_bytes: Whole plan on several devices -> bytes that its collectives send from a device.
        plan_notes: Whole plan -> what its compile's answer noted.
    """

    worker: Worker
    num_compiles: int = 0
    num_cached: int = 0
    versions: tuple[tuple[str, str], ...] = ()
    wire_bytes: dict[str, int] = field(default_factory=dict)
    plan_notes: dict[str, tuple[str, ...]] = field(default_factory=dict)


def ask_blocks(session: Session, asked: PlanQuestion) -> StepBlocks:
    """What the planner must know of the step.

    Raises:
        PolicyError, TargetError, StepError: The question does not make sense.
        CompileError: The worker died.
    """
    question = dataclasses.replace(asked.question, task=Task.BLOCKS)
    return _ask(session, asked, question, StepBlocks)


def with_modules(asked: PlanQuestion, blocks: StepBlocks) -> PlanQuestion:
    """The question with the modules that its patterns turned out to match."""
    return dataclasses.replace(asked, modules={stack.name: stack.paths for stack in blocks.stacks if stack.paths})


def compile_plan(session: Session, asked: PlanQuestion, plan: str, *, what: str = "the whole step") -> Measured:
    """Compiles the step under a plan.

    Args:
        session: Whose worker compiles.
        asked: The step.
        plan: Text of the plan.
        what: For the progress.

    Raises:
        CompileError: The compiler failed, or refused the step although it is within the budget.
    """
    asked.progress(f"{plan}: {what}", session.num_compiles, max(asked.max_compiles, session.num_compiles + 1))
    question = dataclasses.replace(asked.question, task=Task.MEASURE, policy=plan)
    if asked.modules:
        question = dataclasses.replace(question, policy=str(NONE), wraps=wraps_of(parse_plan(plan), asked.modules))
    answer = _looked_into(session, asked, question, plan) if asked.reads_collectives else _ask(session, asked, question, Answer)
    session.num_compiles += 1
    session.num_cached += answer.compiled.from_cache
    session.versions = answer.compiled.versions
    session.plan_notes[plan] = answer.notes
    total_bytes = answer.compiled.device.total_bytes
    if answer.compiled.refused is not None and total_bytes <= asked.budget_bytes:
        raise CompileError(
            f"the compiler refused {plan!r} although its {format_bytes(total_bytes)} are within the budget: "
            f"{answer.compiled.refused}"
        )
    return Measured(
        total_bytes=total_bytes,
        flops=answer.trace.flops,
        recompute_flops=answer.trace.flops - answer.baseline.flops,
        host_bytes=0 if answer.compiled.host is None else answer.compiled.host.total_bytes,
    )


def _ask(session: Session, asked: PlanQuestion, question: Question, kind: type[_Reply]) -> _Reply:
    return msgspec.convert(session.worker.ask(msgspec.to_builtins(question), timeout_s=asked.timeout_s), kind)


def _looked_into(session: Session, asked: PlanQuestion, question: Question, plan: str) -> Answer:
    """Compiles and counts collectives in one go; where there is no dump, or it can't be read, compiles only."""
    try:
        insides = _ask(session, asked, dataclasses.replace(question, task=Task.EXPLAIN, most_checks=0), Insides)
    except (DumpError, CompileError):
        return _ask(session, asked, question, Answer)
    session.wire_bytes[plan] = sum(each.wire_bytes * each.count for each in insides.work.collectives)
    return insides.measured


def measure_of(session: Session, asked: PlanQuestion, blocks: StepBlocks) -> Callable[[str, int | None], Measured]:
    """The planner's `measure`: a plan at a depth, compiled."""
    depth_option = dict(blocks.knobs).get("depth")

    def measure(plan: str, depth: int | None, /) -> Measured:
        if depth is None:
            reads = blocks.num_devices > 1 and asked.target.link_bytes_per_s is not None
            return compile_plan(session, dataclasses.replace(asked, reads_collectives=reads), plan)
        assert depth_option is not None, "a small depth was asked for of a step without such an option"
        small = dataclasses.replace(asked, modules={name: paths[:depth] for name, paths in asked.modules.items()})
        return compile_plan(session, small.with_options({depth_option: str(depth)}), plan, what=f"{depth} layers")

    return measure
