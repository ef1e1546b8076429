"""Rematerialization of anything that can be called: `remat`, and what it does to functions.

In: a function, a Linen or NNX module, class or method, and a policy. Out: the same kind of thing, which recomputes in its
backward pass what the policy does not keep. What is special to Linen and to NNX is in `linen.py` and `nnx.py`; Flax is imported
only once somebody has.
"""

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, assert_never

import jax

from remat_kit.apply.arguments import (
    Constants,
    StaticArguments,
    join_arguments,
    read_positions,
    split_arguments,
    static_arguments,
)
from remat_kit.apply.checkpoint import FindWeights, checkpoint
from remat_kit.apply.checks import name_of, warn_of_idle_rules, warn_outside_loops
from remat_kit.apply.jaxprs import equations_of
from remat_kit.errors import ApplyError, IdleRuleWarning, PolicyError, RematWarning
from remat_kit.grammar import parse_policy
from remat_kit.operations import MATMULS
from remat_kit.plans import StackPlan
from remat_kit.policy import NoRemat, Policy, Preset, Remat, overruled

Target = TypeVar("Target", bound=Callable[..., Any])

MARK = "_remat_kit_policy"
"""Attribute of everything that is wrapped here: the policy it follows."""

_CHECKPOINT_FILE = inspect.unwrap(jax.checkpoint).__code__.co_filename
_JAX_FOLDER = str(Path(jax.__file__).parent)
_LOOPS = ("scan", "while")
_MANY_MATMULS = 8  # a head with its loss, or one small block, has fewer; a whole model of a few layers has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """How something is rematerialized.

    Attributes:
        policy: What to keep.
        prevent_cse: See `remat`.
        argnums: Positions of static arguments, `self` included.
        argnames: Names of static arguments.
        params_argnums: Positions of a function's arguments that are parameters.
        is_by_path: Whether `rematerialize` applies it, which looks for its names in all the modules that match together.
    """

    policy: Remat
    prevent_cse: bool = True
    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()
    params_argnums: tuple[int, ...] = ()
    is_by_path: bool = False

    def static(self, fn: Callable[..., Any], *, num_bound: int = 0) -> StaticArguments:
        """The static arguments of a call to `fn`, see `static_arguments`."""
        return static_arguments(fn, self.argnums, self.argnames, num_bound=num_bound)


def as_policy(policy: Policy | StackPlan | str) -> Policy:
    """Reads whatever a caller may give as one policy: a record, a uniform plan of a stack, or a text."""
    match policy:
        case str():
            return parse_policy(policy)
        case StackPlan():
            return policy.policy
        case NoRemat() | Preset() | Remat():
            return policy
        case _:
            raise PolicyError(
                f"{policy!r} is no policy: give a text like 'save(q,k)', 'full' or 'none', or what parse_policy returns."
            )


def rules_of(policy: Policy | StackPlan | str) -> Remat | None:
    """The rules to apply, None for no rematerialization.

    Raises:
        PolicyError: The policy is mixed, or a preset, which only a model's roles turn into rules.

    Warns:
        IdleRuleWarning: A later rule speaks of all that a rule speaks of.
    """
    single = as_policy(policy)
    for rule, later in overruled(single):
        warnings.warn(
            f"{rule} in {str(single)!r} has no effect, as {later} comes later and speaks of all its values: take it "
            "out, or put it behind.",
            IdleRuleWarning,
            stacklevel=3,
        )
    match single:
        case NoRemat():
            return None
        case Remat():
            return single
        case Preset(name):
            raise PolicyError(
                f"preset {name!r} names roles, not values: turn it into rules with remat_kit.resolve(policy, roles)."
            )
        case _:
            assert_never(single)


def remat(
    target: Target,
    policy: Policy | StackPlan | str,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    params_argnums: int | Iterable[int] = (),
) -> Target:
    """Makes a function or a module recompute, in its backward pass, what the policy does not keep.

    Parameters keep their names, random keys and mutable state their values. Arguments that are no arrays stay Python values, and
    what is not differentiated carries no barrier.

    Args:
        target: One of
            - a function; modules among its arguments may hold state;
            - a class of Linen or NNX modules: a subclass of the same name is returned, whose `__call__` is wrapped;
            - a module: a copy that shares the parameters is returned (of a Linen module that is already part of a running parent:
              its wrapped `__call__`), other instances of its class stay as they are;
            - a method, bound or not, also as a decorator within the class.
        policy: What to keep: a `Policy`, a uniform `StackPlan`, or a text like `"save(q,k,v)"`.
        prevent_cse: False only for the body of a real loop (not unrolled, more than one iteration): elsewhere the compiler
            merges the recomputation with the forward pass and undoes it.
        static_argnums: Positions, `self` included, of arguments that stay as they are although they are or hold arrays.
        static_argnames: The same by name.
        params_argnums: Positions of a function's arguments that are parameters: what the rule `weights` asks for. Linen and NNX
            modules know theirs.

    Returns:
        What was given, wrapped; itself for `none`.

    Raises:
        PolicyError: The policy is mixed or an unresolved preset.
        ApplyError: There is no such static argument.

    Warns:
        RematWarning: The target is wrapped already, turns out to be a whole loss, or has `prevent_cse=False` outside a loop.
        IdleRuleWarning: When called, a rule keeps nothing: no value has its name, or it is only returned.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> block = remat(lambda x, *, twice: jnp.sin(jnp.sin(x)) if twice else jnp.sin(x), "full")
        >>> float(jax.grad(block)(0.0, twice=True))
        1.0
    """
    found = rules_of(policy)
    if found is None:
        return target
    if not callable(target):
        raise ApplyError(f"{target!r} can't be rematerialized: give a function, or a Linen or NNX module, class or method.")
    argnums = read_positions("static_argnums", static_argnums)
    argnames = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    params = read_positions("params_argnums", params_argnums)
    wrapping = Wrapping(policy=found, prevent_cse=prevent_cse, argnums=argnums, argnames=argnames, params_argnums=params)
    if is_wrapped(target):
        warn(f"{target!r} is rematerialized already: wrapped once more, it is recomputed twice and saves nothing more.")
    for framework in _frameworks():
        wrapped = framework.wrap_module(target, wrapping)
        if wrapped is not None:
            return wrapped
    return remat_function(target, wrapping)


def remat_function(fn: Target, wrapping: Wrapping) -> Target:
    """Wraps a function, see `remat`; modules with state among its arguments are lifted with Flax's own transforms."""
    static = wrapping.static(fn)

    def call(constants: Constants, leaves: list[Any]) -> Any:
        args, kwargs = join_arguments(constants, leaves)
        return fn(*args, **kwargs)

    call.__name__ = call.__qualname__ = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for framework in _frameworks():
            if framework.holds_state((args, kwargs)):
                if hasattr(wrapped, "compact"):  # nn.compact stands above remat, and marked what it got
                    fn.compact = True  # type: ignore[attr-defined]
                return framework.call_with_modules(fn, args, kwargs, wrapping=wrapping, static=static)
        constants, leaves = split_arguments(args, kwargs, static=static, is_node=lambda _: False)
        positions = wrapping.params_argnums
        find_weights = functools.partial(_flags_of_positions, constants, positions) if positions else None
        if constants.are_plain:
            return checkpointed(call, wrapping, num_constants=1, find_weights=find_weights)(constants, leaves)
        return checkpointed(functools.partial(call, constants), wrapping, find_weights=find_weights)(leaves)

    setattr(wrapped, MARK, wrapping.policy)
    # Linen wraps the methods that it finds in a class body, unless they say that this is done; it is done when they are called.
    wrapped.method_handler_wrapped = True  # type: ignore[attr-defined]
    return wrapped  # type: ignore[return-value]


def _flags_of_positions(constants: Constants, positions: tuple[int, ...], leaves: list[Any]) -> list[bool]:
    """Of each traced leaf of a call, whether it belongs to one of the positional arguments in question."""
    args, _ = join_arguments(constants, list(range(len(leaves))))
    if any(not -len(args) <= position < len(args) for position in positions):
        raise ApplyError(
            f"params_argnums={positions}: the call gives {len(args)} positional arguments; give parameters by position."
        )
    inside = {index for position in positions for index in jax.tree.leaves(args[position])}
    return [index in inside for index in range(len(leaves))]


def checkpointed(
    fn: Callable[..., Any], wrapping: Wrapping, *, num_constants: int = 0, find_weights: FindWeights | None = None
) -> Callable[..., Any]:
    """`checkpoint` of a function whose first `num_constants` arguments are no arrays; warns of what can't have been meant."""
    run = checkpoint(fn, wrapping.policy, prevent_cse=wrapping.prevent_cse, num_static=num_constants, find_weights=find_weights)

    def call(*args: Any) -> Any:
        if not wrapping.prevent_cse:
            warn_outside_loops(name_of(fn))
        result = run(*args)
        # JAX keeps the trace of the call above, so that this one traces nothing.
        program = functools.cache(lambda: jax.make_jaxpr(run, static_argnums=tuple(range(num_constants)))(*args))
        if _is_scalar(result):
            _warn_of_whole_loss(program(), fn)
        if not wrapping.is_by_path:
            warn_of_idle_rules(wrapping.policy, program, name_of(fn))
        return result

    return call


def warn(message: str) -> None:
    """Warns of a wrapping that does not do what was probably meant."""
    warnings.warn(message, RematWarning, stacklevel=3)


def is_wrapped(target: Any) -> bool:
    """Whether something went through `remat`, `jax.checkpoint` or the `nn.remat` of a Linen class already."""
    if inspect.isclass(target):
        return hasattr(target, MARK) or target.__name__ in [f"Checkpoint{base.__name__}" for base in target.__mro__[1:2]]
    if not inspect.isroutine(target):
        return is_wrapped(type(target))
    return hasattr(target, MARK) or any(code.co_filename == _CHECKPOINT_FILE for code in _codes(target))


def _codes(fn: Any) -> Iterator[types.CodeType]:
    """The code of a function and of the functions that its decorators, which may hide what they wrap, hold on to."""
    if isinstance(fn, types.FunctionType):
        yield fn.__code__
        held = [cell.cell_contents for cell in fn.__closure__ or () if fn.__code__.co_filename.startswith(_JAX_FOLDER)]
        for each in (*held, getattr(fn, "__wrapped__", None)):
            yield from _codes(each)


def subclass(base: type, **attributes: Any) -> Any:
    """A subclass that goes by the name of its base: Flax derives parameter names from it."""
    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(base.__name__, (base,), exec_body=lambda namespace: namespace.update(names, **attributes))


def num_enclosing_checkpoints() -> int:
    """How many `jax.checkpoint` are being traced around the caller; JAX has no name for it, so the frames are counted."""
    frames = []
    frame = inspect.currentframe()
    while frame is not None:
        frames.append(frame.f_code)
        frame = frame.f_back
    return sum(code.co_filename == _CHECKPOINT_FILE and code.co_name == "fun_remat" for code in frames)


def _frameworks() -> list[Any]:
    """The modules that know Linen and NNX, when there can be an object of theirs."""
    if "flax" not in sys.modules:
        return []
    from remat_kit.apply import linen, nnx

    return [linen, nnx]


def _is_scalar(result: Any) -> bool:
    leaves = jax.tree.leaves(result)
    return bool(leaves) and all(jax.numpy.shape(leaf) == () for leaf in leaves)


def _warn_of_whole_loss(program: Any, fn: Callable[..., Any]) -> None:
    names = [equation.primitive.name for equation in equations_of(program)]
    num_matmuls = sum(name in MATMULS for name in names)
    num_regions = sum(name in ("checkpoint", "remat2") for name in names)
    if num_matmuls and (num_matmuls > _MANY_MATMULS or num_regions > 1 or any(name in _LOOPS for name in names)):
        warn(
            f"{getattr(fn, '__name__', fn)!r} returns a scalar and holds {num_matmuls} matmuls: rematerializing a whole loss "
            "saves no memory, as its backward pass starts by recomputing all of it at once. Wrap the layers instead."
        )
