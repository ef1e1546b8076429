"""Rematerialization of functions: `remat`."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, assert_never

import jax

from remat_kit.apply.lowering import lower_policy
from remat_kit.errors import PolicyError
from remat_kit.grammar import parse_policy
from remat_kit.policy import NoRemat, Policy, Preset, Remat, StackPlan

Params = ParamSpec("Params")
Result = TypeVar("Result")


def as_policy(policy: Policy | StackPlan | str) -> Policy:
    """Reads whatever a caller may give as one policy: a record, a uniform plan of a stack, or a text."""
    if isinstance(policy, str):
        return parse_policy(policy)
    return policy.policy if isinstance(policy, StackPlan) else policy


def rules_of(policy: Policy | StackPlan | str) -> Remat | None:
    """The rules to apply, None for no rematerialization.

    Raises:
        PolicyError: The policy is mixed, or a preset, which only a model's roles turn into rules.
    """
    single = as_policy(policy)
    match single:
        case NoRemat():
            return None
        case Remat():
            return single
        case Preset(name):
            raise PolicyError(f"preset {name!r} names roles, not values: turn it into rules with remat_kit.resolve(policy, roles).")
        case _:
            assert_never(single)


def remat(
    fn: Callable[Params, Result],
    policy: Policy | StackPlan | str,
    *,
    prevent_cse: bool = True,
    static_argnums: tuple[int, ...] = (),
) -> Callable[Params, Result]:
    """Makes a function recompute, in its backward pass, what the policy does not keep.

    Args:
        fn: A pure function of arrays.
        policy: What to keep: a `Policy`, a uniform `StackPlan`, or a text like `"save(q,k,v)"`.
        prevent_cse: False only for the body of a real loop (not unrolled, more than one iteration): elsewhere the compiler
            merges the recomputation with the forward pass and undoes it.
        static_argnums: Positions of arguments that are not arrays.

    Returns:
        A function with the same signature, results and gradients; `fn` itself for `none`.

    Raises:
        PolicyError: The policy is mixed or an unresolved preset.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> block = remat(lambda x: jnp.sin(jnp.sin(x)), "full")
        >>> float(jax.grad(block)(0.0))
        1.0
    """
    found = rules_of(policy)
    if found is None:
        return fn
    return jax.checkpoint(fn, policy=lower_policy(found), prevent_cse=prevent_cse, static_argnums=static_argnums)
