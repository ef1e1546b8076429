"""What a function keeps for its backward pass, what it computes again, and what is wrong with that.

In: a function and arguments, or a `StepGraph`. Out: `Residual` records, `ResidualReport`. A function without a gradient inside is
differentiated first. The work is done in `kept` (what is kept) and `recompute` (what runs again).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from remat_kit.graph import Phase, Residual, ResidualReport, StepGraph
from remat_kit.scopes import BACKWARD_SCOPE
from remat_kit.trace.kept import collect_kept
from remat_kit.trace.links import link
from remat_kit.trace.recompute import find_faults, recomputed_ops
from remat_kit.trace.step import graph_of


def residuals(f: Callable[..., Any], *args: Any) -> tuple[Residual, ...]:
    """What a function keeps for its backward pass.

    Args:
        f: A function to be differentiated (a loss, a block), or a whole step with its own gradient inside.
        *args: Its arguments, arrays or `jax.ShapeDtypeStruct`.

    Returns:
        Residuals, largest first, arguments and constants last.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> [kept.kind for kept in residuals(lambda x: jnp.sin(jnp.sin(x)), jnp.ones(3))]
        ['cos', 'cos']
    """
    return residual_report(f, *args).residuals


def residual_report(f: Callable[..., Any], *args: Any) -> ResidualReport:
    """What a function keeps for its backward pass, what it recomputes, and what is wrong with that; see `residuals`."""
    graph = graph_of(jax.jit(f).trace(*args), args)
    if all(op.phase is Phase.FORWARD for op in graph.ops):
        graph = graph_of(jax.jit(_differentiate(f)).trace(*args), args)
    return report_graph(graph)


def report_graph(graph: StepGraph) -> ResidualReport:
    """Reads a graph of a step with its backward pass; see `residual_report`."""
    links = link(graph)
    found = collect_kept(graph, links)
    across = [kept for kept in found if kept.record.region is None]
    return ResidualReport(
        findings=find_faults(graph, links, across),
        residuals=tuple(kept.record for kept in across),
        during_recompute=tuple(kept.record for kept in found if kept.record.region is not None),
        recomputed=recomputed_ops(graph, links),
    )


def _differentiate(f: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its backward pass for all floating arguments, from cotangents of one."""

    def with_gradient(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]

        def of_floats(*floats: Any) -> Any:
            given = iter(floats)
            mixed = [next(given) if floating else leaf for leaf, floating in zip(leaves, is_float, strict=True)]
            results = jax.tree.leaves(f(*jax.tree.unflatten(tree, mixed)))
            return [leaf for leaf in results if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]

        results, vjp = jax.vjp(of_floats, *(leaf for leaf, floating in zip(leaves, is_float, strict=True) if floating))
        with jax.named_scope(BACKWARD_SCOPE):
            cotangents = jax.tree.map(jnp.ones_like, results)
        return results, vjp(cotangents)

    return with_gradient
