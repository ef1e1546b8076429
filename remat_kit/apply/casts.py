"""A step with the casts of its weights on the other side of the loop over layers: to see what the compiler makes of it.

In: a function of pytrees that scans over stacked weights. Out: the same function with the casts of what its scans slice inside
the loop's body, or before the loop. Made for measuring, not for training: a cast before the loop is undone in the body, where
XLA folds both, so that other uses of a weight read the rounded value. Scans inside of jit are reached, in other programs not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    whole, widened = set(weights), _widened(closed)
    for equation in closed.jaxpr.eqns:
        name = equation.primitive.name
        if name == "scan":
            moved = _inside(equation, casts, widened) if place is CastPlace.INSIDE else _outside(equation, whole)
            env.update(zip(equation.outvars, _scan(equation, env, moved), strict=True))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """What changes about a scan: operands that it slices, by position, and dtypes in which its body hands results to be stacked.

    Attributes:
        operands: Position of an operand -> the value to slice instead.
        narrowed: Position of an operand -> the dtype to cast it to before the loop.
        stacked: Position of a result -> the dtype to stack it in.
    """

    operands: dict[int, jax.Array] = field(default_factory=dict)
    narrowed: dict[int, Any] = field(default_factory=dict)
    stacked: dict[int, Any] = field(default_factory=dict)


def _inside(equation: JaxprEqn, casts: dict[Var, jax.Array], widened: dict[Var, Any]) -> _Moved:
    """Slices what was cast before the loop; gradients that are cast back behind the loop are cast in its body."""
    first = sum(_jax.scan_counts(equation.params))
    operands = {
        at: casts[atom] for at, atom in enumerate(equation.invars) if at >= first and isinstance(atom, Var) and atom in casts
    }
    shapes = {value.shape for value in operands.values()}
    stacked = {at: widened[v] for at, v in enumerate(equation.outvars) if v in widened and _aval(v).shape in shapes}
    return _Moved(operands=operands, stacked=stacked)


def _outside(equation: JaxprEqn, whole: set[Var]) -> _Moved:
    """Casts before the loop what its body casts; gradients that the body casts back are cast behind the loop."""
    num_consts, num_carry = _jax.scan_counts(equation.params)
    body = equation.params["jaxpr"]
    operands = [(at, atom) for at, atom in enumerate(equation.invars) if at >= num_consts + num_carry and _is_in(atom, whole)]
    narrowed = {at: dtype for at, _ in operands if (dtype := _narrow_dtype(body, at)) is not None}
    shapes = {_aval(atom).shape for at, atom in operands if at in narrowed}
    results = [at for at, v in enumerate(equation.outvars) if at >= num_carry and _aval(v).shape in shapes]
    return _Moved(narrowed=narrowed, stacked={at: dtype for at in results if (dtype := _made_from(body, at)) is not None})


def _scan(equation: JaxprEqn, env: dict[Var, jax.Array], moved: _Moved) -> Arrays:
    num_consts, num_carry = _jax.scan_counts(equation.params)
    values = [_read(env, atom) for atom in equation.invars]
    first = num_consts + num_carry
    dtypes = [value.dtype for value in values[first:]]  # that the body takes
    sliced = [moved.operands.get(at, values[at]) for at in range(first, len(values))]
    sliced = [x.astype(moved.narrowed.get(at, x.dtype)) for at, x in enumerate(sliced, first)]

    def one(carry: Arrays, layer: Arrays) -> tuple[Arrays, Arrays]:
        given = [value.astype(dtype) for value, dtype in zip(layer, dtypes, strict=True)]
        results = jaxpr_as_fun(equation.params["jaxpr"])(*values[:num_consts], *carry, *given)
        stacked = [x.astype(moved.stacked.get(at, x.dtype)) for at, x in enumerate(results[num_carry:], num_carry)]
        return list(results[:num_carry]), stacked

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(one, values[num_consts:first], sliced, **options)
    given = [_aval(v).dtype for v in equation.outvars[num_carry:]]
    # Wider than the program says where its only reader casts it to that; else as the program says.
    return [*carry, *(x if x.dtype.itemsize > d.itemsize else x.astype(d) for x, d in zip(stacked, given, strict=True))]


def _widened(closed: ClosedJaxpr) -> dict[Var, Any]:
    """Variables that nothing but a cast to a wider dtype reads -> that dtype."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for equation in closed.jaxpr.eqns:
        for atom in equation.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(equation)
    results = {atom for atom in closed.jaxpr.outvars if not isinstance(atom, Literal)}
    found = {}
    for var, (reader, *others) in readers.items():
        if reader.primitive.name == "convert_element_type" and not others and var not in results:
            dtype = reader.params["new_dtype"]
            if dtype.itemsize > _aval(var).dtype.itemsize and jnp.issubdtype(dtype, jnp.floating):
                found[var] = dtype
    return found


def _narrow_dtype(program: Any, position: int) -> Any | None:
    """The narrower floating dtype that a program casts one of its inputs to; None = none."""
    jaxpr, _ = _jax.open_jaxpr(program)
    followed = {jaxpr.invars[position]}
    for equation in jaxpr.eqns:
        positions = [index for index, atom in enumerate(equation.invars) if _is_in(atom, followed)]
        if not positions:
            continue
        if equation.primitive.name == "convert_element_type" and _is_narrower(equation.params["new_dtype"], equation.invars[0]):
            return equation.params["new_dtype"]
        if equation.primitive.name in _SAME_VALUE:
            followed.add(equation.outvars[0])
        for inner in _same_inputs(equation):
            for index in positions:
                if (found := _narrow_dtype(inner, index)) is not None:
                    return found
    return None


def _made_from(program: Any, position: int) -> Any | None:
    """The narrower floating dtype that one of a program's results is cast from; None = it is not."""
    jaxpr, _ = _jax.open_jaxpr(program)
    var = jaxpr.outvars[position]
    for equation in reversed(jaxpr.eqns):
        if var not in equation.outvars:
            continue
        if equation.primitive.name == "convert_element_type":
            source = _aval(equation.invars[0]).dtype
            return source if _is_narrower(source, var) else None
        if equation.primitive.name in _SAME_VALUE:
            var = equation.invars[0]
            continue
        inner = _same_inputs(equation)
        return _made_from(inner[0], equation.outvars.index(var)) if inner else None
    return None


def _is_narrower(dtype: Any, atom: Var | Literal) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < _aval(atom).dtype.itemsize


def _same_inputs(equation: JaxprEqn) -> list[Any]:
    """Programs that an equation runs on its operands as they are."""
    inner = _jax.inner_programs(equation)
    return [program for program in inner if len(_jax.open_jaxpr(program)[0].invars) == len(equation.invars)]


def _aval(atom: Var | Literal) -> Any:
    """Its shape and dtype; typed loosely, as JAX does not annotate them."""
    return atom.aval


def _is_in(atom: Var | Literal, variables: set[Var] | frozenset[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _read(env: dict[Var, jax.Array], atom: Var | Literal) -> jax.Array:
    return atom.val if isinstance(atom, Literal) else env[atom]
