"""Rematerialization of Flax Linen: classes, instances, methods, and functions that are handed modules with state.

Like `nn.remat` this lifts a module's variables and random keys into `jax.checkpoint`; beyond it, arguments that are no arrays
stay Python values, keyword arguments included, and classes keep their name, so that Flax derives the same parameter names.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.core import lift
from flax.linen.module import wrap_method_once

from remat_kit.apply.arguments import StaticArguments, join_arguments, split_arguments
from remat_kit.apply.function import MARK, Wrapping, checkpointed, subclass


def wrap_module(target: Any, wrapping: Wrapping) -> Any | None:
    """Wraps what belongs to Linen, see `remat_kit.remat`.

    Args:
        target: Anything.
        wrapping: How.

    Returns:
        The wrapped class, instance or bound method; None for anything else.
    """
    if inspect.isclass(target) and issubclass(target, nn.Module):
        return _wrap_class(target, wrapping)
    if isinstance(target, functools.partial) and inspect.isclass(target.func) and issubclass(target.func, nn.Module):
        return functools.partial(_wrap_class(target.func, wrapping), *target.args, **target.keywords)
    if isinstance(target, nn.Module):
        return _wrap_instance(target, wrapping)
    if inspect.ismethod(target) and isinstance(target.__self__, nn.Module):
        return _wrap_method(target.__func__, target.__self__, wrapping)
    return None


def holds_state(tree: Any) -> bool:
    """Whether there is a module in the tree that is bound to variables."""
    return any(isinstance(leaf, nn.Module) and leaf.scope is not None for leaf in jax.tree.leaves(tree))


def call_with_modules(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, wrapping: Wrapping, static: StaticArguments
) -> Any:
    """Calls a function, one of whose arguments is a bound module, rematerialized."""
    if args and isinstance(args[0], nn.Module):
        shifted = StaticArguments(positions=frozenset(p - 1 for p in static.positions), names=static.names)
        # Flax's own wrapper, which a compact method needs, belongs inside the checkpoint.
        return call_method(wrap_method_once(fn), args[0], args[1:], kwargs, wrapping=wrapping, static=shifted)
    first = next(leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, nn.Module) and leaf.scope is not None)
    return call_method(lambda _, *args, **kwargs: fn(*args, **kwargs), first, args, kwargs, wrapping=wrapping, static=static)


def call_method(
    method: Callable[..., Any],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    wrapping: Wrapping,
    static: StaticArguments,
    observe: Callable[[Callable[[], Any]], None] | None = None,
) -> Any:
    """Calls a method of a bound module, rematerialized.

    Args:
        method: Function whose first argument is the module.
        module: The module; the method gets a clone of it in a scope of the checkpoint's own.
        args: Further positional arguments.
        kwargs: Keyword arguments.
        wrapping: How.
        static: Which arguments stay Python values.
        observe: Is handed, after the call, a function that gives the program of the checkpoint.

    Returns:
        What the method returns.
    """
    constants, leaves = split_arguments(args, kwargs, static=static, is_node=lambda leaf: isinstance(leaf, nn.Module))

    def body(module: nn.Module, leaves: list[Any]) -> Any:
        args, kwargs = join_arguments(constants, leaves)
        return method(module, *args, **kwargs)

    body.__name__ = "remat"  # what profiles show
    return nn.transforms.lift_transform(_lifted_checkpoint, body, wrapping=wrapping, observe=observe)(module, leaves)


def _lifted_checkpoint(
    fn: Callable[..., Any], *, wrapping: Wrapping, observe: Callable[[Callable[[], Any]], None] | None
) -> Callable[..., Any]:
    """`flax.core.lift.checkpoint`, with a look at the program inside."""

    def inner(scope_fn: Any, repack_fn: Any, variable_groups: Any, rng_groups: Any, *args: Any) -> Any:
        def pure(variable_groups: Any, rng_groups: Any, *args: Any) -> Any:
            scope = scope_fn(variable_groups, rng_groups)
            return fn(scope, *args), repack_fn(scope)

        def find_weights(variable_groups: Any, *others: Any) -> list[bool]:
            return [True] * len(jax.tree.leaves(variable_groups)) + [False] * len(jax.tree.leaves(others))

        run = checkpointed(pure, wrapping, find_weights=find_weights)
        result = run(variable_groups, rng_groups, *args)
        if observe is not None:
            observe(lambda: jax.make_jaxpr(run)(variable_groups, rng_groups, *args))
        return result

    return lift.pack(inner, (True,), (True,), (True,), name="remat", enable_kwargs=True)


def _wrap_class(module_class: type[nn.Module], wrapping: Wrapping) -> type[nn.Module]:
    wrapping.static(module_class.__call__, num_bound=1)  # raises here, where the user's value enters
    return _subclass(module_class, wrapping)


@functools.cache
def _subclass(module_class: type[nn.Module], wrapping: Wrapping) -> type[nn.Module]:
    """The wrapped class: one for each class and wrapping, as modules of different classes are never equal."""
    call = module_class.__call__
    static = wrapping.static(call, num_bound=1)

    @functools.wraps(call)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call_method(call, self, args, kwargs, wrapping=wrapping, static=static)

    return subclass(module_class, **{"__call__": wrapped, MARK: wrapping.policy})


def _wrap_instance(module: nn.Module, wrapping: Wrapping) -> Any:
    if module.scope is not None:
        return _wrap_method(type(module).__call__, module, wrapping)
    # In the setup of a parent the module is registered already, a copy would be a second child.
    copy = module if isinstance(module.parent, nn.Module) else module.clone()
    object.__setattr__(copy, "__class__", _wrap_class(type(module), wrapping))
    return copy


def _wrap_method(method: Callable[..., Any], module: nn.Module, wrapping: Wrapping) -> Callable[..., Any]:
    static = wrapping.static(method, num_bound=1)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call_method(method, module, args, kwargs, wrapping=wrapping, static=static)

    setattr(wrapped, MARK, wrapping.policy)
    return wrapped
