"""Rematerialization of Flax Linen modules: `remat_module`."""

from typing import TypeVar

from flax import linen as nn

from remat_kit.apply.function import rules_of
from remat_kit.apply.lowering import lower_policy
from remat_kit.policy import Policy, StackPlan

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


def remat_module(
    module_class: ModuleClass,
    policy: Policy | StackPlan | str,
    *,
    prevent_cse: bool = True,
    static_argnums: tuple[int, ...] = (),
) -> ModuleClass:
    """Makes a Linen module class recompute, in its backward pass, what the policy does not keep.

    Args:
        module_class: A subclass of `flax.linen.Module`.
        policy: See `remat_kit.remat`.
        prevent_cse: False inside `nn.scan` (not unrolled, more than one layer).
        static_argnums: Positions of arguments of `__call__` (0 = self) that are not arrays.

    Returns:
        A class with the same parameters; `module_class` itself for `none`. Give instances an explicit `name`, else Flax derives
        another one from the wrapped class and the parameter tree changes.
    """
    found = rules_of(policy)
    if found is None:
        return module_class
    return nn.remat(module_class, policy=lower_policy(found), prevent_cse=prevent_cse, static_argnums=static_argnums)  # type: ignore[return-value]
