"""Inside the worker process: what a compile dumped, held against the trace of the same step.

In: the texts of a dump, the step and its graph. Out: `Insides`, plain data: memory, work, and how far both counts agree.
"""

import time
from collections.abc import Mapping

import jax

from remat_kit.analysis.agreement import agreement
from remat_kit.analysis.arguments import arguments_of
from remat_kit.analysis.dump import DumpTexts, parse_dump
from remat_kit.analysis.findings import StackFacts, StepFacts, find_findings
from remat_kit.analysis.report import explain_memory
from remat_kit.analysis.work import count_work
from remat_kit.findings import Change, Remedy
from remat_kit.graph import StepGraph
from remat_kit.step import Step
from remat_kit.targets import Target
from remat_kit.trace import report_graph
from remat_kit.verbs.question import Answer, Insides, Question


def dissect(measured: Answer, texts: DumpTexts, *, question: Question, target: Target, step: Step, graph: StepGraph) -> Insides:
    """Looks inside a compiled step.

    Args:
        measured: What was measured of it.
        texts: The dump of its compile.
        question: What was asked.
        target: What it was compiled for.
        step: The step, which knows the roles of its arguments.
        graph: Its traced operations.

    Returns:
        Where its memory goes, what it does and what is wrong with it; remedies are not compiled yet.

    Raises:
        DumpError: The dump disagrees with the compiler's totals.
    """
    residuals = report_graph(graph)
    started_s = time.perf_counter()
    dump = parse_dump(texts)
    roles = roles_by_path(step, graph)
    memory = explain_memory(
        dump,
        roles=roles,
        residuals=residuals.residuals,
        device=measured.compiled.device,
        host=measured.compiled.host,
    )
    work = count_work(dump.module)
    facts = StepFacts(
        policy=question.policy,
        platform=target.platform,
        budget_bytes=question.budget_bytes,
        stacks=tuple(
            StackFacts(name=each.name, num_layers=each.num_layers, accepts_mixed=each.accepts_mixed) for each in step.stacks
        ),
        donate=step.donate,
        num_leaves=tuple(len(jax.tree.leaves(argument)) for argument in step.args),
        offers=tuple(Remedy(text=each.text, change=Change(options=tuple(each.options.items()))) for each in step.alternatives),
        graph=graph,
        residuals=residuals,
        trace=measured.trace,
        baseline=measured.baseline,
        arguments=arguments_of(dump.module, roles),
        memory=memory,
        work=work,
    )
    return Insides(
        measured=measured,
        memory=memory,
        work=work,
        agreement=agreement(graph, work),
        residuals=residuals,
        findings=find_findings(facts),
        analysis_s=time.perf_counter() - started_s,
    )


def roles_by_path(step: Step, graph: StepGraph) -> Mapping[str, str]:
    """Role of each argument that the step gives one, by its path as compiled programs spell it."""
    if step.roles == ():
        return {}
    roles = jax.tree.leaves(jax.tree.broadcast(step.roles, step.args))
    return dict(zip(graph.input_names, roles, strict=True))
