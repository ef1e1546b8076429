"""remat-kit: choose, check and apply rematerialization policies for JAX and Flax, with the target's own compiler."""

from remat_kit.apply.function import remat
from remat_kit.apply.linen import remat_module
from remat_kit.errors import BudgetError, CompileError, PolicyError, RematKitError, StepError, TargetError
from remat_kit.grammar import parse_plan, parse_policy
from remat_kit.policy import Plan, Policies, Policy, StackPlan
from remat_kit.presets import resolve
from remat_kit.step import Knobs, Stack, Step

__all__ = [
    "BudgetError",
    "CompileError",
    "Knobs",
    "Plan",
    "Policies",
    "Policy",
    "PolicyError",
    "RematKitError",
    "Stack",
    "StackPlan",
    "Step",
    "StepError",
    "TargetError",
    "parse_plan",
    "parse_policy",
    "remat",
    "remat_module",
    "resolve",
]
