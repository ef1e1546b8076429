"""Plans fitted to stacks, presets resolved by roles, budgets read: everything before JAX."""

import pytest

from remat_kit.budget import Budget, parse_budget, parse_fraction
from remat_kit.errors import BudgetError, PolicyError
from remat_kit.grammar import parse_plan, parse_policy
from remat_kit.plans import NO_REMAT, StackPlan, bind
from remat_kit.policy import NONE, Action, Named, Preset, Remat, overruled, patterns
from remat_kit.presets import PRESETS, Role, resolve
from remat_kit.units import format_bytes, parse_bytes

ROLES = {
    Role.QUERY: ("q",),
    Role.KEY: ("k",),
    Role.VALUE: ("v",),
    Role.ATTENTION_CONTEXT: ("attn",),
    Role.ATTENTION_OUT: ("attn_out",),
    Role.MLP_IN: ("gate", "up"),
    Role.MLP_OUT: ("down",),
}

# Written by hand from the public descriptions of these policies.
EXPECTED = {
    "minimal": ("save", "q k v attn_out gate up down"),
    "minimal_with_context": ("save", "q k v attn attn_out gate up down"),
    "save_dot_except_mlp": ("save", "q k v attn_out"),
    "save_dot_with_context_except_mlp": ("save", "q k v attn attn_out"),
    "save_dot_except_mlpwi": ("save", "q k v attn_out down"),
    "save_qkv_proj": ("save", "q k v"),
    "save_out_proj": ("save", "attn_out"),
    "minimal_offloaded": ("offload", "q k v attn_out gate up down"),
    "qkv_proj_offloaded": ("offload", "q k v"),
}


def test_presets_keep_what_their_sources_say():
    assert {name: resolve(Preset(name), ROLES) for name in PRESETS} == {
        name: Remat((Named(Action(action), tuple(names.split())),)) for name, (action, names) in EXPECTED.items()
    }


def test_preset_needs_every_role_or_its_declared_absence():
    partial = {role: names for role, names in ROLES.items() if role != Role.ATTENTION_OUT}
    with pytest.raises(PolicyError, match=r"keeps the role attention_out.*In its Stack, add roles="):
        resolve(Preset("save_out_proj"), partial)
    assert resolve(Preset("save_out_proj"), {**partial, Role.ATTENTION_OUT: ()}) == Remat(())


def test_unknown_preset_names_the_near_miss():
    with pytest.raises(PolicyError, match="Did you mean 'minimal'"):
        resolve(Preset("minimall"), ROLES)


def fitted(text, **stacks):
    return {name: str(plan) for name, plan in bind(parse_plan(text), stacks).by_stack}


def test_plan_fits_stacks():
    assert fitted("full", layers=12) == {"layers": "full*12"}
    assert fitted("full*8 | none", layers=12) == {"layers": "full*8 | none*4"}
    assert fitted("dots", encoder=4, decoder=2) == {"encoder": "dots*4", "decoder": "dots*2"}
    assert fitted("decoder=none; encoder=full*1|dots*3", encoder=4, decoder=2) == {
        "encoder": "full*1 | dots*3",
        "decoder": "none*2",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full*3", "speaks of 3 layers, the stack has 12"),
        ("full*12 | none", "speaks of 13 layers or more, the stack has 12"),
        ("layer=full", "Did you mean 'layers'"),
    ],
)
def test_plan_that_does_not_fit(text, message):
    with pytest.raises(PolicyError, match=message):
        bind(parse_plan(text), {"layers": 12})


def test_stack_without_a_part():
    with pytest.raises(PolicyError, match="no part for stack 'decoder'"):
        bind(parse_plan("encoder=full"), {"encoder": 2, "decoder": 2})


def test_policies_by_stack():
    policies = bind(parse_plan("full*8 | dots*4"), {"layers": 12})
    assert policies["layers"].is_mixed
    with pytest.raises(PolicyError, match="mixes policies"):
        _ = policies["layers"].policy
    with pytest.raises(PolicyError, match="Did you mean 'layers'"):
        _ = policies["layer"]
    assert NO_REMAT["anything"].policy == NONE
    assert not StackPlan(bind(parse_plan("full*8 | full*4"), {"layers": 12})["layers"].segments).is_mixed


def test_patterns_are_what_the_user_wrote():
    assert patterns(parse_plan("save(q,k)+dots+save(k,up*)").policies[0]) == ("q", "k", "up*")


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("save(q,k)+recompute(q)", []),
        ("save(q)+recompute(q)", [("save(q)", "recompute(q)")]),
        ("recompute(up)+save(q,u*)", [("recompute(up)", "save(q,u*)")]),
        ("save(u*)+recompute(up)", []),
        ("offload(*)+save(q)", []),
        ("dots+dots_no_batch", []),
        ("weights+dots_no_batch+dots", [("dots_no_batch", "dots")]),
        ("smaller(1MiB)+cheap(8)+smaller(2MiB)", [("smaller(1MiB)", "smaller(2MiB)")]),
        ("cheap(8)+cheap(4)", []),
    ],
)
def test_rules_without_effect(text, pairs):
    assert [(str(rule), str(later)) for rule, later in overruled(parse_policy(text))] == pairs


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("16GiB", 2**34), ("16g", 2**34), ("16GB", 16 * 10**9), ("1.5KiB", 1536), ("7", 7), ("3 MiB", 3 * 2**20)],
)
def test_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["12XB", "-1", "", "GiB", "1e9x", "nan", "1GiBB"])
def test_not_bytes(text):
    with pytest.raises(BudgetError, match="not an amount of memory"):
        parse_bytes(text)


def test_format_bytes_carries_over_at_each_unit():
    assert [format_bytes(value) for value in (0, 1023, 1024, 2**40, 3 * 2**50)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.00 TiB",
        "3,072.00 TiB",
    ]


def test_budgets():
    assert parse_budget(None) == Budget()
    assert parse_budget("50%") == Budget(fraction=0.5)
    assert parse_budget(1024) == Budget(memory_bytes=1024)
    for text in ("0", "0%", "101%", "x%", "-5%", "12XB"):
        with pytest.raises(BudgetError):
            parse_budget(text)
    assert parse_fraction("0.9") == parse_fraction("90%") == 0.9
