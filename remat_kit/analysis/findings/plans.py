"""Plans with a part changed, as texts: what remedies propose.

In: the text of a plan. Out: the text of another one, or None where the change does not make sense.
"""

from dataclasses import replace

from remat_kit.grammar import parse_plan
from remat_kit.plans import Plan, Segment, StackPlan
from remat_kit.policy import NONE, Action, Named, NoRemat, Policy, Remat, Rule, matches


def without_offload(text: str) -> str | None:
    """The plan with what it offloads recomputed instead; None = it offloads nothing that it spells out."""
    plan = parse_plan(text)
    changed = replace(plan, parts=tuple((name, _map_segments(part)) for name, part in plan.parts))
    return None if changed == plan else str(changed)


def _map_segments(part: StackPlan) -> StackPlan:
    return StackPlan(tuple(Segment(_keep_on_device(segment.policy), segment.num_layers) for segment in part.segments))


def _keep_on_device(policy: Policy) -> Policy:
    if not isinstance(policy, Remat):
        return policy
    return Remat(tuple(rule for rule in policy.rules if not (isinstance(rule, Named) and rule.action is Action.OFFLOAD)))


def without_names(text: str, names: tuple[str, ...]) -> str | None:
    """The plan with some names recomputed; None = it is mixed, or not made of rules.

    Example:
        >>> without_names("save(q,k)", ("k",)), without_names("dots", ("k",)), without_names("minimal", ("k",))
        ('save(q)', 'dots+recompute(k)', None)
    """
    policy = _only_policy(parse_plan(text))
    if not isinstance(policy, Remat) or not policy.rules or not names:
        return None
    rules = [left for rule in policy.rules if (left := _without(rule, names)) is not None]
    still_kept = any(not isinstance(rule, Named) or any(matches(p, n) for p in rule.patterns for n in names) for rule in rules)
    return str(Remat((*rules, Named(Action.RECOMPUTE, names)) if still_kept else tuple(rules)))


def _without(rule: Rule, names: tuple[str, ...]) -> Rule | None:
    if not isinstance(rule, Named):
        return rule
    patterns = tuple(pattern for pattern in rule.patterns if pattern not in names)
    return replace(rule, patterns=patterns) if patterns else None


def last_layer_kept(text: str, num_layers: int) -> str | None:
    """The plan with the last layer not rematerialized; None = it is mixed, or nothing is rematerialized."""
    policy = _only_policy(parse_plan(text))
    if policy is None or isinstance(policy, NoRemat) or num_layers < 2:
        return None
    return str(StackPlan((Segment(policy, num_layers - 1), Segment(NONE, 1))))


def _only_policy(plan: Plan) -> Policy | None:
    return plan.policies[0] if len(plan.parts) == 1 and len(plan.policies) == 1 else None
