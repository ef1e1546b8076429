"""The text of policies: round trips, exact records, and messages that name the word and its near miss."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_kit.errors import PolicyError
from remat_kit.grammar import parse_plan, parse_policy
from remat_kit.plans import Plan, Segment, StackPlan
from remat_kit.policy import FULL, NONE, Action, ByKind, Cheap, Kind, Named, Preset, Remat, Smaller, matches
from remat_kit.presets import PRESETS


def one(policy, count=None):
    return Plan(((None, StackPlan((Segment(policy, count),))),))


SAVE_QK = Named(Action.SAVE, ("q", "k"))

EXACT = [
    ("none", one(NONE)),
    ("full", one(FULL)),
    ("minimal", one(Preset("minimal"))),
    (" save ( q , k ) ", one(Remat((SAVE_QK,)))),
    ("save(q,k)+dots", one(Remat((SAVE_QK, ByKind(Kind.DOTS))))),
    ("save(q,k)+dots*3", one(Remat((SAVE_QK, ByKind(Kind.DOTS))), 3)),
    ("dots_no_batch*12", one(Remat((ByKind(Kind.DOTS_NO_BATCH),)), 12)),
    ("offload(layers/*/q)*2", one(Remat((Named(Action.OFFLOAD, ("layers/*/q",)),)), 2)),
    ('save("a b","c,d")', one(Remat((Named(Action.SAVE, ("a b", "c,d")),)))),
    ("smaller(1MiB)+cheap(8)", one(Remat((Smaller(2**20), Cheap(8))))),
    ("full*24 | save(q,k)*8", Plan(((None, StackPlan((Segment(FULL, 24), Segment(Remat((SAVE_QK,)), 8)))),))),
    ("a=none;b = full*2|none", Plan((("a", StackPlan((Segment(NONE),))), ("b", StackPlan((Segment(FULL, 2), Segment(NONE))))))),
]


@pytest.mark.parametrize(("text", "plan"), EXACT, ids=[text for text, _ in EXACT])
def test_text_means_exactly_this(text, plan):
    assert parse_plan(text) == plan
    assert parse_plan(str(plan)) == plan


WRONG = [
    ("ful", "unknown policy 'ful'.*Did you mean 'full'"),
    ("minimal_flsh", "Did you mean 'minimal"),
    ("sav(q)", r"unknown rule sav\(…\).*Did you mean 'save\('"),
    ("", "expected a policy, found the end"),
    ("save(", "expected a name in save"),
    ("save()", "expected a name in save"),
    ("save(q", r"expected ',' or '\)'"),
    ("full+save(q)", "'full' stands alone"),
    ("none+dots", "'none' stands alone"),
    ("minimal+dots", "'minimal' stands alone"),
    ("full*", "expected a number of layers"),
    ("full*0", "at least 1 layer"),
    ("full*-1", "at least 1 layer"),
    ("full full", "expected '\\+'"),
    ("full*2*3", "expected '\\+'"),
    ("full | none", "only one segment may be without a count"),
    ("a=full; a=none", "each stack once"),
    ("a=full; none", "each stack once"),
    ("smaller(x)", "not an amount of memory"),
    ("smaller(0)", "above 0"),
    ("smaller(1MiB,2MiB)", "takes one number"),
    ("cheap(1.5)", "whole number"),
    ("cheap(0)", "above 0"),
    ("save(q,k)+offload(q)", r"save\(q,k\) and offload\(q\) both speak of 'q'.*take it out of one"),
    ("dots+offload(q)+save(*)", "both speak of 'q'"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_text_is_explained(text, message):
    with pytest.raises(PolicyError, match=message):
        parse_plan(text)


@pytest.mark.parametrize("text", ["full*3", "a=full", "full | none*2"])
def test_one_policy_is_not_a_plan(text):
    with pytest.raises(PolicyError, match="one policy is taken"):
        parse_policy(text)


names = st.text(min_size=1, max_size=8)
rules = st.one_of(
    st.builds(Named, st.sampled_from(Action), st.lists(names, min_size=1, max_size=3).map(tuple)),
    st.builds(ByKind, st.sampled_from(Kind)),
    st.builds(Smaller, st.integers(1, 2**40)),
    st.builds(Cheap, st.integers(1, 10**6)),
)


def in_one_place(rules):
    """Whether no name is saved and offloaded."""
    try:
        Remat(rules)
    except PolicyError:
        return False
    return True


policies = st.one_of(
    st.just(NONE),
    st.builds(Remat, st.lists(rules, max_size=3).map(tuple).filter(in_one_place)),
    st.sampled_from(sorted(PRESETS)).map(Preset),
)
counts = st.integers(1, 100)
stack_plans = st.builds(
    lambda counted, last: StackPlan((*(Segment(policy, count) for policy, count in counted), Segment(last))),
    st.lists(st.tuples(policies, counts), max_size=3),
    policies,
)
plans = st.one_of(
    stack_plans.map(lambda part: Plan(((None, part),))),
    st.dictionaries(names, stack_plans, min_size=1, max_size=3).map(lambda parts: Plan(tuple(parts.items()))),
)


@given(plans)
def test_every_plan_round_trips(plan):
    assert parse_plan(str(plan)) == plan
    assert hash(parse_plan(str(plan))) == hash(plan)


@given(st.text(max_size=30))
def test_any_text_is_a_plan_or_a_policy_error(text):
    with contextlib.suppress(PolicyError):
        assert parse_plan(str(parse_plan(text))) == parse_plan(text)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("q", "q", True),
        ("q", "qq", False),
        ("*", "layers/attn/q", True),
        ("*/q", "layers/attn/q", True),
        ("layers/*/q", "layers/a/b/q", True),
        ("a.b", "axb", False),
        ("a[0]", "a[0]", True),
    ],
)
def test_name_patterns(pattern, name, expected):
    assert matches(pattern, name) is expected
