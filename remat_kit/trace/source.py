"""Which line of the user's code made an equation."""

import functools
import os
import sysconfig
from collections.abc import Hashable
from typing import Any

from remat_kit import _jax
from remat_kit.analysis.hlo import FRAMEWORKS
from remat_kit.files import source_roots

_INSTALLED = sysconfig.get_path("purelib")
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = (*(os.path.join(_INSTALLED, name, "") for name in FRAMEWORKS), _OWN)


def source_line(eqn: Any) -> str:
    """The innermost line outside frameworks and remat-kit, else the innermost one; empty when unknown.

    Returns:
        `file:line`, the file relative to the working directory or Python's search path where it lies below one of them.
    """
    first = ""
    for file, line in _jax.user_frames(eqn):
        if not file.startswith(_LIBRARIES):
            return f"{_shorten(file)}:{line}"
        first = first or f"{_shorten(file)}:{line}"
    return first


def call_site(eqn: Any) -> tuple[Hashable, ...]:
    """What made an equation, and what called that, up to remat-kit: the same whenever a block is traced, for whichever loop."""
    stack = _jax.call_stack(eqn)
    ours = next((index for index, (code, _) in enumerate(stack) if code.co_filename.startswith(_OWN)), len(stack))
    return tuple(stack[: max(1, ours)])


@functools.cache
def _shorten(file: str) -> str:
    if file.startswith(_INSTALLED):
        return os.path.relpath(file, _INSTALLED)
    root = next((root for root in (os.getcwd(), *source_roots()) if file.startswith(root + os.sep)), None)
    return file if root is None else os.path.relpath(file, root)
