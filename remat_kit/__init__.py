"""remat-kit: choose, check and apply rematerialization policies for JAX and Flax, with the target's own compiler.

Names are imported when first used, so that asking for a policy's text or the command line's help does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat_kit.apply.function import remat
    from remat_kit.apply.linen_stack import stack_module
    from remat_kit.apply.nnx_stack import NnxStack
    from remat_kit.apply.paths import rematerialize
    from remat_kit.apply.stack import stack
    from remat_kit.errors import (
        ApplyError,
        BudgetError,
        CompileError,
        IdleRuleWarning,
        PolicyError,
        RematKitError,
        RematWarning,
        StepError,
        TargetError,
    )
    from remat_kit.grammar import parse_plan, parse_policy
    from remat_kit.plans import Plan, Policies, StackPlan
    from remat_kit.policy import Policy
    from remat_kit.presets import resolve
    from remat_kit.step import Alternative, Knobs, Stack, Step
    from remat_kit.trace.residuals import residual_report, residuals
    from remat_kit.verbs.compare import compare
    from remat_kit.verbs.explain import explain, load_explanation
    from remat_kit.verbs.load_plan import load_plan
    from remat_kit.verbs.parity import check_parity
    from remat_kit.verbs.plan.frontier import plan_frontier
    from remat_kit.verbs.plan.largest import plan_largest
    from remat_kit.verbs.plan.planned import plan, plan_targets
    from remat_kit.verbs.plan.settings import PlanSettings

_MODULES = {
    "Alternative": "step",
    "ApplyError": "errors",
    "BudgetError": "errors",
    "CompileError": "errors",
    "IdleRuleWarning": "errors",
    "Knobs": "step",
    "NnxStack": "apply.nnx_stack",
    "Plan": "plans",
    "PlanSettings": "verbs.plan.settings",
    "Policies": "plans",
    "Policy": "policy",
    "PolicyError": "errors",
    "RematKitError": "errors",
    "RematWarning": "errors",
    "Stack": "step",
    "StackPlan": "plans",
    "Step": "step",
    "StepError": "errors",
    "TargetError": "errors",
    "check_parity": "verbs.parity",
    "compare": "verbs.compare",
    "explain": "verbs.explain",
    "load_explanation": "verbs.explain",
    "load_plan": "verbs.load_plan",
    "parse_plan": "grammar",
    "parse_policy": "grammar",
    "plan": "verbs.plan.planned",
    "plan_frontier": "verbs.plan.frontier",
    "plan_largest": "verbs.plan.largest",
    "plan_targets": "verbs.plan.planned",
    "remat": "apply.function",
    "rematerialize": "apply.paths",
    "residual_report": "trace.residuals",
    "residuals": "trace.residuals",
    "resolve": "presets",
    "stack": "apply.stack",
    "stack_module": "apply.linen_stack",
}

__all__ = [
    "Alternative",
    "ApplyError",
    "BudgetError",
    "CompileError",
    "IdleRuleWarning",
    "Knobs",
    "NnxStack",
    "Plan",
    "PlanSettings",
    "Policies",
    "Policy",
    "PolicyError",
    "RematKitError",
    "RematWarning",
    "Stack",
    "StackPlan",
    "Step",
    "StepError",
    "TargetError",
    "check_parity",
    "compare",
    "explain",
    "load_explanation",
    "load_plan",
    "parse_plan",
    "parse_policy",
    "plan",
    "plan_frontier",
    "plan_largest",
    "plan_targets",
    "remat",
    "rematerialize",
    "residual_report",
    "residuals",
    "resolve",
    "stack",
    "stack_module",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'remat_kit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"remat_kit.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
