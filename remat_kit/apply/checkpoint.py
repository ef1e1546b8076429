"""The one place that calls `jax.checkpoint`: a policy onto a pure function, whatever this version of JAX honours.

Classic rematerialization asks a policy about every operation. The coming implementation (`jax_remat3`) does not: 0.10 takes any
callable for "save nothing", 0.12 asks about names and `dot_general` only, and both lose names inside a `custom_vjp`. Saving less
without a word is the worst answer, so what can't be expressed there is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from remat_kit import _jax
from remat_kit.apply.checks import warn_of_known_faults
from remat_kit.apply.jaxprs import equations_of
from remat_kit.apply.lowering import lower_policy
from remat_kit.apply.weights import WEIGHTS_NAME, name_weight_matmuls
from remat_kit.errors import PolicyError
from remat_kit.policy import Action, ByKind, Kind, Named, Remat, Rule, matches

FindWeights = Callable[..., Sequence[bool]]
"""Given a function's arguments, says of each of their leaves whether it is a parameter."""

_CUSTOM_VJP = ("custom_vjp_call", "custom_vjp_call_jaxpr")


def checkpoint(
    fn: Callable[..., Any],
    policy: Remat,
    *,
    prevent_cse: bool,
    num_static: int = 0,
    find_weights: FindWeights | None = None,
) -> Callable[..., Any]:
    """`jax.checkpoint` under a policy.

    Args:
        fn: A function of pytrees of arrays, after its static arguments.
        policy: What to keep.
        prevent_cse: See `remat_kit.remat`.
        num_static: Leading arguments that are hashable values.
        find_weights: Which leaves of the other arguments are parameters; the rule `weights` asks.

    Raises:
        PolicyError: The rule `weights` does not know the parameters, or, when called, jax_remat3 is on and can't express a rule.

    Warns:
        RematWarning: This version of jaxlib is known to get a rule wrong on the devices that JAX has here.
    """
    warn_of_known_faults(policy)
    named = _with_named_weights(fn, policy, num_static, find_weights)
    static = tuple(range(num_static))
    if not _jax.remat3_is_on():
        return jax.checkpoint(named, policy=lower_policy(policy), prevent_cse=prevent_cse, static_argnums=static)

    def run(*args: Any) -> Any:
        # Traced once, as random counters of modules count traces.
        closed, shapes = jax.make_jaxpr(named, static_argnums=static, return_shape=True)(*args)
        chosen = _lower_for_remat3(policy, closed)
        results = jax.checkpoint(jaxpr_as_fun(closed), policy=chosen, prevent_cse=prevent_cse)(
            *jax.tree.leaves(args[num_static:])
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


def _with_named_weights(
    fn: Callable[..., Any], policy: Remat, num_static: int, find_weights: FindWeights | None
) -> Callable[..., Any]:
    if ByKind(Kind.WEIGHTS) not in policy.rules:
        return fn
    if find_weights is None:
        raise PolicyError(
            f"{str(policy)!r}: the rule weights has to know which arguments are parameters: remat(f, policy, params_argnums=0). "
            "Linen and NNX modules and stacks know theirs."
        )
    return name_weight_matmuls(fn, num_static=num_static, find_weights=find_weights)


def _lower_for_remat3(policy: Remat, program: Any) -> Any:
    """The policy as jax_remat3 takes it.

    Args:
        policy: What to keep.
        program: The traced function.

    Raises:
        PolicyError: It can't be expressed.
    """
    rules = tuple(Named(Action.SAVE, (WEIGHTS_NAME,)) if rule == ByKind(Kind.WEIGHTS) else rule for rule in policy.rules)
    names, has_custom_vjp = _names(program)
    for rule in _check_remat3(rules):
        lost = [pattern for pattern in rule.patterns if not any(matches(pattern, name) for name in names)]
        if lost and has_custom_vjp and rule.action is not Action.RECOMPUTE:
            raise _inexpressible(rule, f"names inside a custom_vjp are lost there, and {lost[0]!r} is nowhere else")
    if not rules:
        return None
    if _jax.REMAT3_ASKS_POLICIES:
        return lower_policy(Remat(rules))
    return jax.checkpoint_policies.save_only_these_names(*(name for name in names if _is_saved(name, rules)))


def _check_remat3(rules: Sequence[Rule]) -> list[Named]:
    checked = []
    for rule in rules:
        if not isinstance(rule, Named):
            raise _inexpressible(rule, "it is not asked about operations, only about names")
        if rule.action is Action.OFFLOAD and not _jax.REMAT3_ASKS_POLICIES:
            raise _inexpressible(rule, "this version of JAX ignores offloading there")
        checked.append(rule)
    return checked


def _inexpressible(rule: Rule, why: str) -> PolicyError:
    return PolicyError(f"the rule {rule} can't be expressed with jax_remat3: {why}. Unset JAX_REMAT3, or save by other names.")


def _is_saved(name: str, rules: Sequence[Rule]) -> bool:
    hits = [rule.action for rule in rules if isinstance(rule, Named) and any(matches(pattern, name) for pattern in rule.patterns)]
    return bool(hits) and hits[-1] is Action.SAVE


def _names(program: Any) -> tuple[list[str], bool]:
    equations = list(equations_of(program, opaque=_CUSTOM_VJP))
    found = [_jax.checkpoint_name_of(equation) for equation in equations]
    has_custom_vjp = any("vjp" in equation.primitive.name for equation in equations)
    return list(dict.fromkeys(name for name in found if name is not None)), has_custom_vjp
