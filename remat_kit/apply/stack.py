"""Stacks of equal layers with a policy per segment of layers: `stack`.

In: a block, its stacked parameters `[L, …]`, a plan. Out: what the last layer returns, and the outputs of all layers. A plan with
one policy is a plain `lax.scan` over the rematerialized block; a mixed one, or one with `group`, runs in the loops of `mixed.py`,
which keep one stacked parameter tree and exact memory.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from remat_kit.apply.checkpoint import checkpoint
from remat_kit.apply.checks import name_of, warn_of_idle_rules
from remat_kit.apply.function import is_wrapped, rules_of, warn
from remat_kit.apply.jaxprs import Arrays
from remat_kit.apply.mixed import FlatLayer, run_mixed
from remat_kit.apply.segments import GroupOption, build_nodes
from remat_kit.errors import PolicyError, StepError
from remat_kit.grammar import parse_plan
from remat_kit.plans import Plan, Segment, StackPlan
from remat_kit.policy import NoRemat, Policy, Preset, Remat, matches, patterns

BLOCK_INPUT = "block_input"
"""The name by which a policy speaks of what a layer gets from the one before: `offload(block_input)`."""

Result = TypeVar("Result")


def stack(
    block: Callable[..., Result],
    params: Any,
    x: Any,
    plan: Policy | StackPlan | Plan | str,
    *,
    xs: Any = None,
    consts: Any = None,
    key: Any = None,
    group: GroupOption = None,
    unroll: int = 1,
) -> Result:
    """Runs equal layers one after the other, rematerialized as a plan says.

    Args:
        block: One layer, called as `block(params_of_layer, x)`, and with those of the keywords `xs`, `consts` and `key` that are
            given here. Returns the next `x`, or a pair of it and an output of this layer. The next `x` has the types of `x`.
        params: Parameters, each `[L, …]`.
        x: What the first layer gets: an array or a pytree.
        plan: A policy per segment of layers, first layer first: a record, or a text like `"full*24 | save(q,k,v)*8"`. Put the
            segment that saves most last: it is consumed first.
        xs: Per-layer inputs, each `[L, …]`; a layer gets its slice.
        consts: Inputs that all layers get.
        key: A random key, or a pytree of them; a layer gets `jax.random.fold_in(key, index_of_layer)`, whatever the plan.
        group: Keeps, of the layers under `full`, the inputs of only every k-th one: a number k, or `"sqrt"` for k near the square
            root of a segment's length. Costs one more forward pass. `"recursive"` nests groups of two: memory and extra forward
            passes grow with the logarithm of the length.
        unroll: Layers per iteration of a loop.

    Returns:
        What the block returns, for the last layer; outputs of layers are stacked, each `[L, …]`.

    Raises:
        PolicyError: The plan does not fit the stack, or `group` has no segment to act on.
        StepError: Leading axes differ, or the block returns other types than those of `x`.

    Warns:
        RematWarning: The block is wrapped already.
        IdleRuleWarning: A rule keeps nothing: no value of the block has its name, or the block only returns it.

    Note:
        A mixed plan, or one with `group`, has no forward-mode derivative (`jax.jvp`), which is an error: use one policy there.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> layers = jnp.full((4, 8, 8), 0.1)
        >>> stack(lambda w, x: jnp.tanh(x @ w), layers, jnp.ones((2, 8)), "full*2 | none*2").shape
        (2, 8)
    """
    if unroll < 1:
        raise StepError(f"unroll={unroll}: a loop runs at least 1 layer an iteration.")
    num_layers = _num_layers(params, xs)
    fitted = as_stack_plan(plan).fit(num_layers)
    own, shared = (params, xs), (consts, key)
    if is_wrapped(block):
        warn(f"{block!r} is rematerialized already: give stack the plain block, and the policy as its plan.")
    layer = _Layer(block, names_input=_names_input(fitted))
    if group is None and not fitted.is_mixed:
        carry, outputs = _run_uniform(layer, fitted.policy, own, shared, x, num_layers=num_layers, unroll=unroll)
    else:
        carry, outputs = _run_in_loops(layer, fitted, own, shared, x, group=group, unroll=unroll)
    return (carry, outputs) if layer.has_outputs else carry  # type: ignore[return-value]


def as_stack_plan(plan: Policy | StackPlan | Plan | str) -> StackPlan:
    """Reads whatever a caller may give as the plan of one stack.

    Raises:
        PolicyError: The plan speaks of named stacks.
    """
    match plan:
        case StackPlan():
            return plan
        case str():
            return as_stack_plan(parse_plan(plan))
        case Plan(((None, part),)):
            return part
        case Plan():
            raise PolicyError(
                f"{str(plan)!r} speaks of stacks by name; here the plan of one stack is taken, like {plan.parts[0][1]}."
            )
        case NoRemat() | Preset() | Remat():
            return StackPlan((Segment(plan),))
        case _:
            raise PolicyError(
                f"{plan!r} is no plan: give a text like 'full*8 | save(q,k)*4', a policy, or what parse_plan returns."
            )


class _Layer:
    """A block behind one signature, `(own, shared, index, carry) -> (carry, outputs)`; notes whether there are outputs."""

    def __init__(self, block: Callable[..., Any], *, names_input: bool) -> None:
        self.block = block
        self.names_input = names_input
        self.has_outputs = False

    def __call__(self, own: Any, shared: Any, index: jax.Array, carry: Any) -> tuple[Any, Any]:
        (params, xs), (consts, key) = own, shared
        given = {"xs": xs, "consts": consts, "key": jax.tree.map(lambda key: jax.random.fold_in(key, index), key)}
        if self.names_input:
            carry = jax.tree.map(lambda array: checkpoint_name(array, BLOCK_INPUT), carry)
        result = self.block(params, carry, **{name: value for name, value in given.items() if value is not None})
        self.has_outputs, carry, outputs = split_result(result, carry)
        return carry, outputs


def split_result(result: Any, carry: Any) -> tuple[bool, Any, Any]:
    """What a block returned: whether that is a pair, the next `x`, and the outputs (None without).

    Raises:
        StepError: The next `x` has other types than `carry`.
    """
    types = _types(carry)
    if _types(result) == types:
        return False, result, None
    if isinstance(result, tuple) and len(result) == 2 and _types(result[0]) == types:
        return True, *result
    raise StepError(_mismatch(carry, result))


def _run_uniform(
    layer: _Layer, policy: Policy, own: Any, shared: Any, carry: Any, *, num_layers: int, unroll: int
) -> tuple[Any, Any]:
    is_loop = num_layers > 1 and unroll == 1
    rules = rules_of(policy)
    run = layer if rules is None else checkpoint(layer, rules, prevent_cse=not is_loop, find_weights=_find_weights)
    if rules is not None:
        run = _checked(run, rules, layer.block)
    if num_layers == 1:
        carry, outputs = run(jax.tree.map(lambda array: array[0], own), shared, jnp.int32(0), carry)
        return carry, jax.tree.map(lambda array: array[None], outputs)
    indices = jnp.arange(num_layers)
    return jax.lax.scan(lambda carry, each: run(each[0], shared, each[1], carry), carry, (own, indices), unroll=unroll)


def _checked(run: Callable[..., Any], rules: Remat, block: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which warns of rules that keep nothing."""

    def call(*args: Any) -> Any:
        result = run(*args)
        warn_of_idle_rules(rules, lambda: jax.make_jaxpr(run)(*args), name_of(block))
        return result

    return call


def _find_weights(own: tuple[Any, Any], *others: Any) -> list[bool]:
    """Which leaves of a layer's arguments are parameters."""
    params, xs = own
    return [True for _ in jax.tree.leaves(params)] + [False for _ in jax.tree.leaves((xs, others))]


def _run_in_loops(
    layer: _Layer, plan: StackPlan, own: Any, shared: Any, carry: Any, *, group: GroupOption, unroll: int
) -> tuple[Any, Any]:
    nodes = build_nodes(plan, group=group)
    own, shared, carry = jax.tree.map(_strongly_typed, (own, shared, carry))
    sliced = jax.eval_shape(lambda own: jax.tree.map(lambda array: array[0], own), own)
    closed, shapes = jax.make_jaxpr(layer, return_shape=True)(sliced, shared, jnp.int32(0), carry)
    for rules in dict.fromkeys(rules_of(segment.policy) for segment in plan.segments):
        if rules is not None:
            warn_of_idle_rules(rules, lambda: closed, name_of(layer.block))
    # Whatever the block closes over comes out of the trace as constants: as inputs, they too get gradients.
    closed_over = [jnp.asarray(const) for const in closed.consts]
    flat_shared = jax.tree.leaves(shared)
    flat = _flat_layer(closed, num_shared=len(flat_shared), num_carry=len(jax.tree.leaves(carry)))
    arrays = {"own": jax.tree.leaves(own), "shared": [*flat_shared, *closed_over], "carry": jax.tree.leaves(carry)}
    num_params = len(jax.tree.leaves(own[0]))

    def find_weights(own: Arrays, shared: Arrays, _index: jax.Array, carry: Arrays) -> list[bool]:
        of_own = [position < num_params for position in range(len(own))]
        return [*of_own, *(position >= len(flat_shared) for position in range(len(shared))), False, *(False for _ in carry)]

    results = run_mixed(flat, nodes, **arrays, unroll=unroll, find_weights=find_weights)
    return jax.tree.unflatten(jax.tree.structure(shapes), [*results[0], *results[1]])


def _flat_layer(closed: ClosedJaxpr, *, num_shared: int, num_carry: int) -> FlatLayer:
    def run(own: Arrays, shared: Arrays, index: jax.Array, carry: Arrays) -> tuple[Arrays, Arrays]:
        call = jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, shared[num_shared:]))
        results = [_strongly_typed(result) for result in call(*own, *shared[:num_shared], index, *carry)]
        return results[:num_carry], results[num_carry:]

    return run


def _strongly_typed(array: Any) -> jax.Array:
    """Without the weak type of Python scalars, so that a carry has one type in all layers."""
    array = jnp.asarray(array)
    return jax.lax.convert_element_type(array, array.dtype) if getattr(array, "weak_type", False) else array


def _num_layers(params: Any, xs: Any) -> int:
    lengths = {
        jax.tree_util.keystr(path): jnp.shape(leaf)[:1]
        for name, tree in (("params", params), ("xs", xs))
        for path, leaf in jax.tree_util.tree_leaves_with_path({name: tree})
    }
    found = set(lengths.values())
    if len(found) != 1 or () in found or (0,) in found:
        some = ", ".join(f"{name} {length[0] if length else 'none'}" for name, length in list(lengths.items())[:4])
        raise StepError(
            f"every array of params and xs needs the same leading axis, one entry a layer; found {some or 'no array'}."
        )
    return found.pop()[0]


def _names_input(plan: StackPlan) -> bool:
    return any(matches(pattern, BLOCK_INPUT) for segment in plan.segments for pattern in patterns(segment.policy))


def flax_inputs(params: Any, others: Any, num_layers: int, name: str) -> tuple[Any, ...]:
    """The per-layer inputs of a Flax stack: its variables beside the parameters, and for blocks without any variable a number.

    Args:
        params: Its parameters, stacked.
        others: Its other variables, stacked.
        num_layers: Its layers.
        name: What errors call it.

    Raises:
        StepError: The variables are those of a deeper or shallower stack.
    """
    if not jax.tree.leaves((params, others)):  # something has to say how many layers there are
        return others, jnp.arange(num_layers)
    found = _num_layers(params, others)
    if found != num_layers:
        raise StepError(f"{name} has num_layers={num_layers}, and its variables are those of {found} layers.")
    return (others,)


def _types(tree: Any) -> tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in map(_as_array, leaves))


def _as_array(leaf: Any) -> Any:
    try:
        jax.typeof(leaf)
    except TypeError:
        raise StepError(f"the block returns {leaf!r}, which is no array: return the next x, or (next x, output).") from None
    return leaf


def _mismatch(carry: Any, result: Any) -> str:
    given, returned = (jax.tree.map(lambda leaf: jax.typeof(leaf).str_short(), tree) for tree in (carry, result))
    return f"the block gets x of type {given} and returns {returned}: return the next x with the same type, or (next x, output)."
