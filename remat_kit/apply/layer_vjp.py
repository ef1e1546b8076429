"""One layer of a mixed stack, forward and backward, with its residuals sorted by what has to be stored.

In: the layer as a flat function, its policy, its inputs. `save_layer` runs it and returns what must be stored for this very
layer; `pull_layer` takes that and cotangents, and returns gradients. `jax.vjp` of the layer under its policy decides what the
residuals are; its result is a pytree, so they can be taken out, stored, and put back. Not stored per layer: inputs that are
there anyway (weights, per-layer inputs, broadcast inputs), what cheaply follows from those (casts and views of weights), and
what is the same for all layers. A value that is a residual twice is stored once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from remat_kit.apply.checkpoint import FindWeights, checkpoint
from remat_kit.apply.jaxprs import (
    Arrays,
    FlatFunction,
    inline_checkpoints,
    restrict,
    run_in_scopes,
    split_by_dependence,
    sub_equations,
    variables,
)
from remat_kit.policy import Remat
from remat_kit.scopes import BACKWARD_SCOPE, RECOMPUTE_SCOPE, with_rules

# Work that is small against any use of a weight: no reduction, no matrix multiplication, no random bits. `name` and `device_put`
# are left out on purpose: a policy asks for those values to be kept.
_CHEAP = frozenset(
    "convert_element_type reshape transpose broadcast_in_dim squeeze expand_dims slice dynamic_slice rev copy pad concatenate "
    "iota reduce_precision sharding_constraint reshard stop_gradient select_n clamp add add_any sub mul div neg max min abs sign "
    "integer_pow square sqrt rsqrt exp exp2 log tanh logistic not and or xor eq ne lt le gt ge is_finite".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as a function of flat lists.

    Attributes:
        run: `(own, shared, index, carry) -> (carry, outputs)`.
        find_weights: Says which leaves of `own, shared, index, carry` are parameters.
        own_wanted: For each array of `own` (the layer's parameters and per-layer inputs), whether its gradient is wanted.
        shared_wanted: The same for `shared`, the inputs that all layers get.
        carry_wanted: The same for the carry.
        outputs_wanted: For each per-layer output, whether it has a cotangent.
    """

    run: Callable[[Arrays, Arrays, jax.Array, Arrays], tuple[Arrays, Arrays]]
    find_weights: FindWeights
    own_wanted: tuple[bool, ...]
    shared_wanted: tuple[bool, ...]
    carry_wanted: tuple[bool, ...]
    outputs_wanted: tuple[bool, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """Where each residual of a layer comes from in the backward pass. Compared by identity.

    Attributes:
        treedef: Structure of what `jax.vjp` returned.
        sources: For each residual, the list it is in ("stored", "invariant" or "derived") and its position there.
        invariant: Computes the residuals that are the same for all layers, from the layer's inputs.
        derived: Computes the residuals that cheaply follow from the layer's inputs, the carry not among them.
    """

    treedef: jax.tree_util.PyTreeDef
    sources: tuple[tuple[str, int], ...]
    invariant: FlatFunction
    derived: FlatFunction


def save_layer(layer: Layer, rules: Remat | None, *inputs: Any) -> tuple[Arrays, Arrays, Arrays, Layout]:
    """Runs a layer forward.

    Args:
        layer: The layer.
        rules: Its policy.
        *inputs: `own, shared, index, carry`.

    Returns:
        The carry, the outputs, what to store for this layer, and the layout.
    """
    run = layer.run if rules is None else checkpoint(layer.run, rules, prevent_cse=False, find_weights=layer.find_weights)
    treedefs: list[jax.tree_util.PyTreeDef] = []

    def forward(own: Arrays, shared: Arrays, index: jax.Array, carry: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        def differentiable(
            own_d: Arrays, shared_d: Arrays, carry_d: Arrays
        ) -> tuple[tuple[Arrays, Arrays], tuple[Arrays, Arrays]]:
            full_own, full_shared = merge(layer.own_wanted, own_d, own), merge(layer.shared_wanted, shared_d, shared)
            carry_out, outputs = run(full_own, full_shared, index, merge(layer.carry_wanted, carry_d, carry))
            wanted = pick(layer.carry_wanted, carry_out), pick(layer.outputs_wanted, outputs)
            return wanted, (carry_out, outputs)

        picked = pick(layer.own_wanted, own), pick(layer.shared_wanted, shared), pick(layer.carry_wanted, carry)
        _, pull, (carry_out, outputs) = jax.vjp(differentiable, *picked, has_aux=True)
        residuals, treedef = jax.tree.flatten(pull)
        treedefs.append(treedef)
        return carry_out, outputs, residuals

    num_own, num_shared = (len(arrays) for arrays in inputs[:2])
    closed = jax.make_jaxpr(forward)(*inputs)
    num_carry, num_outputs = len(layer.carry_wanted), len(layer.outputs_wanted)
    layout, stored = _lay_out(closed, treedefs[-1], num_own=num_own, num_shared=num_shared, num_results=num_carry + num_outputs)
    is_kept = [True] * (num_carry + num_outputs) + stored
    results = restrict(closed, is_kept)(*jax.tree.leaves(inputs))
    return results[:num_carry], results[num_carry : num_carry + num_outputs], results[num_carry + num_outputs :], layout


def pull_layer(
    layout: Layout,
    rules: Remat | None,
    stored: Arrays,
    invariant: Arrays,
    inputs: tuple[Arrays, Arrays, jax.Array],
    cotangents: tuple[Arrays, Arrays],
) -> tuple[Arrays, Arrays, Arrays]:
    """Runs a layer backward.

    Args:
        layout: From `save_layer`.
        rules: The policy that it was given.
        stored: What it stored for this layer.
        invariant: The residuals that all layers share.
        inputs: `own, shared, index` of this layer.
        cotangents: Those of the wanted part of the carry, and of the wanted outputs.

    Returns:
        Gradients of the wanted part of `own`, of `shared` and of the carry.
    """

    def backward(stored: Arrays, invariant: Arrays, inputs: object, cotangents: tuple[Arrays, Arrays]) -> object:
        derived = layout.derived(*jax.tree.leaves(inputs))
        lists = {"stored": stored, "invariant": invariant, "derived": derived}
        residuals = [lists[name][position] for name, position in layout.sources]
        return jax.tree.unflatten(layout.treedef, residuals)(cotangents)

    args = (stored, invariant, inputs, cotangents)
    flat_args = jax.tree.leaves(args)
    traced, shapes = jax.make_jaxpr(backward, return_shape=True)(*args)
    plain = jax.make_jaxpr(inline_checkpoints(traced))(*flat_args)
    first_cotangent = len(flat_args) - len(jax.tree.leaves(cotangents))
    recompute, rest = split_by_dependence(plain, range(first_cotangent, len(flat_args)))
    policy = None if rules is None else rules.rules
    stages = (with_rules(RECOMPUTE_SCOPE, policy), recompute), (with_rules(BACKWARD_SCOPE, policy), rest)
    results = run_in_scopes(plain, flat_args, stages)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def pick(wanted: Sequence[bool], arrays: Sequence[jax.Array]) -> Arrays:
    """The arrays that are wanted."""
    return [array for array, is_wanted in zip(arrays, wanted, strict=True) if is_wanted]


def merge(wanted: Sequence[bool], chosen: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> Arrays:
    """The arrays, with those that are wanted taken from a list of their own."""
    rest = iter(chosen)
    return [next(rest) if is_wanted else array for array, is_wanted in zip(arrays, wanted, strict=True)]


def _lay_out(
    closed: ClosedJaxpr, treedef: jax.tree_util.PyTreeDef, *, num_own: int, num_shared: int, num_results: int
) -> tuple[Layout, list[bool]]:
    """Sorts the residuals, which come after the results; says besides which of them are stored."""
    first_carry = num_own + num_shared + 1
    own, (index, *carry) = closed.jaxpr.invars[:num_own], closed.jaxpr.invars[first_carry - 1 :]
    from_carry = _reached(closed, carry, _is_never)
    from_layer = _reached(closed, [*own, index, *carry], _is_never)
    heavy = _reached(closed, [], _is_heavy)
    places: dict[object, tuple[str, int]] = {}
    is_first: dict[str, list[bool]] = {"stored": [], "invariant": [], "derived": []}
    sources = []
    for atom in closed.jaxpr.outvars[num_results:]:
        name = _place(atom, from_carry, from_layer, heavy)
        key = id(atom) if isinstance(atom, Literal) else atom
        is_new = key not in places
        places.setdefault(key, (name, sum(is_first[name])))
        for place, flags in is_first.items():
            flags.append(is_new and place == name)
        sources.append(places[key])
    invariant, derived = (restrict(closed, [False] * num_results + is_first[name]) for name in ("invariant", "derived"))
    no_carry: list[None] = [None] * len(carry)
    layout = Layout(
        treedef=treedef,
        sources=tuple(sources),
        invariant=lambda *inputs: invariant(*inputs, *no_carry),
        derived=lambda *inputs: derived(*inputs, *no_carry),
    )
    return layout, is_first["stored"]


def _place(atom: Var | Literal, from_carry: set[Var], from_layer: set[Var], heavy: set[Var]) -> str:
    if isinstance(atom, Literal) or (atom not in from_carry and atom not in heavy):
        return "derived"
    return "stored" if atom in from_layer else "invariant"


def _reached(closed: ClosedJaxpr, seeds: Sequence[Var], starts: Callable[[JaxprEqn], bool]) -> set[Var]:
    """The variables that depend on the seeds or on an equation that `starts` says yes to."""
    reached = set(seeds)
    for equation in closed.jaxpr.eqns:
        if starts(equation) or reached.intersection(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached


def _is_never(_equation: JaxprEqn) -> bool:
    return False


def _is_heavy(equation: JaxprEqn) -> bool:
    inner = sub_equations(equation)
    return equation.primitive.name not in _CHEAP if inner is None else any(_is_heavy(each) for each in inner)
