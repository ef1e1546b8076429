"""Plan files: text and back, what is refused, what is warned of."""

import dataclasses
import importlib.metadata
import json
import tomllib
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_kit.errors import PolicyError, RematWarning
from remat_kit.export import policy_text
from remat_kit.plan_file import plan_file_of, read_plan, toml_text, write_plan
from remat_kit.planning import Objective, PlanResult, StepPlan

RESULT = PlanResult(
    plan="full*2 | save(q)*2",
    fits=True,
    budget_bytes=100,
    predicted_total_bytes=None,
    compiled_total_bytes=90,
    missing_bytes=0,
    host_bytes=0,
    flops=10,
    recompute_flops=2,
    recompute_s=0.5,
    objective=Objective.TIME,
    full_compiles=1,
    compiles=5,
    decisions=(),
    parts=(),
    sentence="",
    log=(),
)
PLAN = StepPlan(
    step="models:gpt2_small",
    options=(("batch", "8"), ("mesh", 'data:2,"x"')),
    target="h100",
    result=RESULT,
    baseline_flops=8,
    step_s=1.0,
    bound="compute",
    tokens_per_s=1.0,
    cost_per_million_tokens=None,
    num_cached=0,
    program="0123456789abcdef",
    versions=(("jax", importlib.metadata.version("jax")), ("record schema", "1")),
)
BY_PATH = dataclasses.replace(PLAN, wraps=(("transformer/h/*", "full"), ("transformer/h/3", "save(*/c_fc)")))


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("plan", [PLAN, BY_PATH], ids=["stacks", "modules"])
def test_files_are_read_as_they_were_written(tmp_path, suffix, plan):
    path = tmp_path / f"plan{suffix}"
    write_plan(plan, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read_plan(path)
    assert found == plan_file_of(plan)
    assert dict(found.options) == dict(plan.options)
    assert list(found.wraps.items()) == list(plan.wraps)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
TABLES = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(-(2**62), 2**62), st.booleans(), st.lists(TEXTS, max_size=3)))


@given(TABLES, st.dictionaries(TEXTS, TABLES, max_size=3))
def test_toml_says_what_was_written(plain, tables):
    data = {f"plain {name}": value for name, value in plain.items()} | {f"table {name}": table for name, table in tables.items()}
    assert tomllib.loads(toml_text(data)) == {name: value for name, value in data.items() if value != {}}


def test_what_a_loaded_plan_gives(tmp_path):
    write_plan(PLAN, tmp_path / "plan.toml")
    found = read_plan(tmp_path / "plan.toml")
    assert str(found.stack_plan) == RESULT.plan
    assert str(found.policies["layers"]) == str(found.policies["any stack"]) == RESULT.plan
    assert policy_text(f"@{tmp_path / 'plan.toml'}") == RESULT.plan
    write_plan(dataclasses.replace(PLAN, result=dataclasses.replace(RESULT, plan="a=full; b=none")), tmp_path / "two.toml")
    policies = read_plan(tmp_path / "two.toml").policies
    assert (str(policies["a"]), str(policies["b"])) == ("full", "none")
    with pytest.raises(PolicyError, match="no policy for stack 'c'"):
        policies["c"]


def test_plans_for_modules_are_no_policies(tmp_path):
    write_plan(BY_PATH, tmp_path / "plan.json")
    with pytest.raises(PolicyError, match=r"is for the modules transformer/h/.*give its `wraps` to rematerialize"):
        _ = read_plan(tmp_path / "plan.json").policies
    with pytest.raises(PolicyError, match="--wrap @FILE"):
        policy_text(f"@{tmp_path / 'plan.json'}")


def test_other_versions_are_warned_of(tmp_path):
    path = tmp_path / "plan.toml"
    write_plan(dataclasses.replace(PLAN, versions=(("jax", "0.4.1"), ("libtpu-of-another-planet", "1"), ("", "1"))), path)
    with pytest.warns(RematWarning, match=r"plan.toml was planned with jax 0\.4\.1 \(here: .*\)") as caught:
        read_plan(path)
    assert len(caught) == 1 and "planet" not in str(caught[0].message)


WRONG = [
    ("plan.txt", "", "it ends in .toml or .json"),
    ("plan.toml", "plan = ", "is no plan file"),
    ("plan.json", "{", "is no plan file"),
    ("plan.json", "{}", "is no plan file"),
    ("plan.json", json.dumps({"plan": 3}), "is no plan file"),
    ("plan.toml", b"\xff\xfe", "is no plan file"),
    ("plan.json", "[" * 100_000, "is no plan file"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG, ids=[f"{name} {text[:20]!r}" for name, text, _ in WRONG])
def test_what_is_no_plan_file_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PolicyError, match=message):
        read_plan(path)


def test_files_that_lie_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(PolicyError, match=r"can't read a plan from .*No such file"):
        read_plan(path)
    write_plan(PLAN, path)
    written = json.loads(path.read_text())
    for change, message in (
        ({"schema": "remat-kit/plan/9"}, "has the schema 'remat-kit/plan/9'"),
        ({"plan": "ful"}, "in the plan file .*plan.json.*'full'"),
    ):
        path.write_text(json.dumps(written | change))
        with pytest.raises(PolicyError, match=message):
            read_plan(path)


def test_what_does_not_fit_is_not_written(tmp_path):
    over = dataclasses.replace(PLAN, result=dataclasses.replace(RESULT, fits=False))
    for plan, name, message in ((over, "plan.toml", "no plan fits h100"), (PLAN, "plan.txt", "ends in .toml or .json")):
        with pytest.raises(PolicyError, match=message):
            write_plan(plan, tmp_path / name)
    assert not list(tmp_path.iterdir())
