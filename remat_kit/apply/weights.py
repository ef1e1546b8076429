"""The rule `weights`: keep every matrix multiplication of an activation with weights, whatever its batch dimensions.

A policy is asked about one operation at a time and can't tell a weight from an activation. Batch dimensions don't tell either: an
expert's or a vmapped layer's weights have them, attention scores too. So the block is traced, weights are followed from its
parameters, and the outputs of those matmuls are named; the rule is then a rule by that name, and stays true under `vmap`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal, Var

from remat_kit import _jax
from remat_kit.apply.jaxprs import run_equations, variables
from remat_kit.apply.lowering import WEIGHTS_NAME
from remat_kit.operations import MATMULS

_CUSTOM_DERIVATIVE = ("custom_vjp_call", "custom_jvp_call")


def name_weight_matmuls(
    fn: Callable[..., Any], *, find_weights: Callable[..., Sequence[bool]], num_static: int = 0
) -> Callable[..., Any]:
    """The same function, with the outputs of its matmuls by weights named `WEIGHTS_NAME`.

    Args:
        fn: A function of pytrees of arrays, after its static arguments.
        find_weights: Given these pytrees, says of each leaf whether it is a parameter. What `fn` closes over counts as one.
        num_static: Leading arguments that are no arrays.

    Returns:
        A function of the same arguments, results and derivatives.
    """

    def named(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, static_argnums=tuple(range(num_static)), return_shape=True)(*args)
        arrays = args[num_static:]
        results = _run(closed, jax.tree.leaves(arrays), find_weights(*arrays))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return named


def _run(closed: ClosedJaxpr, args: Sequence[jax.Array], are_weights: Sequence[bool]) -> list[jax.Array]:
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    activations = {var for var, is_weight in zip(closed.jaxpr.invars, are_weights, strict=True) if not is_weight}
    pending: list[JaxprEqn] = []
    for equation in closed.jaxpr.eqns:
        if activations.intersection(variables(equation.invars)):
            activations.update(equation.outvars)
        if not _holds_one(equation, activations):
            pending.append(equation)
            continue
        run_equations(closed, pending, env)
        pending = []
        _run_named(closed, equation, env, activations)
    run_equations(closed, pending, env)
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in closed.jaxpr.outvars]


def _holds_one(equation: JaxprEqn, activations: set[Var]) -> bool:
    """Whether the equation is a matmul of an activation with weights, or a call that may hold some."""
    if equation.primitive.name in MATMULS:
        return sum(atom in activations for atom in variables(equation.invars[:2])) == 1
    if equation.primitive.name.startswith(_CUSTOM_DERIVATIVE):
        return _multiplies_weights(_jax.inner_programs(equation)[0], [atom in activations for atom in equation.invars])
    inner = _called(equation)
    return inner is not None and any(_is_matmul_inside(each) for each in _jax.open_jaxpr(inner)[0].eqns)


def _multiplies_weights(program: Any, are_activations: Sequence[bool]) -> bool:
    """Whether a function with a derivative of its own, which stays whole, multiplies an activation with weights."""
    inner, _ = _jax.open_jaxpr(program)
    activations = {var for var, is_activation in zip(inner.invars, are_activations, strict=True) if is_activation}
    for equation in inner.eqns:
        if _holds_one(equation, activations):
            return True
        if activations.intersection(variables(equation.invars)):
            activations.update(equation.outvars)
    return False


def _run_named(closed: ClosedJaxpr, equation: JaxprEqn, env: dict[Var, jax.Array], activations: set[Var]) -> None:
    inner = _called(equation)
    if inner is None:
        run_equations(closed, [equation], env)
        for output in equation.outvars:
            if not isinstance(output, DropVar) and jnp.issubdtype(env[output].dtype, jnp.inexact):
                env[output] = checkpoint_name(env[output], WEIGHTS_NAME)
        return
    values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in equation.invars]
    are_weights = [isinstance(atom, Literal) or atom not in activations for atom in equation.invars]
    results = _run(_close(inner), values, are_weights)
    env.update(zip(equation.outvars, results, strict=True))


def _called(equation: JaxprEqn) -> Any | None:
    return equation.params["jaxpr"] if equation.primitive.name in ("jit", "pjit", "closed_call") else None


def _is_matmul_inside(equation: JaxprEqn) -> bool:
    inner = _called(equation)
    if equation.primitive.name.startswith(_CUSTOM_DERIVATIVE):
        inner = _jax.inner_programs(equation)[0]
    return equation.primitive.name in MATMULS or (
        inner is not None and any(_is_matmul_inside(each) for each in _jax.open_jaxpr(inner)[0].eqns)
    )


def _close(inner: Any) -> ClosedJaxpr:
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, [])
