"""The main job end to end, in worker processes, on the CPU target: exact rows, every way to ask wrongly, exit codes."""

import json
import re

import msgspec
import pytest
from click.testing import CliRunner

import remat_kit
from remat_kit.cli import main
from remat_kit.records import Status
from remat_kit.report.cells import COLUMNS
from tests import steps

UNIT = steps.matmul_flops()
DEPTH = 4


def run(*arguments, exit_code=0):
    result = CliRunner().invoke(main, ["compare", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    comparison = remat_kit.compare(
        "tests.steps:mlp",
        policies=["none", "full", "save(up)", "dots", "minimal", "recompute(up)"],
        targets=["cpu"],
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    return {row.policy: row for row in comparison.rows}


def test_flops_are_the_hand_count(rows):
    assert rows["none"].flops == 6 * UNIT * DEPTH
    assert rows["none"].recompute_flops == rows["none"].inherent_recompute_flops == 0
    # The second matmul of a block is dead in its recomputation: only the first one runs again.
    assert rows["full"].recompute_flops == rows["recompute(up)"].recompute_flops == UNIT * DEPTH
    assert rows["save(up)"].recompute_flops == rows["dots"].recompute_flops == rows["minimal"].recompute_flops == 0
    assert rows["full"].recompute_fraction == pytest.approx(1 / 6)


def test_bytes_add_up_and_weights_are_donated(rows):
    weights = DEPTH * 2 * 32 * 128 * 4
    for row in rows.values():
        assert row.total_bytes == row.argument_bytes + row.output_bytes - row.alias_bytes + row.temp_bytes
        assert row.argument_bytes == weights + 64 * 32 * 4
        assert row.alias_bytes == weights
        assert row.status is Status.OK
        assert row.fits is None and row.budget_bytes is None and row.host_bytes is None
    assert rows["save(up)"].temp_bytes > rows["full"].temp_bytes


def test_budget_decides_and_marks_the_best(tmp_path):
    def ask(budget):
        comparison = remat_kit.compare(
            steps.mlp, policies=["none", "full"], targets=["cpu"], options={"batch": 4096}, budget=budget, cache_dir=tmp_path
        )
        return {row.policy: row for row in comparison.rows}

    free = ask(None)
    assert free["full"].total_bytes < free["none"].total_bytes
    between = ask(free["none"].total_bytes - 1)
    assert [between[policy].status for policy in ("none", "full")] == [Status.OVER_BUDGET, Status.OK]
    assert all(row.from_cache for row in between.values())
    exact = ask(free["none"].total_bytes)
    assert exact["none"].fits and exact["none"].status is Status.OK


def test_callables_that_cannot_be_imported(tmp_path):
    def local(policies, devices):
        return steps.mlp(policies, devices, depth=2)

    (row,) = remat_kit.compare(local, policies=["full"], targets=["cpu"], cache_dir=tmp_path).rows
    assert row.recompute_flops == 2 * UNIT


def test_json_has_every_field_in_the_order_asked_for(tmp_path):
    out = tmp_path / "rows.json"
    run("tests.steps:mlp", "--policy", "full", "--policy", "none", "--target", "cpu", "--format", "json", "--out", str(out))
    data = json.loads(out.read_text())
    assert data["schema"] == "remat-kit/compare/1"
    assert [(row["policy"], row["target"], row["status"]) for row in data["rows"]] == [
        ("full", "cpu", "ok"),
        ("none", "cpu", "ok"),
    ]
    assert data["rows"][0]["host_bytes"] is None
    assert set(data["rows"][0]["versions"]) >= {"jax", "jaxlib"}
    assert {"fits", "flops", "recompute_flops", "inherent_recompute_flops", "compile_s", "notes"} <= set(data["rows"][0])


@pytest.mark.parametrize("form", ["table", "markdown"])
def test_text_reports_name_every_row(form):
    output = run("tests.steps:mlp", "--policy", "full", "--policy", "none", "--target", "cpu", "--format", form).output
    for word in (*COLUMNS, "full", "none", "16.7%", "CPU shows neither offloading"):
        assert word in output


BAD = [
    (["--policy", "ful"], "unknown policy 'ful'.*Did you mean 'full'"),
    (["--policy", "save(qq)"], "no value is named 'qq'. Names in the step: up, down"),
    (["--policy", "save(upp)"], "Did you mean 'up'"),
    (["--policy", "save(zz*)"], r"no value is named 'zz\*'"),
    (["--policy", "full+save(up)"], "'full' stands alone"),
    (["--policy", "full*3"], "speaks of 3 layers, the stack has 4"),
    (["--policy", "full*2 | none*2"], "accepts_mixed=True"),
    (["--policy", "layer=full"], "Did you mean 'layers'"),
    (["--policy", "minimal_with_context"], "keeps the role attention_context"),
    (["--target", "h1000"], "Did you mean 'h100"),
    (["--target", "h100:0"], "h100:0"),
    (["--target", "cpu:x"], "cpu:x"),
    (["--set", "batch=x"], "option batch='x' is not of type int"),
    (["--set", "nosuch=1"], "no option 'nosuch'; its options: batch, depth, width, dtype"),
    (["--set", "batch"], "is not NAME=VALUE"),
    (["--budget", "12XB"], "not an amount of memory"),
    (["--budget", "-1"], "not an amount of memory"),
    (["--budget", "90%"], "has no memory of its own"),
    (["--memory-fraction", "2"], "not a part of the memory"),
    (["--xla", "xla_no_such_flag=1"], "xla_no_such_flag"),
    (["--timeout", "0"], "timeout"),
    (["--out", "nosuch/rows.json"], "no folder 'nosuch'"),
    (["--wrap", "layers/*"], "is not PATTERN=POLICY"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_bad_input_is_one_clear_message(arguments, message):
    given = ["tests.steps:mlp", *arguments]
    for option, default in (("--policy", "full"), ("--target", "cpu")):
        if option not in arguments:
            given += [option, default]
    result = run(*given, exit_code=2)
    assert "Traceback" not in result.output
    assert re.search(message, " ".join(result.output.split())), result.output


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("tests.nosuch:mlp", "no module 'tests.nosuch'"),
        ("nosuch:mlp", "no module 'nosuch'"),
        ("tests.steps:mpl", "Did you mean 'mlp'"),
        ("tests.steps", "write module:function"),
        ("tests.steps:UNKNOWN", "has no 'UNKNOWN'"),
        ("tests.steps:ROLES", "not a step factory"),
        ("tests.steps:not_a_step", "must return a remat_kit.Step"),
        ("tests.steps:forgetful", "changed nothing"),
        ("tests.steps:raising", "ZeroDivisionError: no layers to divide.*in raising"),
    ],
)
def test_wrong_steps_are_explained(step, message):
    result = run(step, "--policy", "full", "--target", "cpu", exit_code=2)
    assert "Traceback" not in result.output
    assert re.search(message, " ".join(result.output.split())), result.output


def test_a_factory_that_raises_for_one_policy_costs_its_row():
    result = run(
        *("tests.steps:raising", "--set", "when=remat", "--policy", "none", "--policy", "full"),
        *("--target", "cpu", "--format", "json"),
        exit_code=1,
    )
    rows = json.loads(result.stdout)["rows"]
    assert [row["status"] for row in rows] == ["ok", "failed"]
    assert "ZeroDivisionError" in rows[1]["error"] and rows[1]["total_bytes"] is None


def test_records_survive_json():
    row = remat_kit.compare("tests.steps:mlp", policies=["full"], targets=["cpu"]).rows[0]
    assert msgspec.json.decode(msgspec.json.encode(row), type=type(row)) == row
