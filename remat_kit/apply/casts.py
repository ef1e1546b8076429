"""A step with the casts of its weights on the other side of the loop over layers: to see what the compiler makes of it.

In: a function of pytrees that scans over stacked weights. Out: the same function with the casts of what its scans slice inside
the loop's body, or before the loop. Made for measuring, not for training: a cast before the loop is undone in the body, where
XLA folds both, so that other uses of a weight read the rounded value. Scans inside of jit are reached, in other programs not.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from remat_kit import _jax
from remat_kit.apply.jaxprs import Arrays, run_equations

_SAME_VALUE = ("sharding_constraint", "copy", "copy_p", "reshard", "optimization_barrier", "transpose", "reshape")


class CastPlace(StrEnum):
    """Where stacked weights are cast."""

    INSIDE = "inside"
    OUTSIDE = "outside"


def place_casts(fn: Callable[..., Any], place: CastPlace) -> Callable[..., Any]:
    """Moves the casts of stacked weights.

    Args:
        fn: A step.
        place: Where they should be: in the loop over layers, one layer at a time, or before it, all layers at once.

    Returns:
        A function of the same arguments, donated or not as before.
    """

    def moved(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = _run(closed, jax.tree.leaves(args), place, frozenset(closed.jaxpr.invars))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return moved


def _run(closed: ClosedJaxpr, args: Sequence[jax.Array], place: CastPlace, weights: frozenset[Var]) -> Arrays:
    """Runs a program; `weights` are its variables that hold arguments of the step as they are."""
    env: dict[Var, jax.Array] = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    casts: dict[Var, jax.Array] = {}
    whole = set(weights)
    for equation in closed.jaxpr.eqns:
        name = equation.primitive.name
        if name == "scan":
            env.update(zip(equation.outvars, _scan(equation, env, casts, whole, place), strict=True))
            continue
        if name in ("jit", "pjit"):
            inner = equation.params["jaxpr"]
            known = (var for var, atom in zip(inner.jaxpr.invars, equation.invars, strict=True) if _is_in(atom, whole))
            values = [_read(env, atom) for atom in equation.invars]
            env.update(zip(equation.outvars, _run(inner, values, place, frozenset(known)), strict=True))
            continue
        run_equations(closed, [equation], env)
        if len(equation.invars) == 1 and _is_in(equation.invars[0], whole):
            if name == "convert_element_type":
                casts[equation.outvars[0]] = env[equation.invars[0]]
            elif name in _SAME_VALUE:
                whole.add(equation.outvars[0])
    return [_read(env, atom) for atom in closed.jaxpr.outvars]


def _scan(
    equation: JaxprEqn, env: dict[Var, jax.Array], casts: dict[Var, jax.Array], whole: set[Var], place: CastPlace
) -> Arrays:
    num_consts, num_carry = _jax.scan_counts(equation.params)
    body = equation.params["jaxpr"]
    values = [_read(env, atom) for atom in equation.invars]
    first = num_consts + num_carry
    sliced = values[first:]
    dtypes = [value.dtype for value in sliced]  # that the body takes
    for index, atom in enumerate(equation.invars[first:]):
        if place is CastPlace.INSIDE and _is_in(atom, set(casts)):
            sliced[index] = casts[atom]
        elif place is CastPlace.OUTSIDE and _is_in(atom, whole):
            narrow = _narrow_dtype(body, first + index)
            sliced[index] = sliced[index] if narrow is None else sliced[index].astype(narrow)

    def one(carry: Arrays, layer: Arrays) -> tuple[Arrays, Arrays]:
        given = [value.astype(dtype) for value, dtype in zip(layer, dtypes, strict=True)]
        results = jaxpr_as_fun(body)(*values[:num_consts], *carry, *given)
        return list(results[:num_carry]), list(results[num_carry:])

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(one, values[num_consts:first], sliced, **options)
    return [*carry, *stacked]


def _narrow_dtype(program: Any, position: int) -> Any | None:
    """The narrower floating dtype that a program casts one of its inputs to; None = none."""
    jaxpr, _ = _jax.open_jaxpr(program)
    followed = {jaxpr.invars[position]}
    for equation in jaxpr.eqns:
        positions = [index for index, atom in enumerate(equation.invars) if _is_in(atom, followed)]
        if not positions:
            continue
        if equation.primitive.name == "convert_element_type":
            source, dtype = equation.invars[0].aval.dtype, equation.params["new_dtype"]
            if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < source.itemsize:
                return dtype
        if equation.primitive.name in _SAME_VALUE:
            followed.add(equation.outvars[0])
        for inner in _jax.inner_programs(equation):
            if len(_jax.open_jaxpr(inner)[0].invars) == len(equation.invars):
                for index in positions:
                    if (found := _narrow_dtype(inner, index)) is not None:
                        return found
    return None


def _is_in(atom: Var | Literal, variables: set[Var] | frozenset[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _read(env: dict[Var, jax.Array], atom: Var | Literal) -> jax.Array:
    return atom.val if isinstance(atom, Literal) else env[atom]
