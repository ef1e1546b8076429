"""Inside the worker process: what a compile dumped, held against the trace of the same step.

In: the texts of a dump, the step and its graph. Out: `Insides`, plain data: memory, work, and how far both counts agree.
"""

import time
from collections.abc import Mapping

import jax

from remat_kit.analysis.agreement import agreement
from remat_kit.analysis.dump import DumpTexts, parse_dump
from remat_kit.analysis.report import explain_memory
from remat_kit.analysis.work import count_work
from remat_kit.graph import StepGraph
from remat_kit.step import Step
from remat_kit.trace import report_graph
from remat_kit.verbs.question import Answer, Insides


def dissect(measured: Answer, texts: DumpTexts, *, step: Step, graph: StepGraph) -> Insides:
    """Looks inside a compiled step.

    Args:
        measured: What was measured of it.
        texts: The dump of its compile.
        step: The step, which knows the roles of its arguments.
        graph: Its traced operations.

    Returns:
        Where its memory goes and what it does.

    Raises:
        DumpError: The dump disagrees with the compiler's totals.
    """
    residuals = report_graph(graph)
    started_s = time.perf_counter()
    dump = parse_dump(texts)
    memory = explain_memory(
        dump,
        roles=roles_by_path(step, graph),
        residuals=residuals.residuals,
        device=measured.compiled.device,
        host=measured.compiled.host,
    )
    work = count_work(dump.module)
    return Insides(
        measured=measured,
        memory=memory,
        work=work,
        agreement=agreement(graph, work),
        residuals=residuals,
        analysis_s=time.perf_counter() - started_s,
    )


def roles_by_path(step: Step, graph: StepGraph) -> Mapping[str, str]:
    """Role of each argument that the step gives one, by its path as compiled programs spell it."""
    if step.roles == ():
        return {}
    roles = jax.tree.leaves(jax.tree.broadcast(step.roles, step.args))
    return dict(zip(graph.input_names, roles, strict=True))
