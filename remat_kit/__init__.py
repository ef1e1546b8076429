"""remat-kit: choose, check and apply rematerialization policies for JAX and Flax, with the target's own compiler.

Names are imported when first used, so that asking for a policy's text or the command line's help does not wait for JAX.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remat_kit.apply.function import remat
    from remat_kit.apply.paths import rematerialize
    from remat_kit.apply.stack import stack
    from remat_kit.errors import (
        ApplyError,
        BudgetError,
        CompileError,
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
    from remat_kit.step import Knobs, Stack, Step
    from remat_kit.trace.residuals import residual_report, residuals
    from remat_kit.verbs.compare import compare

_MODULES = {
    "ApplyError": "errors",
    "BudgetError": "errors",
    "CompileError": "errors",
    "Knobs": "step",
    "Plan": "plans",
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
    "compare": "verbs.compare",
    "parse_plan": "grammar",
    "parse_policy": "grammar",
    "remat": "apply.function",
    "rematerialize": "apply.paths",
    "residual_report": "trace.residuals",
    "residuals": "trace.residuals",
    "resolve": "presets",
    "stack": "apply.stack",
}

__all__ = [
    "ApplyError",
    "BudgetError",
    "CompileError",
    "Knobs",
    "Plan",
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
    "compare",
    "parse_plan",
    "parse_policy",
    "remat",
    "rematerialize",
    "residual_report",
    "residuals",
    "resolve",
    "stack",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'remat_kit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"remat_kit.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
