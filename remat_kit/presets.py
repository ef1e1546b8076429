"""The field's named policies, as lists of roles.

A preset says what is kept in terms of the roles that values play in a transformer block (`query`, `mlp_in`, …), not of names: a
model declares which of its names play each role, and `resolve` makes rules of them. So a preset can't go stale when a name
changes: a role without a name is an error, unless the model declares that it has no such part.

Sources: the remat policies of MaxText (`remat_policy` in its base configuration, read 2026-08) and `jax.checkpoint_policies`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from remat_kit.errors import PolicyError, nearest
from remat_kit.plans import Segment, StackPlan
from remat_kit.policy import Action, ByKind, Kind, Named, Policy, Preset, Remat


class Role(StrEnum):
    """What a named value is in a transformer block."""

    LAYER_INPUT = "layer_input"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_CONTEXT = "attention_context"
    ATTENTION_OUT = "attention_out"
    MLP_IN = "mlp_in"
    MLP_OUT = "mlp_out"


Roles = Mapping[str, tuple[str, ...]]
"""Role -> the model's names that play it; an empty tuple declares that the model has no such part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetRow:
    """A named policy.

    Attributes:
        action: What happens to the values of the roles.
        roles: Roles of the values that are kept.
        kinds: Kinds of operations whose outputs are kept besides.
        summary: What it keeps, in a few words.
        source: Where the name comes from.
    """

    action: Action = Action.SAVE
    roles: tuple[Role, ...] = ()
    kinds: tuple[Kind, ...] = ()
    summary: str
    source: str


_QKV = (Role.QUERY, Role.KEY, Role.VALUE)
_MAXTEXT = "MaxText, same name"


def _maxtext(name: str, roles: tuple[Role, ...], summary: str, action: Action = Action.SAVE) -> tuple[str, PresetRow]:
    return name, PresetRow(action=action, roles=roles, summary=summary, source=_MAXTEXT)


PRESETS: Mapping[str, PresetRow] = dict(
    [
        _maxtext("minimal", (*_QKV, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT), "every projection, not the attention itself"),
        _maxtext(
            "minimal_with_context",
            (*_QKV, Role.ATTENTION_CONTEXT, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT),
            "every projection and the attention",
        ),
        _maxtext("save_dot_except_mlp", (*_QKV, Role.ATTENTION_OUT), "the projections of attention"),
        _maxtext(
            "save_dot_with_context_except_mlp",
            (*_QKV, Role.ATTENTION_CONTEXT, Role.ATTENTION_OUT),
            "the projections of attention and the attention",
        ),
        _maxtext("save_dot_except_mlpwi", (*_QKV, Role.ATTENTION_OUT, Role.MLP_OUT), "every projection but the MLP's first"),
        _maxtext("save_qkv_proj", _QKV, "query, key and value"),
        _maxtext("save_out_proj", (Role.ATTENTION_OUT,), "the output projection of attention"),
        _maxtext(
            "minimal_offloaded",
            (*_QKV, Role.ATTENTION_OUT, Role.MLP_IN, Role.MLP_OUT),
            "every projection, in host memory",
            Action.OFFLOAD,
        ),
        _maxtext("qkv_proj_offloaded", _QKV, "query, key and value, in host memory", Action.OFFLOAD),
    ]
)
"""Preset name -> its row. `none` and `full` are words of the grammar, not rows."""


def resolve(policy: Policy, roles: Roles) -> Policy:
    """Turns a preset into rules over a model's names; other policies pass through.

    Args:
        policy: Any policy.
        roles: The model's role table.

    Returns:
        A policy without presets.

    Raises:
        PolicyError: The preset is unknown, or one of its roles has no name and is not declared absent.
    """
    if not isinstance(policy, Preset):
        return policy
    row = PRESETS.get(policy.name)
    if row is None:
        raise PolicyError(f"unknown preset {policy.name!r}.{nearest(policy.name, PRESETS)} See: remat-kit policies")
    missing = [str(role) for role in row.roles if role not in roles]
    if missing:
        raise PolicyError(
            f"preset {policy.name!r} keeps the role {', '.join(missing)}, for which the step has no names; it has them for "
            f"{', '.join(sorted(roles)) or 'no role at all'}. In its Stack, add roles={{{missing[0]!r}: ('its_name',)}}, or () "
            "if the model has no such part."
        )
    names = tuple(dict.fromkeys(name for role in row.roles for name in roles[role]))
    kinds = tuple(ByKind(kind) for kind in row.kinds)
    return Remat((*kinds, Named(row.action, names)) if names else kinds)


def resolve_stack(plan: StackPlan, roles: Roles) -> StackPlan:
    """Resolves the presets of one stack's segments, see `resolve`."""
    return StackPlan(tuple(Segment(resolve(segment.policy, roles), segment.num_layers) for segment in plan.segments))
