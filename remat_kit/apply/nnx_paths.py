"""Catches the calls of NNX modules for `paths.py`: while a context is open, each module of a model has a subclass of its own.

Modules are changed one by one, classes never. The subclass knows its path, so that a module which `nnx.jit` or `nnx.scan` takes
apart and builds again still does; in a thread without an open context it does what its base does.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from remat_kit.apply.arguments import StaticArguments, join_arguments, split_arguments
from remat_kit.apply.function import Wrapping, subclass
from remat_kit.apply.nnx import call_with_modules, is_node
from remat_kit.apply.paths import is_open, run_module

_BASE = "_remat_kit_base"
_lock = threading.Lock()
_num_users: dict[int, int] = {}


def models_in(tree: Any) -> Iterator[Any]:
    """The NNX modules in a tree of arguments."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Module))
    return (leaf for leaf in leaves if isinstance(leaf, nnx.Module))


@contextmanager
def intercepted(models: tuple[Any, ...]) -> Iterator[None]:
    """A context in which calls of the modules of some models go by `paths.run_module`; they are as they were afterwards."""
    modules = [(path, module) for model in models for path, module in nnx.iter_modules(model)]
    with _lock:
        for path, module in modules:
            _num_users[id(module)] = _num_users.get(id(module), 0) + 1
            if _num_users[id(module)] == 1 and path and callable(module):
                module.__class__ = _at_path(type(module), "/".join(map(str, path)))
    try:
        yield
    finally:
        with _lock:
            for _, module in modules:
                _num_users[id(module)] -= 1
                if not _num_users[id(module)]:
                    del _num_users[id(module)]
                    module.__class__ = getattr(type(module), _BASE, type(module))


@functools.cache
def _at_path(module_class: type[nnx.Module], path: str) -> type[nnx.Module]:
    """The subclass for a path: one for each class and path, as `nnx.jit` traces again for another class."""
    call = module_class.__call__  # type: ignore[attr-defined]

    @functools.wraps(call)
    def at_path(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_open():
            return call(self, *args, **kwargs)

        def rematerialized(wrapping: Wrapping, observe: Callable[..., None]) -> Any:
            result = call_with_modules(at_path, (self, *args), kwargs, wrapping=wrapping, static=StaticArguments())
            observe(lambda: _program(at_path, (self, *args), kwargs))
            return result

        return run_module(path, lambda: call(self, *args, **kwargs), rematerialized)

    return subclass(module_class, **{"__call__": at_path, _BASE: module_class})


def _program(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The program of a call, traced for itself: nothing that it writes is kept."""
    constants, leaves = split_arguments(args, kwargs, static=StaticArguments(), is_node=is_node)
    graphdef, state = nnx.split(leaves)

    def pure(state: Any) -> None:
        args, kwargs = join_arguments(constants, nnx.merge(graphdef, state))
        fn(*args, **kwargs)

    return jax.make_jaxpr(pure)(state)
