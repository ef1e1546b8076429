"""Surgery on traced functions: dead code out, one region inlined, equations split by what they depend on.

In: what `jax.make_jaxpr` returns (a closed jaxpr). Out: functions of flat lists of arrays. Public JAX names only; equations keep
their source lines, contexts and name stacks. The layers of a mixed stack are cut along these lines (`layer_vjp.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters import partial_eval

from remat_kit import _jax

Arrays: TypeAlias = list[jax.Array]
FlatFunction: TypeAlias = Callable[..., Arrays]
Result = TypeVar("Result")

_CHECKPOINT = ("checkpoint", "remat2", "remat")


def restrict(closed: ClosedJaxpr, keep: Sequence[bool]) -> FlatFunction:
    """The function that computes only some outputs, free of dead code.

    Args:
        closed: A traced function.
        keep: For each output, whether it stays.

    Returns:
        A function of the same flat arguments.
    """
    jaxpr, used = partial_eval.dce_jaxpr(closed.jaxpr, list(keep))
    run = jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))
    return lambda *args: list(run(*(arg for arg, is_used in zip(args, used, strict=True) if is_used)))


def prune(fn: Callable[..., Result]) -> Callable[..., Result]:
    """The same function of pytrees, traced before it runs so that nothing is left in it that no result needs."""

    def run(*args: Any) -> Result:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = restrict(closed, [True] * len(closed.jaxpr.outvars))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def inline_checkpoints(closed: ClosedJaxpr) -> FlatFunction:
    """The same function with its outermost checkpoint regions dissolved, and with them their barriers."""

    def run(*args: jax.Array) -> Arrays:
        env = _environment(closed, args)
        for equation in closed.jaxpr.eqns:
            inner = equation.params["jaxpr"] if equation.primitive.name in _CHECKPOINT else None
            if inner is None:
                run_equations(closed, [equation], env)
            else:
                values = [_read(env, atom) for atom in equation.invars]
                env.update(zip(equation.outvars, jaxpr_as_fun(_closed(inner))(*values), strict=True))
        return [_read(env, atom) for atom in closed.jaxpr.outvars]

    return run


def split_by_dependence(closed: ClosedJaxpr, inputs: Iterable[int]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """Sorts equations by whether they depend on some of the inputs.

    Args:
        closed: A traced function.
        inputs: Positions of the inputs in question.

    Returns:
        The equations that do not depend on them, and those that do; both in order. The first ones never need the others.
    """
    tainted = {closed.jaxpr.invars[position] for position in inputs}
    free: list[JaxprEqn] = []
    bound: list[JaxprEqn] = []
    for equation in closed.jaxpr.eqns:
        if tainted.intersection(variables(equation.invars)):
            tainted.update(equation.outvars)
            bound.append(equation)
        else:
            free.append(equation)
    return free, bound


def run_equations(closed: ClosedJaxpr, equations: Sequence[JaxprEqn], env: dict[Var, jax.Array]) -> None:
    """Runs some equations of a traced function and adds their results to an environment.

    Args:
        closed: The traced function.
        equations: Some of its equations, in order.
        env: Values of the variables that they read; gains those that they write.
    """
    if not equations:
        return
    written = [v for equation in equations for v in equation.outvars if not isinstance(v, DropVar)]
    known = {*written, *closed.jaxpr.constvars}
    inputs = [v for v in dict.fromkeys(variables(atom for equation in equations for atom in equation.invars)) if v not in known]
    debug_info = closed.jaxpr.debug_info._replace(arg_names=None, result_paths=None)
    piece = closed.jaxpr.replace(invars=inputs, outvars=written, eqns=list(equations), debug_info=debug_info)
    values = jaxpr_as_fun(ClosedJaxpr(piece, closed.consts))(*(env[v] for v in inputs))
    env.update(zip(written, values, strict=True))


def run_in_scopes(closed: ClosedJaxpr, args: Sequence[jax.Array], stages: Sequence[tuple[str, Sequence[JaxprEqn]]]) -> Arrays:
    """Runs a traced function stage by stage, each stage's equations in a named scope of its own.

    Args:
        closed: A traced function.
        args: Its flat arguments.
        stages: Pairs of scope and equations, in an order in which they can run.

    Returns:
        Its flat results.
    """
    env = _environment(closed, args)
    for scope, equations in stages:
        with jax.named_scope(scope):
            run_equations(closed, equations, env)
    return [_read(env, atom) for atom in closed.jaxpr.outvars]


def equations_of(program: Any, *, opaque: tuple[str, ...] = ()) -> Iterator[Any]:
    """The equations of a jaxpr and of all jaxprs within, in order.

    Args:
        program: A jaxpr, closed or not.
        opaque: Primitives whose inner jaxprs are left out.
    """
    for equation in _jax.open_jaxpr(program)[0].eqns:
        yield equation
        if equation.primitive.name not in opaque:
            for inner in _jax.inner_programs(equation):
                yield from equations_of(inner, opaque=opaque)


def variables(atoms: Iterable[Var | Literal]) -> list[Var]:
    """The atoms that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def sub_equations(equation: JaxprEqn) -> list[JaxprEqn] | None:
    """The equations inside a call such as `jit`, None for any other equation."""
    inner = equation.params["jaxpr"] if equation.primitive.name in ("jit", "pjit") else None
    return None if inner is None else list(inner.eqns)


def _environment(closed: ClosedJaxpr, args: Sequence[jax.Array]) -> dict[Var, jax.Array]:
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return env


def _read(env: dict[Var, jax.Array], atom: Var | Literal) -> jax.Array:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _closed(jaxpr: Any) -> ClosedJaxpr:
    """Jaxprs in parameters are open in 0.10, and closed in 0.12 as every jaxpr is there."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, [])
