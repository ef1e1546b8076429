"""Arguments of a wrapped call, parted into what is traced and what stays Python.

`jax.checkpoint` makes a tracer of every leaf, so that `train=True` can no longer steer an `if`. Here only arrays (and modules
that hold state) are handed to it; every other leaf, and every argument that the caller names as static, keeps its Python value.
In: a call's arguments; out: `Constants`, a hashable record of what stays, and the list of the rest.
"""

import enum
import inspect
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from remat_kit.errors import ApplyError, nearest

_PLAIN_TYPES = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, type)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticArguments:
    """Arguments that stay Python values whatever they hold.

    Attributes:
        positions: Where they stand, counted in the arguments that a call gives (`self` is not among them).
        names: What they are called.
    """

    positions: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Static:
    """Shields an argument that was named as static from being taken apart."""

    value: Any


@dataclass(frozen=True, slots=True)
class Constants:
    """What of a call's arguments stays Python.

    Attributes:
        tree: Structure of `(args, kwargs)`.
        values: For each leaf None, or the pair of type and value that stays; with the type, as `1 == True`.
    """

    tree: Any
    values: tuple[tuple[Any, Any] | None, ...]

    @property
    def are_plain(self) -> bool:
        """Whether equal constants make equal traces: no value is an object with a state of its own."""
        return all(pair is None or _is_plain(pair[1]) for pair in self.values)


def static_arguments(
    fn: Callable[..., Any], argnums: int | Iterable[int], argnames: str | Iterable[str], *, num_bound: int = 0
) -> StaticArguments:
    """Reads the static arguments of a call to `fn`, by position and by name, each completed by the other.

    Args:
        fn: What is called; its signature gives the names.
        argnums: Positions in the signature, `self` included where there is one.
        argnames: Names.
        num_bound: Leading parameters that a call does not give, 1 for a method.

    Raises:
        ApplyError: There is no such argument.
    """
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames)
    if not positions and not names:
        return StaticArguments()
    parameters = tuple(inspect.signature(fn).parameters.values())
    ordered = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    positions = tuple(_position(fn, position, ordered, parameters) for position in positions)
    for name in names:
        _check_name(fn, name, parameters)
    named = {position: ordered[position] for position in positions if position < len(ordered)}
    placed = {ordered.index(name) for name in names if name in ordered}
    return StaticArguments(
        positions=frozenset(position - num_bound for position in {*positions, *placed} if position >= num_bound),
        names=frozenset({*names, *named.values()}),
    )


def read_positions(option: str, given: Any) -> tuple[int, ...]:
    """Positions of arguments, given as one or as several.

    Raises:
        ApplyError: They are no whole numbers.
    """
    try:
        return (operator.index(given),) if hasattr(given, "__index__") else tuple(map(operator.index, given))
    except TypeError:
        raise ApplyError(f"{option}={given!r}: give positions of arguments, like 1 or (1, 2).") from None


def split_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, static: StaticArguments, is_node: Callable[[Any], bool]
) -> tuple[Constants, list[Any]]:
    """Parts a call's arguments.

    Args:
        args: Positional ones.
        kwargs: Keyword ones.
        static: Those that stay whole.
        is_node: Which objects are handed on as they are, though they are no arrays: modules that hold state.

    Returns:
        What stays, and the arrays and nodes in order.
    """
    shielded = (
        tuple(_Static(value) if position in static.positions else value for position, value in enumerate(args)),
        {name: _Static(value) if name in static.names else value for name, value in kwargs.items()},
    )
    leaves, tree = jax.tree.flatten(shielded, is_leaf=is_node)
    traced = [isinstance(leaf, jax.Array | np.ndarray | np.generic) or is_node(leaf) for leaf in leaves]
    values = tuple(None if is_traced else _typed(leaf) for leaf, is_traced in zip(leaves, traced, strict=True))
    return Constants(tree, values), [leaf for leaf, is_traced in zip(leaves, traced, strict=True) if is_traced]


def join_arguments(constants: Constants, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Puts a call's arguments together again; the inverse of `split_arguments`."""
    rest = iter(leaves)
    return jax.tree.unflatten(constants.tree, [next(rest) if pair is None else pair[1] for pair in constants.values])


def _typed(leaf: Any) -> tuple[Any, Any]:
    value = leaf.value if isinstance(leaf, _Static) else leaf
    # 1 == True and 0.0 == -0.0, and 1.0 == 1 inside a tuple, but not for the code that reads them.
    return ((type(value), repr(value)) if _is_plain(value) else type(value)), value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, _PLAIN_TYPES)


def _position(fn: Callable[..., Any], position: int, ordered: list[str], parameters: tuple[inspect.Parameter, ...]) -> int:
    is_open = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    if not -len(ordered) <= position < len(ordered) and not (is_open and position >= 0):
        raise ApplyError(f"static_argnums has {position}; {_name(fn)} takes {len(ordered)} positional arguments: {ordered}.")
    return position if position >= 0 else position + len(ordered)


def _check_name(fn: Callable[..., Any], name: str, parameters: tuple[inspect.Parameter, ...]) -> None:
    names = [parameter.name for parameter in parameters]
    is_open = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    if name not in names and not is_open:
        raise ApplyError(f"static_argnames has {name!r}; {_name(fn)} takes {names}.{nearest(name, names)}")


def _name(fn: Callable[..., Any]) -> str:
    return repr(fn.__qualname__) if hasattr(fn, "__qualname__") else repr(fn)
