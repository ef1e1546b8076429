"""A stack whose layers follow different policies: loops over the layer index, and a backward pass of our own.

In: a layer as a flat function, whole stacks of parameters `[L, …]`, a tree of loops (`segments.py`). Out: the final carry and the
per-layer outputs, differentiable in reverse mode. Every loop takes its layer's parameters from the whole stack by dynamic
index, forward and backward, so no slice or copy of the stack exists; the backward pass runs the loops last to first and writes
each layer's gradient into one carried buffer `[L, …]`. Scopes `remat_kit.forward`, `remat_kit.recompute` and `remat_kit.backward`
mark what the loops do in the compiled program; of nested ones, the innermost counts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.extend.core import mapped_aval

from remat_kit import _jax
from remat_kit.apply.checkpoint import FindWeights
from remat_kit.apply.jaxprs import Arrays, prune
from remat_kit.apply.layer_vjp import Layer, Layout, pick, pull_layer, save_layer
from remat_kit.apply.reverse_mode import reverse_mode_only
from remat_kit.apply.segments import Groups, Loop, Node, group_length, num_layers_of
from remat_kit.scopes import BACKWARD_SCOPE, FORWARD_SCOPE, RECOMPUTE_SCOPE, with_rules

AGAIN = with_rules(RECOMPUTE_SCOPE, ())
"""Layers of a group run again from its input, all that it keeps."""

FlatLayer: TypeAlias = Callable[[Arrays, Arrays, jax.Array, Arrays], tuple[Arrays, Arrays]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What the loops read; a pytree.

    Attributes:
        own: Per-layer arrays (parameters and per-layer inputs), each `[L, …]`.
        shared: Arrays that all layers get.
        layer: The layer, with what is wanted of it.
        unroll: Layers per iteration of a loop.
    """

    own: Arrays
    shared: Arrays
    layer: Layer
    unroll: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a node keeps for its backward pass; a pytree.

    Attributes:
        stored: Of a loop, the stored residuals, of groups, their inputs; stacked unless there is only one.
        invariant: Of a loop, the residuals that its layers share.
        layout: Of a loop, where its residuals are.
    """

    stored: Arrays
    invariant: Arrays
    layout: Layout | None


jax.tree_util.register_dataclass(Stack, data_fields=["own", "shared"], meta_fields=["layer", "unroll"])
jax.tree_util.register_dataclass(Kept, data_fields=["stored", "invariant"], meta_fields=["layout"])

Gradients: TypeAlias = tuple[Arrays, Arrays, Arrays]
"""Of the carry, of the per-layer arrays (each `[L, …]`) and of the shared ones: those that are wanted."""


def run_mixed(
    run: FlatLayer,
    nodes: tuple[Node, ...],
    *,
    own: Arrays,
    shared: Arrays,
    carry: Arrays,
    unroll: int,
    find_weights: FindWeights,
) -> tuple[Arrays, Arrays]:
    """Runs a stack under several policies.

    Args:
        run: One layer, `(own, shared, index, carry) -> (carry, outputs)`; closes over no tracer.
        nodes: The loops, which cover every layer once.
        own: Per-layer arrays, each `[L, …]`.
        shared: Arrays that all layers get.
        carry: What the first layer gets.
        unroll: Layers per iteration of a loop.
        find_weights: Says which leaves of a layer's arguments are parameters.

    Returns:
        What the last layer returns, and the outputs of all layers, each `[L, …]`.
    """

    @jax.custom_vjp
    def stack(own: Arrays, shared: Arrays, carry: Arrays) -> tuple[Arrays, Arrays]:
        def body(carry: Arrays, each: tuple[Arrays, jax.Array]) -> tuple[Arrays, Arrays]:
            return run(each[0], shared, each[1], carry)

        with jax.named_scope(FORWARD_SCOPE):
            num_layers = own[0].shape[0] if own else sum(num_layers_of(node) for node in nodes)
            return jax.lax.scan(body, carry, (own, jnp.arange(num_layers)), unroll=unroll)

    def forward(*primals: list[CustomVJPPrimal]) -> tuple[tuple[Arrays, Arrays], tuple[Stack, list[Kept]]]:
        own, shared, carry = ([primal.value for primal in each] for each in primals)
        own_wanted, shared_wanted = (tuple(_is_wanted(primal) for primal in each) for each in primals[:2])
        outputs = jax.eval_shape(run, _take(own, _index(0)), shared, _index(0), carry)[1]
        layer = Layer(
            run=run,
            find_weights=find_weights,
            own_wanted=own_wanted,
            shared_wanted=shared_wanted,
            carry_wanted=tuple(_is_float(array) for array in carry),
            outputs_wanted=tuple(_is_float(array) for array in outputs),
        )
        arrays = Stack(own=own, shared=shared, layer=layer, unroll=unroll)
        carry, outputs, kept = _save_all(arrays, nodes, _index(0), carry, FORWARD_SCOPE)
        return (carry, outputs), (arrays, kept)

    def backward(residuals: tuple[Stack, list[Kept]], cotangents: tuple[Arrays, Arrays]) -> tuple[object, ...]:
        arrays, kept = residuals
        layer = arrays.layer
        carry_cts = [_instantiate(ct) for ct in pick(layer.carry_wanted, cotangents[0])]
        own, shared = pick(layer.own_wanted, arrays.own), pick(layer.shared_wanted, arrays.shared)
        gradients = carry_cts, [_gradient_buffer(array) for array in own], [jnp.zeros_like(array) for array in shared]
        output_cts = pick(layer.outputs_wanted, cotangents[1])
        carry_cts, own, shared = _pull_all(arrays, nodes, _index(0), kept, gradients, output_cts)
        return _spread(layer.own_wanted, own), _spread(layer.shared_wanted, shared), _spread(layer.carry_wanted, carry_cts)

    stack.defvjp(forward, backward, symbolic_zeros=True)
    return stack(*(reverse_mode_only(arrays) for arrays in (own, shared, carry)))


def _save_all(
    stack: Stack, nodes: tuple[Node, ...], base: jax.Array, carry: Arrays, scope: str
) -> tuple[Arrays, Arrays, list[Kept]]:
    parts, kept = [], []
    for node in nodes:
        start = base + node.start
        if isinstance(node, Loop):
            carry, outputs, kept_here = _save_loop(stack, node, start, carry, scope)
        else:
            carry, outputs, kept_here = _save_groups(stack, node, start, carry, scope)
        parts.append(outputs)
        kept.append(kept_here)
    return carry, [jnp.concatenate(each) if len(parts) > 1 else each[0] for each in map(list, zip(*parts, strict=True))], kept


def _save_loop(stack: Stack, loop: Loop, start: jax.Array, carry: Arrays, scope: str) -> tuple[Arrays, Arrays, Kept]:
    layouts = []

    def body(carry: Arrays, each: tuple[None, jax.Array]) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        index = start + each[1]
        inputs = _take(stack.own, index), stack.shared, index, carry
        carry, outputs, stored, layout = save_layer(stack.layer, loop.rules, *inputs)
        layouts.append(layout)
        return carry, (outputs, stored)

    with jax.named_scope(scope):
        carry, (outputs, stored) = _loop(body, carry, None, loop.num_layers, unroll=stack.unroll)
        if loop.num_layers == 1:
            outputs = [output[None] for output in outputs]
        invariant = layouts[-1].invariant(*stack.own, *stack.shared, start)
    return carry, outputs, Kept(stored=stored, invariant=invariant, layout=layouts[-1])


def _save_groups(stack: Stack, groups: Groups, start: jax.Array, carry: Arrays, scope: str) -> tuple[Arrays, Arrays, Kept]:
    length = group_length(groups)

    def group(carry: Arrays, each: tuple[None, jax.Array]) -> tuple[Arrays, tuple[Arrays, Arrays]]:
        first = start + length * each[1]

        def layer(carry: Arrays, each: tuple[None, jax.Array]) -> tuple[Arrays, Arrays]:
            index = first + each[1]
            return stack.layer.run(_take(stack.own, index), stack.shared, index, carry)

        after, outputs = _loop(layer, carry, None, length, unroll=stack.unroll)
        return after, ([output[None] for output in outputs] if length == 1 else outputs, carry)

    with jax.named_scope(scope):
        carry, (outputs, stored) = _loop(group, carry, None, groups.num_groups, unroll=1)
    if groups.num_groups > 1:
        outputs = [output.reshape(-1, *output.shape[2:]) for output in outputs]
    return carry, outputs, Kept(stored=stored, invariant=[], layout=None)


def _keep_groups(stack: Stack, groups: Groups, start: jax.Array, carry: Arrays) -> Kept:
    """Keeps the input of each group again; the last group, of which only the input is wanted, is not run."""
    if groups.num_groups == 1:
        return Kept(stored=carry, invariant=[], layout=None)
    others = dataclasses.replace(groups, num_groups=groups.num_groups - 1)
    last, _, kept = _save_groups(stack, others, start, carry, AGAIN)
    before = kept.stored if others.num_groups > 1 else [array[None] for array in kept.stored]
    stored = [jnp.concatenate([some, array[None]]) for some, array in zip(before, last, strict=True)]
    return Kept(stored=stored, invariant=[], layout=None)


def _pull_all(
    stack: Stack, nodes: tuple[Node, ...], base: jax.Array, kept: list[Kept], gradients: Gradients, output_cts: Sequence[Any]
) -> Gradients:
    for node, kept_here in zip(reversed(nodes), reversed(kept), strict=True):
        start = base + node.start
        if isinstance(node, Loop):
            gradients = _pull_loop(stack, node, start, kept_here, gradients, output_cts)
        else:
            gradients = _pull_groups(stack, node, start, kept_here, gradients, output_cts)
    return gradients


def _pull_loop(
    stack: Stack, loop: Loop, start: jax.Array, kept: Kept, gradients: Gradients, output_cts: Sequence[Any]
) -> Gradients:
    layout = kept.layout
    assert layout is not None

    def body(gradients: Gradients, each: tuple[Arrays, jax.Array]) -> tuple[Gradients, None]:
        stored, index, shared = each[0], start + each[1], stack.shared
        carry_cts, own_sum, shared_sum = gradients
        if loop.rules is not None and (loop.num_layers == 1 or stack.unroll != 1):
            stored, index, shared, carry_cts = jax.lax.optimization_barrier((stored, index, shared, carry_cts))
        cotangents = carry_cts, [_take_cotangent(ct, index) for ct in output_cts]
        inputs = _take(stack.own, index), shared, index
        own, shared_here, carry_cts = pull_layer(layout, loop.rules, stored, kept.invariant, inputs, cotangents)
        own_sum = [_put(sum_, part, index) for sum_, part in zip(own_sum, own, strict=True)]
        shared_sum = [sum_ + part for sum_, part in zip(shared_sum, shared_here, strict=True)]
        return (carry_cts, own_sum, shared_sum), None

    with jax.named_scope(BACKWARD_SCOPE):
        return _loop(body, gradients, kept.stored, loop.num_layers, unroll=stack.unroll, reverse=True)[0]


def _pull_groups(
    stack: Stack, groups: Groups, start: jax.Array, kept: Kept, gradients: Gradients, output_cts: Sequence[Any]
) -> Gradients:
    def body(gradients: Gradients, each: tuple[Arrays, jax.Array]) -> tuple[Gradients, None]:
        carry, base = each[0], start + group_length(groups) * each[1]
        if groups.num_groups == 1:
            carry, base, carry_cts = jax.lax.optimization_barrier((carry, base, gradients[0]))
            gradients = carry_cts, *gradients[1:]
        *nodes, last = groups.nodes
        carry, _, kept_inside = _save_all(stack, tuple(nodes), base, carry, AGAIN)
        if isinstance(last, Loop):
            kept_inside.append(_save_loop(stack, last, base + last.start, carry, AGAIN)[2])
        else:
            kept_inside.append(_keep_groups(stack, last, base + last.start, carry))
        return _pull_all(stack, groups.nodes, base, kept_inside, gradients, output_cts), None

    with jax.named_scope(BACKWARD_SCOPE):
        return _loop(prune(body), gradients, kept.stored, groups.num_groups, unroll=1, reverse=True)[0]


def _loop(
    body: Callable[[Any, Any], tuple[Any, Any]], state: Any, arrays: Any, length: int, *, unroll: int, reverse: bool = False
) -> tuple[Any, Any]:
    """A scan over arrays and their index; a single iteration is no loop, and neither its arrays nor its outputs are stacked."""
    if length == 1:
        return body(state, (arrays, _index(0)))

    # The index comes from a counter in the carry: read from a scanned `arange` it would be data to the compiler, which then
    # schedules the reads of the parameters worse.
    def step(carry: tuple[Any, jax.Array], each: Any) -> tuple[tuple[Any, jax.Array], Any]:
        state, count = carry
        state, outputs = body(state, (each, length - 1 - count if reverse else count))
        return (state, count + 1), outputs

    (state, _), outputs = jax.lax.scan(step, (state, _index(0)), arrays, length=length, unroll=unroll, reverse=reverse)
    return state, outputs


def _take(arrays: Arrays, index: jax.Array) -> Arrays:
    return [jax.lax.dynamic_index_in_dim(array, index, keepdims=False, allow_negative_indices=False) for array in arrays]


def _put(buffer: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(buffer, part, index, 0, allow_negative_indices=False)


def _take_cotangent(cotangent: jax.Array | SymbolicZero, index: jax.Array) -> jax.Array:
    if isinstance(cotangent, SymbolicZero):
        return _jax.zeros(mapped_aval(cotangent.shape[0], 0, cotangent.aval))  # type: ignore[index]
    return _take([cotangent], index)[0]


def _instantiate(cotangent: jax.Array | SymbolicZero) -> jax.Array:
    return _jax.zeros(cotangent.aval) if isinstance(cotangent, SymbolicZero) else cotangent


def _gradient_buffer(array: jax.Array) -> jax.Array:
    """Zeros that the compiler shards as it shards the array.

    Zeros alone say nothing of their sharding. A layer of the array in them does, and costs nothing: its gradient overwrites it.
    """
    first = jax.lax.slice_in_dim(array, 0, 1)
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(array), first, 0, 0)


def _spread(wanted: tuple[bool, ...], gradients: Arrays) -> list[jax.Array | None]:
    rest = iter(gradients)
    return [next(rest) if is_wanted else None for is_wanted in wanted]


def _is_wanted(primal: CustomVJPPrimal) -> bool:
    return primal.perturbed and _is_float(primal.value)


def _is_float(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _index(value: int) -> jax.Array:
    return jnp.int32(value)
