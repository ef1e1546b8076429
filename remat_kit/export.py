"""Policies as other programs take them: plain JAX code, and MaxText's `custom` remat settings.

What can't be said there is an error that names the rule; nothing is dropped. Presets are exported by their roles, as the names of
values are the model's own.
"""

from pathlib import Path
from typing import assert_never

from remat_kit.errors import PolicyError
from remat_kit.grammar import parse_plan
from remat_kit.plan_file import SUFFIXES, read_plan
from remat_kit.policy import Action, ByKind, Kind, Named, NoRemat, Policy, Preset, Remat, Rule
from remat_kit.presets import PRESETS, Role, resolve

_MAXTEXT_KEYS = {
    Role.LAYER_INPUT: ("decoder_layer_input",),
    Role.QUERY: ("query_proj",),
    Role.KEY: ("key_proj",),
    Role.VALUE: ("value_proj",),
    Role.ATTENTION_CONTEXT: ("context",),
    Role.ATTENTION_OUT: ("out_proj",),
    Role.MLP_IN: ("mlpwi", "mlpwi_0", "mlpwi_1"),
    Role.MLP_OUT: ("mlpwo",),
}
"""Role -> the tensors that MaxText's `remat_policy: custom` speaks of (its base configuration, read 2026-08)."""

_MAXTEXT_PLACES = {Action.SAVE: "device", Action.OFFLOAD: "offload", Action.RECOMPUTE: "remat"}


def policy_text(text: str) -> str:
    """The text of a policy: what is given, or that in the file that `@FILE` names, a plan file (.toml, .json) or plain text.

    Raises:
        PolicyError: The file can't be read, or is a plan for modules by path.

    Warns:
        RematWarning: A plan file was made with other versions.
    """
    if not text.startswith("@"):
        return text
    if text.endswith(SUFFIXES):
        return str(read_plan(Path(text[1:])).stack_plan)
    try:
        return " ".join(Path(text[1:]).read_text(encoding="utf-8").split())
    except (OSError, ValueError) as error:
        raise PolicyError(f"can't read a policy from {text[1:]!r}: {error}.") from None


def export_policy(text: str, dialect: str) -> str:
    """A policy as `jax` code or as `maxtext` settings.

    Raises:
        PolicyError: The text is no policy, or it says what can't be said there.

    Example:
        >>> print(export_policy("save(q,k)", "jax"))
        jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names('q', 'k'))
    """
    plan = parse_plan(text)
    stack, part = plan.parts[0]
    if len(plan.parts) > 1 or stack is not None or part.is_mixed:
        raise PolicyError(
            f"{text!r} gives layers or stacks different policies: neither JAX nor MaxText can say that of one scan."
        )
    policy = resolve(part.policy, {str(role): (str(role),) for role in Role})
    return as_maxtext(policy) if dialect == "maxtext" else as_jax(policy)


def as_jax(policy: Policy) -> str:
    """Plain JAX code that wraps `block` the same way; inside a real loop, add `prevent_cse=False`.

    Raises:
        PolicyError: JAX has no policy for one of the rules.
    """
    match policy:
        case NoRemat():
            return "block"
        case Preset(name):
            return as_jax(resolve(policy, {str(role): (str(role),) for role in PRESETS[name].roles}))
        case Remat(()):
            return "jax.checkpoint(block)"
        case Remat():
            return f"jax.checkpoint(block, policy={_jax_policy(policy)})"
        case _:
            assert_never(policy)


def as_maxtext(policy: Policy) -> str:
    """MaxText settings, one a line.

    Raises:
        PolicyError: A rule is not by role, or MaxText has no tensor for it.
    """
    if isinstance(policy, NoRemat):
        return "remat_policy: none"
    assert isinstance(policy, Remat)
    lines = {"remat_policy": "custom" if policy.rules else "full"}
    for rule in policy.rules:
        if not isinstance(rule, Named):
            raise PolicyError(f"{rule}: MaxText's custom policy speaks of its tensors only; use names.")
        for name in rule.patterns:
            if name not in tuple(Role):
                raise PolicyError(f"{name!r} is no role, so its MaxText tensor is unknown. Roles: {', '.join(Role)}.")
            lines |= dict.fromkeys(_MAXTEXT_KEYS[Role(name)], _MAXTEXT_PLACES[rule.action])
    if lines.get("decoder_layer_input") == "remat":
        raise PolicyError("MaxText can't recompute layer_input (decoder_layer_input): save or offload it.")
    return "\n".join(f"{key}: {value}" for key, value in lines.items())


def _jax_policy(policy: Remat) -> str:
    places = {name: action for rule in policy.rules if isinstance(rule, Named) for name, action in _actions(rule)}
    kinds = [rule for rule in policy.rules if not isinstance(rule, Named)]
    saved = [name for name, action in places.items() if action is Action.SAVE]
    offloaded = [name for name, action in places.items() if action is Action.OFFLOAD]
    prefix = "jax.checkpoint_policies."
    if offloaded:
        if kinds:
            raise PolicyError(f"{str(policy)!r}: JAX can't join offloading with {kinds[0]}; save those values by name.")
        names = f"names_which_can_be_saved={saved}, names_which_can_be_offloaded={offloaded}"
        return f"{prefix}save_and_offload_only_these_names({names}, offload_src='device', offload_dst='pinned_host')"
    parts = [_jax_kind(rule) for rule in kinds]
    if saved or not parts:
        parts.append(f"{prefix}save_only_these_names({', '.join(map(repr, saved))})")
    joined = parts[0]
    for part in parts[1:]:
        joined = f"{prefix}save_from_both_policies({joined}, {part})"
    return joined


def _actions(rule: Named) -> list[tuple[str, Action]]:
    for pattern in rule.patterns:
        if "*" in pattern:
            raise PolicyError(f"{rule}: JAX knows names, not patterns; write the names that {pattern!r} stands for.")
    return [(pattern, rule.action) for pattern in rule.patterns]


def _jax_kind(rule: Rule) -> str:
    match rule:
        case ByKind(Kind.DOTS):
            return "jax.checkpoint_policies.dots_saveable"
        case ByKind(Kind.DOTS_NO_BATCH):
            return "jax.checkpoint_policies.dots_with_no_batch_dims_saveable"
        case _:
            raise PolicyError(f"{rule}: JAX has no such policy; only remat_kit.remat applies it.")
