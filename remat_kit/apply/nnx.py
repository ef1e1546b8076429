"""Rematerialization of Flax NNX: classes, instances, methods, and functions that are handed modules.

Built on `nnx.remat`, which carries what a module writes (batch statistics, random counters, sown values) out of
`jax.checkpoint`; beyond it, keyword-only arguments work and arguments that are no arrays stay Python values. Wrapping is per
instance: no class is changed.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from remat_kit.apply.arguments import StaticArguments, join_arguments, split_arguments
from remat_kit.apply.checkpoint import lower_unseen
from remat_kit.apply.function import MARK, Wrapping, subclass


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

    def remat(leaves: list[Any]) -> Any:
        args, kwargs = join_arguments(constants, leaves)
        return fn(*args, **kwargs)

    # `nnx.remat` writes every variable back, which those that a trace closes over forbid; without graph updates it writes back
    # what changed alone (and Flax raises as it does without remat), but loses variables that the call adds.
    variables = [node for _, node in nnx.iter_graph(leaves, graph=True) if isinstance(node, nnx.Variable)]
    graph_updates = all(variable._can_update for variable in variables)  # no public name asks
    policy = lower_unseen(wrapping.policy)
    return nnx.remat(remat, policy=policy, prevent_cse=wrapping.prevent_cse, graph_updates=graph_updates)(leaves)


def with_class(module: nnx.Module, module_class: type[nnx.Module]) -> Any:
    """A copy of a module that shares its variables and submodules and is of another class with the same layout."""
    copy = object.__new__(module_class)
    vars(copy).update(vars(module))
    return copy


def is_node(value: Any) -> bool:
    """Whether an object is handed to NNX as it is."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


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
