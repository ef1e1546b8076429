"""Policies by module path, for models that nobody may edit: `rematerialize`.

In: module patterns with their policies. While the context is open, each module's output carries its path as `checkpoint_name`,
and modules that match run rematerialized. What is here knows patterns, what was seen, and what to complain of; how a call is
caught is in `linen_paths.py` (method interceptors) and `nnx_paths.py` (a subclass for each module of a model).

The rules enter JAX's trace key (`jax.make_user_context`): a function jitted before is traced again within, and what is jitted
within does not stay rematerialized after.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name

from remat_kit import _jax
from remat_kit.apply.function import Wrapping, num_enclosing_checkpoints, rules_of, warn
from remat_kit.apply.jaxprs import equations_of
from remat_kit.errors import ApplyError, nearest
from remat_kit.plans import StackPlan
from remat_kit.policy import Policy, Remat, matches, patterns

PolicyLike: TypeAlias = Policy | StackPlan | str


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRule:
    """A policy for the modules whose path matches.

    Attributes:
        pattern: Path in the model, where `*` stands for anything within one part, `**` for any parts.
        policy: What they keep; None = they are not rematerialized, whatever an earlier rule says.
        prevent_cse: See `remat_kit.remat`.
    """

    pattern: str
    policy: Remat | None
    prevent_cse: bool = True

    def matches(self, path: str) -> bool:
        """Whether a module's path matches; the root of a model, whose path is empty, never does."""
        return bool(path) and _regex(self.pattern).fullmatch(path) is not None


@dataclass(slots=True)
class _Sighting:
    """What one rule has met: the modules that match, and the names of values within them."""

    paths: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    has_hidden_names: bool = False


@dataclass(slots=True)
class Entry:
    """One entering of the context by one thread.

    Attributes:
        rules: Those of the contexts around this one, then its own; later ones win.
        has_models: Whether NNX models were given.
        own: What its own rules have met.
        seen: Paths of the modules that ran, in order.
        active: Paths of the rematerialized modules that are being traced, outermost first.
        exits: What leaving undoes.
    """

    rules: tuple[PathRule, ...]
    has_models: bool
    own: dict[PathRule, _Sighting]
    seen: dict[str, None] = field(default_factory=dict)
    active: list[str] = field(default_factory=list)
    exits: ExitStack = field(default_factory=ExitStack)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.entries: list[Entry] = []


_thread = _Thread()
_trace_key = jax.make_user_context(None)
# Rules that have met modules in this process: when nothing is traced because JAX has the program already, it was made by them.
_proven: set[tuple[tuple[PathRule, ...], bool]] = set()


class Rematerialization:
    """What `rematerialize` returns: a context manager, to be entered as often as one likes, and a decorator."""

    def __init__(self, rules: tuple[PathRule, ...], models: tuple[Any, ...]) -> None:
        self._rules = rules
        self._models = models

    def __enter__(self) -> None:
        enter(self._rules, self._models)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        entry = _thread.entries.pop()
        entry.exits.close()
        if kind is None:
            _check(entry)

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a function in the context; NNX modules among its arguments count as models."""

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with Rematerialization(self._rules, (*self._models, *_models_in((args, kwargs)))):
                return fn(*args, **kwargs)

        return wrapped


def rematerialize(policies: Mapping[str, PolicyLike], *models: Any, prevent_cse: bool = True) -> Rematerialization:
    """Rematerializes parts of a model without touching it, by their paths in it.

    Within the context the output of every module's `__call__` is named by the module's path, such as `layers/attn/query`, and the
    modules that match run as under `remat`. Contexts nest; of the patterns that match a module the last one counts.

    Args:
        policies: Module pattern -> policy. In a pattern `*` stands for anything within one part of a path, `**` for any number of
            parts. A policy (record or text) speaks of values by the paths of the modules that made them, or by names given by
            `checkpoint_name` in the model. `none` takes modules out again.
        *models: NNX models; paths start at them. Linen needs none, there paths start at the module that is applied.
        prevent_cse: False only if every matching module is the body of a real loop, see `remat_kit.remat`.

    Returns:
        A context manager, also usable as a decorator.

    Raises:
        ApplyError: On leaving, when a pattern matched no module that was traced, or a policy names a value that none of the
            matching modules has. Models that JAX does not trace again, as they were compiled for the same patterns, are fine.
        PolicyError: A policy is mixed, or an unresolved preset.

    Warns:
        RematWarning: A matching module runs within another rematerialized one, which decides alone what is saved.

    Example:
        >>> from flax import linen as nn
        >>> import jax, jax.numpy as jnp
        >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(8)])
        >>> x = jnp.ones((1, 8))
        >>> params = model.init(jax.random.key(0), x)
        >>> with rematerialize({"layers_*": "full"}):
        ...     gradient = jax.grad(lambda params: model.apply(params, x).sum())(params)
    """
    if not policies:
        raise ApplyError("rematerialize({}) has no pattern: give module patterns with policies, like {'layers/*': 'full'}.")
    rules = []
    for pattern, policy in policies.items():
        if not pattern.strip("/"):
            raise ApplyError(f"{pattern!r} is no module pattern: give a path below the model, like 'layers/*' or '**/mlp'.")
        rules.append(PathRule(pattern=pattern.strip("/"), policy=rules_of(policy), prevent_cse=prevent_cse))
    return Rematerialization(tuple(rules), models)


def enter(rules: tuple[PathRule, ...], models: tuple[Any, ...]) -> None:
    """Opens a context in this thread; whatever fails half-way is undone."""
    from remat_kit.apply import linen_paths, nnx_paths

    outer = _thread.entries[-1].rules if _thread.entries else ()
    entry = Entry(rules=(*outer, *rules), has_models=bool(models), own={rule: _Sighting() for rule in rules})
    with ExitStack() as exits:
        exits.enter_context(_trace_key(entry.rules))
        if not _thread.entries:
            exits.enter_context(linen_paths.intercepted())
        exits.enter_context(nnx_paths.intercepted(models))
        entry.exits = exits.pop_all()
    _thread.entries.append(entry)


def is_open() -> bool:
    """Whether this thread is in a context."""
    return bool(_thread.entries)


def run_module(path: str, plain: Callable[[], Any], rematerialized: Callable[[Wrapping, Callable[..., None]], Any]) -> Any:
    """Runs a module's call as the open contexts say.

    Args:
        path: Of the module, in its model.
        plain: Runs the call as it is.
        rematerialized: Runs it under a wrapping, so that it comes by here again, and hands a function that gives the program of
            the checkpoint to its second argument.

    Returns:
        What the call returns, its arrays named by the path.
    """
    entry = _thread.entries[-1]
    rule = _visit(entry, path)
    if path in entry.active or rule is None or rule.policy is None:
        return _named(plain(), path)
    _warn_of_nesting(entry, path)
    entry.active.append(path)
    try:
        wrapping = Wrapping(policy=rule.policy, prevent_cse=rule.prevent_cse, is_by_path=True)
        return rematerialized(wrapping, functools.partial(_note_names, rule))
    finally:
        entry.active.remove(path)


def _visit(entry: Entry, path: str) -> PathRule | None:
    """Notes that a module runs, and gives the rule that counts for it."""
    for each in _thread.entries:
        each.seen[path] = None
        for rule, sighting in each.own.items():
            if rule.matches(path):
                sighting.paths.add(path)
            if any(rule.matches(outer) for outer in entry.active if outer != path):
                sighting.names.add(path)
    return next((rule for rule in reversed(entry.rules) if rule.matches(path)), None)


def _note_names(rule: PathRule, program: Callable[[], Any]) -> None:
    """Looks for the names that a policy speaks of and no module has in the traced program, where `checkpoint_name` put them."""
    for sighting in [entry.own[rule] for entry in _thread.entries if rule in entry.own]:
        if _unmet(rule, sighting):
            for equation in equations_of(program()):
                if (name := _jax.checkpoint_name_of(equation)) is not None:
                    sighting.names.add(name)
                sighting.has_hidden_names |= equation.primitive.name.startswith("custom_vjp_call")


def _named(result: Any, path: str) -> Any:
    if not path:
        return result
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, path) if isinstance(leaf, jax.Array) else leaf, result)


def _warn_of_nesting(entry: Entry, path: str) -> None:
    if entry.active:
        around = f"{entry.active[-1]!r}, which is rematerialized by a pattern too"
    elif num_enclosing_checkpoints() > 0:
        around = "a jax.checkpoint of the model's own"
    else:
        return
    warn(f"module {path!r} runs within {around}: the outer one decides what is saved, this one only makes recomputation longer.")


def _check(entry: Entry) -> None:
    if not entry.seen and (entry.rules, entry.has_models) in _proven:
        return
    for rule, sighting in entry.own.items():
        if not sighting.paths:
            raise ApplyError(_no_match(rule, entry))
        if (unmet := _unmet(rule, sighting)) is not None:
            _complain_of_name(rule, unmet, sighting)
    _proven.add((entry.rules, entry.has_models))


def _unmet(rule: PathRule, sighting: _Sighting) -> str | None:
    """The first value name in the rule's policy that nothing seen so far has."""
    wanted = () if rule.policy is None else patterns(rule.policy)
    return next((each for each in wanted if not any(matches(each, name) for name in sighting.names - sighting.paths)), None)


def _complain_of_name(rule: PathRule, unmet: str, sighting: _Sighting) -> None:
    known = _shortened(sorted(sighting.names - sighting.paths))
    text = f"{str(rule.policy)!r} for {rule.pattern!r} speaks of {unmet!r}, and"
    if sighting.has_hidden_names:
        warn(f"{text} no value with that name was seen; rules of a custom_vjp, which may hold it, can't be looked into.")
    elif unmet in sighting.paths:
        raise ApplyError(
            f"{text} that is the output of a rematerialized module itself: name what is within it, {_listing(known)}."
        )
    else:
        raise ApplyError(
            f"{text} no value in the matching modules has that name. They have: {_listing(known)}.{nearest(unmet, known)}"
        )


def _no_match(rule: PathRule, entry: Entry) -> str:
    if not entry.seen:
        return (
            f"no module was traced while {rule.pattern!r} was to be rematerialized: the model did not run, or was compiled ahead "
            "of time, or is an NNX model that was not given: rematerialize(policies, model)."
        )
    seen = _shortened(path for path in entry.seen if path)
    return (
        f"module pattern {rule.pattern!r} matches nothing.{nearest(rule.pattern, seen)} The modules that ran: {_listing(seen)}."
    )


def _shortened(paths: Iterable[str]) -> list[str]:
    """Paths, those that differ in numbers only as one with `*`."""
    return list(dict.fromkeys(re.sub(r"(?<![0-9])[0-9]+(?=/|$)", "*", path) for path in paths))


def _listing(names: list[str]) -> str:
    return ", ".join(names[:60]) + f" and {len(names) - 60} more" * (len(names) > 60) if names else "none"


@functools.cache
def _regex(pattern: str) -> re.Pattern[str]:
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}
    parts = re.split(r"(\*\*/|\*\*|\*)", pattern)
    return re.compile("".join(words.get(part, re.escape(part)) for part in parts), re.DOTALL)


def _models_in(tree: Any) -> Iterator[Any]:
    from remat_kit.apply import nnx_paths

    return nnx_paths.models_in(tree)
