"""Catches the calls of Linen modules for `paths.py`, by a method interceptor; also within `nn.scan`, `nn.vmap`, `nn.remat`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from flax import linen as nn

from remat_kit.apply.arguments import StaticArguments
from remat_kit.apply.function import Wrapping
from remat_kit.apply.linen import call_method
from remat_kit.apply.paths import is_open, run_module


def intercepted() -> AbstractContextManager[None]:
    """A context in which this thread's calls of Linen modules go by `paths.run_module`."""
    return nn.intercept_methods(_intercept)


def _intercept(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: nn.module.InterceptorContext
) -> Any:
    if context.method_name != "__call__" or not is_open():
        return call(*args, **kwargs)
    module = context.module

    def rematerialized(wrapping: Wrapping, observe: Callable[..., None]) -> Any:
        # The clone's own call comes by here again, and is then left alone.
        return call_method(
            type(module).__call__, module, args, kwargs, wrapping=wrapping, static=StaticArguments(), observe=observe
        )

    return run_module("/".join(module.path), lambda: call(*args, **kwargs), rematerialized)
