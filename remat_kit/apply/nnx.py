"""Rematerialization of Flax NNX: classes, instances, methods, and functions that are handed modules.

Like `nnx.remat` this carries what a module writes (batch statistics, random counters, sown values) out of `jax.checkpoint`;
beyond it, keyword-only arguments work, arguments that are no arrays stay Python values, and the rule `weights` knows the
`nnx.Param`. Wrapping is per instance: no class is changed.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from remat_kit.apply.arguments import StaticArguments, join_arguments, split_arguments
from remat_kit.apply.function import MARK, Wrapping, checkpointed, subclass

_CONTEXT = "remat_kit"


def wrap_module(target: Any, wrapping: Wrapping) -> Any | None:
    """Wraps what belongs to NNX, see `remat_kit.remat`.

    Args:
        target: Anything.
        wrapping: How.

    Returns:
        The wrapped class, instance or bound method; None for anything else.
    """
    if inspect.isclass(target) and issubclass(target, nnx.Module):
        return _wrap_class(target, wrapping)
    if isinstance(target, nnx.Module):
        return with_class(target, _wrap_class(type(target), wrapping))
    if inspect.ismethod(target) and isinstance(target.__self__, nnx.Module):
        return _wrap_method(target.__func__, target.__self__, wrapping)
    return None


def holds_state(tree: Any) -> bool:
    """Whether there is a module, a variable or another object with state in the tree."""
    return any(is_node(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_node))


def call_with_modules(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, wrapping: Wrapping, static: StaticArguments
) -> Any:
    """Calls a function, some of whose arguments hold state, rematerialized; `self` is an argument like others."""
    constants, leaves = split_arguments(args, kwargs, static=static, is_node=is_node)

    def call(leaves: list[Any]) -> Any:
        args, kwargs = join_arguments(constants, leaves)
        return fn(*args, **kwargs)

    if all(variable._can_update for variable in variables_of(leaves)):  # no public name asks
        return _call_and_update_graph(call, leaves, wrapping)
    return _call_and_write_changes(call, leaves, wrapping)


def _call_and_update_graph(call: Callable[[list[Any]], Any], leaves: list[Any], wrapping: Wrapping) -> Any:
    """As `nnx.remat`: all that the call does to the modules is done to those outside, variables that it adds included."""
    with nnx.update_context(_CONTEXT):
        with nnx.split_context(_CONTEXT) as context:
            graphdef, state = context.split(leaves)

        def pure(state: Any) -> tuple[Any, Any]:
            with nnx.merge_context(_CONTEXT, inner=True) as context:
                inside = context.merge(graphdef, state)
            result = call(inside)
            with nnx.split_context(_CONTEXT) as context:
                return context.split(([leaf for leaf in inside if is_node(leaf)], result))

        graphdef_out, state_out = checkpointed(pure, wrapping, find_weights=_find_weights)(state)
        with nnx.merge_context(_CONTEXT, inner=False) as context:
            return context.merge(graphdef_out, state_out)[1]


def _call_and_write_changes(call: Callable[[list[Any]], Any], leaves: list[Any], wrapping: Wrapping) -> Any:
    """For modules with variables that the trace around closes over, which must not be written.

    What the call changes is written back, and Flax raises as it does without remat where it must not be. Variables that the call
    adds are lost.
    """
    graphdef, state = nnx.split(leaves)
    changed: list[int] = []

    def pure(state: Any) -> tuple[Any, list[Any]]:
        inside = nnx.merge(graphdef, state)
        variables = variables_of(inside)
        before = [variable.get_raw_value() for variable in variables]
        result = call(inside)
        after = [variable.get_raw_value() for variable in variables]
        changed[:] = [position for position, value in enumerate(after) if value is not before[position]]
        return result, [after[position] for position in changed]

    result, values = checkpointed(pure, wrapping, find_weights=_find_weights)(state)
    variables = variables_of(leaves)
    for position, value in zip(changed, values, strict=True):
        variables[position].set_value(value)
    return result


def _find_weights(*trees: Any) -> list[bool]:
    """Which leaves of modules taken apart are parameters: those of `nnx.Param`."""
    found = jax.tree.leaves(trees, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return [isinstance(leaf, nnx.Param) for leaf in found for _ in jax.tree.leaves(leaf)]


def with_class(module: nnx.Module, module_class: type[nnx.Module]) -> Any:
    """A copy of a module that shares its variables and submodules and is of another class with the same layout."""
    copy = object.__new__(module_class)
    vars(copy).update(vars(module))
    return copy


def is_node(value: Any) -> bool:
    """Whether an object is handed to NNX as it is."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def variables_of(tree: Any) -> list[nnx.Variable]:
    """The variables of the modules in a tree, each once, in the order of the graph."""
    return [node for _, node in nnx.iter_graph(tree, graph=True) if isinstance(node, nnx.Variable)]


def _wrap_class(module_class: type[nnx.Module], wrapping: Wrapping) -> type[nnx.Module]:
    wrapping.static(module_class.__call__)  # type: ignore[attr-defined]  # raises here, where the user's value enters
    return _subclass(module_class, wrapping)


@functools.cache
def _subclass(module_class: type[nnx.Module], wrapping: Wrapping) -> type[nnx.Module]:
    """The wrapped class: one for each class and wrapping, as `nnx.jit` traces again for another class."""
    call = module_class.__call__  # type: ignore[attr-defined]
    static = wrapping.static(call)

    @functools.wraps(call)
    def wrapped(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        return call_with_modules(call, (self, *args), kwargs, wrapping=wrapping, static=static)

    return subclass(module_class, **{"__call__": wrapped, MARK: wrapping.policy})


def _wrap_method(method: Callable[..., Any], module: nnx.Module, wrapping: Wrapping) -> Callable[..., Any]:
    static = wrapping.static(method)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call_with_modules(method, (module, *args), kwargs, wrapping=wrapping, static=static)

    setattr(wrapped, MARK, wrapping.policy)
    return wrapped
