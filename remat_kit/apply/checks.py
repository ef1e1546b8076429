"""What a policy means to do and can't, seen when the code that it is applied to is traced.

In: a policy and the program of one rematerialized region. Out: an `IdleRuleWarning` for each name that nothing has and for each
rule whose values the backward pass never reads; a `RematWarning` for rules that this version of jaxlib gets wrong. Names inside
the rules of a custom_vjp are not in the program: where there is one, no name is called missing.
"""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax

from remat_kit import _jax
from remat_kit.apply.jaxprs import equations_of, variables
from remat_kit.errors import IdleRuleWarning, RematWarning, nearest
from remat_kit.policy import Action, Named, Policy, Remat, matches

_LOOPS = tuple(inspect.unwrap(loop).__code__ for loop in (jax.lax.scan, jax.lax.while_loop, jax.lax.fori_loop))
_FLAX_LOOPS = "flax.core.axes_scan"

# What hands a value on, or adds it to another, without a need of the value itself in the backward pass.
_LINEAR = frozenset(
    "name add add_any sub neg convert_element_type reshape transpose squeeze broadcast_in_dim copy reduce_precision "
    "sharding_constraint reshard".split()
)


def warn_of_idle_rules(policy: Remat, program: Callable[[], Any], what: str) -> None:
    """Warns of the rules by name that keep nothing.

    Args:
        policy: What the region is meant to keep.
        program: Gives the traced program: the region, or one that holds it.
        what: What the user calls the region's code.

    Warns:
        IdleRuleWarning: A name that no value has, or a rule whose values are only returned.
    """
    rules = [rule for rule in policy.rules if isinstance(rule, Named) and rule.action is not Action.RECOMPUTE]
    if not rules:
        return
    region = _region(_jax.open_jaxpr(program())[0])
    names = _names(region)
    may_hide_names = any(equation.primitive.name.startswith("custom_vjp_call") for equation in equations_of(region))
    for rule in rules:
        unmet = [pattern for pattern in rule.patterns if not any(matches(pattern, name) for name in names)]
        if unmet and may_hide_names:
            continue
        for pattern in unmet:
            _warn_at(f"{rule} for {what}: {_unmet_words(pattern, names)}")
        kept = [name for name in names if any(matches(pattern, name) for pattern in rule.patterns)]
        if kept and not unmet and _are_only_returned(region, kept):
            _warn_at(
                f"{rule} for {what}: {', '.join(kept)} is never saved, as it is only returned. What a region returns is kept as "
                "the input of the next one, if at all: name that input (in a stack, block_input)."
            )


def _unmet_words(pattern: str, names: list[str]) -> str:
    listing = ", ".join(names) or "none; name values with jax.ad_checkpoint.checkpoint_name"
    return f"no value is named {pattern!r}, so it keeps nothing. Names there: {listing}.{nearest(pattern, names)}"


def name_of(fn: Callable[..., Any]) -> str:
    """What the user calls some code; modules are wrapped in functions of ours."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", type(fn).__name__)
    return "the module" if name == "pure" else repr(name)


def warn_of_known_faults(policy: Remat) -> None:
    """Warns of rules that this version of jaxlib gets wrong on the devices that JAX has here; opens them.

    Warns:
        RematWarning: Something is offloaded on a GPU, and jaxlib reads it back in the wrong order.
    """
    if _jax.GPU_OFFLOAD_FAULT is None or not offloads(policy) or _jax.GPU_OFFLOAD_PASS in os.environ.get("XLA_FLAGS", ""):
        return
    if jax.default_backend() == "gpu":
        _warn_at(f"{policy}: {_jax.GPU_OFFLOAD_FAULT}", RematWarning)


def warn_outside_loops(what: str) -> None:
    """Warns where code without a barrier is traced neither in a loop nor in one that stays one (told by frames: JAX has no name).

    Args:
        what: What the user calls the code.

    Warns:
        RematWarning: The compiler will merge its recomputation with the forward pass.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in _LOOPS:
        if frame.f_globals.get("__name__") == _FLAX_LOOPS:
            return  # it traces a body once by itself before its loop does
        frame = frame.f_back
    if frame is None or frame.f_locals.get("unroll", 1) not in (1, False):
        _warn_at(
            f"{what} has prevent_cse=False and is not the body of a loop, or of an unrolled one: the compiler merges its "
            "recomputation with the forward pass, which undoes it. Leave prevent_cse out.",
            RematWarning,
        )


def offloads(policy: Policy) -> bool:
    """Whether a policy moves values to host memory."""
    rules = policy.rules if isinstance(policy, Remat) else ()
    return any(isinstance(rule, Named) and rule.action is Action.OFFLOAD for rule in rules)


def _region(program: Any) -> Any:
    """The program of the first `jax.checkpoint` within, or the program itself."""
    for equation in program.eqns:
        if "prevent_cse" in _jax.parameters(equation):
            return _jax.open_jaxpr(_jax.inner_programs(equation)[0])[0]
    return program


def _names(program: Any) -> list[str]:
    found = (_jax.checkpoint_name_of(equation) for equation in equations_of(program))
    return list(dict.fromkeys(name for name in found if name is not None))


def _are_only_returned(program: Any, names: Iterable[str]) -> bool:
    """Whether nothing but linear operations, which need no operand in the backward pass, leads from named values to results."""
    outside = dict.fromkeys(names, 0)
    waiting = []
    for equation in equations_of(program):
        if (name := _jax.checkpoint_name_of(equation)) in outside:
            outside[name] += 1
    for equation in program.eqns:
        if (name := _jax.checkpoint_name_of(equation)) in outside:
            outside[name] -= 1
            waiting += equation.outvars
    if any(outside.values()):
        return False  # some are inside loops and calls
    while waiting:
        variable = waiting.pop()
        for equation in program.eqns:
            if variable in variables(equation.invars):
                if equation.primitive.name not in _LINEAR and _jax.checkpoint_name_of(equation) is None:
                    return False
                waiting += equation.outvars
    return True


def _warn_at(message: str, category: type[RematWarning] = IdleRuleWarning) -> None:
    warnings.warn(message, category, stacklevel=5)
