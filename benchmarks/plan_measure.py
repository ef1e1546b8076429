"""A step in this process, as the planner wants it: its stacks, and a `measure` callable that compiles it through the cache.

In: a step factory's `module:function`, its options, a target, for a model that nobody edits also the pattern of its layers. Out:
a `PlannedStep`. The verb `plan` does the same in a worker process; benchmarks that compile hundreds of variants of one step stay
in one process and trace its baseline once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from remat_kit.apply.paths import PathRule
from remat_kit.compile.cache import default_folder
from remat_kit.grammar import parse_plan
from remat_kit.planner.layout import PlannedStack
from remat_kit.planner.search import plan_stack
from remat_kit.planner.unrolled import unrolled_stacks, wraps_of
from remat_kit.planning import Measured, Objective
from remat_kit.verbs.measure import Prepared, measure, prepare
from remat_kit.verbs.plan_blocks import NOMINAL, rates_of, step_blocks
from remat_kit.verbs.plan_question import StackBlocks
from remat_kit.verbs.question import Question, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A step on a target.

    Attributes:
        question: What is asked of it, its plan aside.
        layers: What its trace says of its stacks.
        depth_option: The factory's option for the number of layers.
        paths: Stack -> the modules of its layers; empty = the step's stacks take the plan.
    """

    question: Question
    layers: tuple[StackBlocks, ...]
    depth_option: str
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def stacks(self, objective: Objective) -> list[PlannedStack]:
        """Its stacks with the policies worth considering."""
        return [
            plan_stack(
                stack.name,
                stack.block,
                num_layers=stack.num_layers,
                objective=objective,
                with_none=True,
                max_segments=2 if stack.accepts_mixed else 1,
                repeats=stack.repeats,
            )
            for stack in self.layers
        ]

    def measure(self, plan: str, depth: int | None, /) -> Measured:
        """Compiles the step under a plan, see `planning.Measure`."""
        options = dict(self.question.options) | ({} if depth is None else {self.depth_option: str(depth)})
        wraps = wraps_of(parse_plan(plan), {name: paths[:depth] for name, paths in self.paths.items()})
        question = dataclasses.replace(
            self.question, policy="none" if wraps else plan, wraps=wraps, options=tuple(options.items())
        )
        answer = measure(question)
        return Measured(
            total_bytes=answer.compiled.device.total_bytes,
            flops=answer.trace.flops,
            recompute_flops=answer.trace.flops - answer.baseline.flops,
            host_bytes=0 if answer.compiled.host is None else answer.compiled.host.total_bytes,
        )


def planned_step(step: str, *, target: str, options: Mapping[str, object], pattern: str | None = None) -> PlannedStep:
    """Traces a step for a target.

    Args:
        step: `module:function`.
        target: Its text.
        options: Of the factory.
        pattern: Of the layers of a model that nobody edits.
    """
    texts = tuple((name, str(value)) for name, value in options.items())
    question = Question(factory=step, options=texts, target=target, cache_dir=str(default_folder()))
    if pattern is not None:
        question = dataclasses.replace(question, wraps=((pattern, "none"),))
    prepared = prepare(dataclasses.replace(question, task=Task.BLOCKS))
    depth_option = prepared.traced.step.knobs.depth
    assert depth_option is not None, f"{step} has no depth option"
    if pattern is not None:
        return _by_path(question, prepared, pattern, depth_option)
    blocks = step_blocks(question, prepared.target, prepared.traced.step, prepared.traced.graph)
    return PlannedStep(question=question, layers=blocks.stacks, depth_option=depth_option)


def _by_path(question: Question, prepared: Prepared, pattern: str, depth_option: str) -> PlannedStep:
    rule = PathRule(pattern=pattern, policy=None)
    rates = rates_of(prepared.target) or NOMINAL
    found = unrolled_stacks(prepared.traced.graph, pattern=pattern, is_match=rule.matches, rates=rates)
    layers = tuple(
        StackBlocks(
            name=stack.name,
            num_layers=len(stack.paths),
            accepts_mixed=True,
            repeats=stack.layer.calls // len(stack.paths),
            forward_s=stack.layer.forward_s,
            block=stack.layer.block,
        )
        for stack in found
    )
    paths = {stack.name: stack.paths for stack in found}
    return PlannedStep(question=question, layers=layers, depth_option=depth_option, paths=paths)
