"""`plan` end to end, in worker processes on the CPU target: the proof, what does not fit, wrong questions, files in use."""

import dataclasses
import io
import json
import re
import warnings

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from rich.console import Console

import models
import remat_kit
from remat_kit.cli import main
from remat_kit.errors import BudgetError, RematWarning, TargetError
from remat_kit.plan_file import write_plan
from remat_kit.planning import PlanRow, PlanTable
from remat_kit.plans import NO_REMAT
from remat_kit.report.plan import sections_markdown, write_sections
from remat_kit.report.plan_sections import plan_sections, table_sections
from remat_kit.targets import availability
from tests import plan_steps

STEP = "tests.plan_steps:layers"
DEPTH = 6
UNIT = plan_steps.matmul_flops()
KiB = 2**10
BUDGET = 2200 * KiB
UNIFORM = ("--set", "depth=4", "--set", "mixes=false")  # what does not mix is traced faster


def run(*arguments, exit_code=0):
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code == exit_code, result.output
    return result


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def one_cache(cache, monkeypatch):
    monkeypatch.setenv("REMAT_KIT_CACHE", str(cache))


@pytest.fixture(scope="module")
def fitted(cache):
    """A plan between full rematerialization and none."""
    return remat_kit.plan(STEP, target="cpu", budget=BUDGET, options={"depth": DEPTH}, cache_dir=cache)


@pytest.fixture(scope="module")
def written(fitted, cache, tmp_path_factory):
    """The same question on the command line: its JSON and its plan file."""
    path = tmp_path_factory.mktemp("plans") / "plan.toml"
    arguments = (STEP, "--target", "cpu", "--budget", str(BUDGET), "--set", f"depth={DEPTH}", "--format", "json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REMAT_KIT_CACHE", str(cache))
        return json.loads(run(*arguments, "--out", str(path)).stdout), path


def total_bytes(plan, *, step=STEP, **options):
    """What `compare` says of a plan, by itself."""
    return remat_kit.compare(step, policies=[plan], targets=["cpu"], options=options).rows[0].total_bytes


def test_the_plan_is_proved_by_a_compile_of_the_whole_step(fitted):
    result = fitted.result
    assert result.fits and result.missing_bytes == 0
    assert result.compiled_total_bytes == total_bytes(result.plan, depth=DEPTH)
    assert 0.9 * BUDGET <= result.compiled_total_bytes <= BUDGET == result.budget_bytes
    assert result.predicted_total_bytes == pytest.approx(result.compiled_total_bytes, rel=0.02)
    assert 1 <= result.full_compiles <= 4
    assert result.full_compiles < result.compiles <= 12
    assert [entry.depth for entry in result.log].count(None) == result.full_compiles
    assert dict(fitted.versions)["jax"] == jax.__version__
    assert sum(part.num_bytes for part in result.parts) == result.compiled_total_bytes


def test_recomputed_work_is_counted_by_hand(fitted):
    """A layer under `full` repeats both wide matmuls, one that keeps `slim` the first, one that keeps both none."""
    repeated = 0
    for _, part in remat_kit.parse_plan(fitted.result.plan).parts:
        for segment in part.fit(DEPTH).segments:
            kept = re.findall("wide|slim", str(segment.policy)) if str(segment.policy) != "none" else ["wide", "slim"]
            repeated += (segment.num_layers or 0) * (2 - len(kept)) * UNIT
    assert repeated > 0
    assert fitted.result.recompute_flops == repeated
    assert fitted.result.flops == fitted.baseline_flops + repeated


def test_decisions_have_a_row_for_each_name_that_the_backward_pass_reads(fitted):
    rows = {decision.name: decision for decision in fitted.result.decisions}
    assert {"wide", "slim"} <= set(rows)
    assert rows["wide"].num_bytes == 4 * rows["slim"].num_bytes == 32 * 16 * 4 * 32 * 4
    assert rows["wide"].num_layers == DEPTH
    assert rows["slim"].recompute_flops == UNIT
    assert all(decision.recompute_s is None for decision in rows.values())
    assert fitted.step_s is None and fitted.bound == "" and fitted.result.recompute_s is None
    assert any("cpu has no published rates" in note for note in fitted.notes)


def test_asking_again_compiles_nothing(fitted, written):
    assert fitted.num_cached == 0
    assert written[0]["num_cached"] == written[0]["compiles"] == fitted.result.compiles


def test_below_the_floor_says_what_fills_the_memory_and_measures_ways_out(tmp_path):
    out = tmp_path / "plan.toml"
    result = run(*(STEP, *UNIFORM, "--target", "cpu", "--budget", "100KiB", "--format", "json", "--out", str(out)), exit_code=3)
    data = json.loads(result.stdout)
    assert data["fits"] is False and not out.exists()
    assert data["plan"] == "full"
    assert data["missing_bytes"] == data["compiled_total_bytes"] - 100 * KiB > 0
    assert sum(part["num_bytes"] for part in data["parts"]) == data["compiled_total_bytes"]
    assert data["sentence"].startswith("Nothing fits: the smallest plan found, 'full'")
    ways = {way["text"]: way for way in data["ways_out"]}
    assert ways["batch 16 instead of 32"]["total_bytes"] == total_bytes("full", depth=4, batch=16)
    assert ways["a chunk of 1 instead of 16"]["total_bytes"] <= data["compiled_total_bytes"]
    assert ways["batch 8 instead of 32"]["total_bytes"] < ways["batch 16 instead of 32"]["total_bytes"]
    assert "arguments have no shardings" in ways["twice the devices (cpu:2), the same batch in all"]["error"]


def test_json_has_what_programs_ask_for(fitted, written):
    data, _ = written
    assert data["schema"] == "remat-kit/planned/1"
    assert data["plan"] == fitted.result.plan
    wanted = {"plan", "budget_bytes", "predicted_total_bytes", "compiled_total_bytes", "flops", "recompute_flops"}
    assert wanted | {"full_compiles", "compiles", "decisions", "versions"} <= set(data)
    assert data["options"] == {"depth": str(DEPTH)}


def test_tables_say_the_same(fitted):
    stream = io.StringIO()
    write_sections(plan_sections(fitted), Console(file=stream, width=140))
    for text in (stream.getvalue(), sections_markdown(plan_sections(fitted)).replace("\\|", "|")):
        for words in (fitted.result.plan, "live at the peak?", "what would flip it", "compiles of the whole step"):
            assert words in text
        assert f"{fitted.result.compiled_total_bytes:,} B" in text


BAD = [
    (["--budget", "0"], "holds nothing"),
    (["--budget", "-5"], "not an amount of memory"),
    (["--budget", "12XB"], "not an amount of memory"),
    (["--budget", "5 bananas"], "not an amount of memory"),
    (["--budget", "5"], "a budget of '5' is 5 bytes: write the unit, like 5GiB"),
    (["--budget", "90%"], "has no memory of its own"),
    ([], "say how much may be used, like --budget 16GiB"),
    (["--target", "h100", "--budget", "200GiB"], "more than h100 has: 79.11 GiB"),
    (["--target", "h100", "--budget", "150%"], "not a part of the memory"),
    (["--budget", "1GiB", "--objective", "time"], "no published FLOP/s"),
    (["--budget", "1GiB", "--offload", "0.5"], "the rate of its host link is not known"),
    (["--budget", "1GiB", "--out", "plan.txt"], "it ends in .toml or .json"),
    (["--budget", "1GiB", "--out", "nosuch/plan.toml"], "no folder 'nosuch'"),
    (["--budget", "1GiB", "--target", "cpu:2", "--out", "plan.toml"], "for one --target"),
    (["--budget", "1GiB", "--frontier", "--maximize", "batch"], "not both"),
    (["--budget", "1GiB", "--maximize", "depth"], "'depth' is not one of 'batch', 'seq'"),
    (["--budget", "1GiB", "--set", "nosuch=1"], "no option 'nosuch'"),
    (["--budget", "1GiB", "--wrap", "h_*"], "matches nothing|no module was traced"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[" ".join(arguments) or "no budget" for arguments, _ in BAD])
def test_nonsense_is_refused_in_one_message(arguments, message):
    given = [STEP, *arguments] if arguments[:1] == ["--target"] else [STEP, "--target", "cpu", *arguments]
    result = run(*given, exit_code=2)
    assert "Traceback" not in result.output
    assert re.search(message, " ".join(result.output.split())), result.output


def test_steps_that_can_not_be_planned_say_why():
    assert "declares no stack" in run("tests.plan_steps:unnamed", "--target", "cpu", "--budget", "1GiB", exit_code=2).output
    assert (
        "add knobs=Knobs(batch="
        in run(*("tests.plan_steps:no_depth", "--target", "cpu", "--budget", "1GiB", "--maximize", "batch"), exit_code=2).output
    )
    with pytest.raises(TargetError, match="give a list of targets"):
        remat_kit.plan_targets(STEP, targets="cpu")
    with pytest.raises(BudgetError, match="from 0 to 1"):
        remat_kit.plan(STEP, target="h100", offload=2.0)


@pytest.mark.slow
def test_without_a_depth_option_only_whole_steps_are_compiled():
    planned = remat_kit.plan("tests.plan_steps:no_depth", target="cpu", budget="2500KiB")
    assert planned.result.fits
    assert planned.result.predicted_total_bytes is None
    assert planned.result.compiles == planned.result.full_compiles <= 4
    assert any("no working depth option" in note for note in planned.notes)


@pytest.mark.slow
def test_two_stacks_have_a_part_each_and_one_that_can_not_mix_does_not():
    planned = remat_kit.plan("tests.plan_steps:two_stacks", target="cpu", budget="4MiB")
    plan = remat_kit.parse_plan(planned.result.plan)
    assert [name for name, _ in plan.parts] == ["encoder", "decoder"]
    assert not plan.parts[1][1].is_mixed
    assert (
        planned.result.compiled_total_bytes == total_bytes(planned.result.plan, step="tests.plan_steps:two_stacks") <= 4 * 2**20
    )


TARGETS = """
[slow]
base = "cpu"
memory_bytes = 4_000_000
flops_per_s = 1e9
memory_bytes_per_s = 1e9
price_per_hour = 0.36
[small]
base = "slow"
memory_bytes = 100_000
"""


@pytest.mark.slow
def test_targets_have_a_row_each_with_time_and_price(tmp_path):
    file = tmp_path / "targets.toml"
    file.write_text(TARGETS)
    targets = [word for name in ("slow", "small") for word in ("--target", name)]
    result = run(STEP, *UNIFORM, *targets, "--budget", "100%", "--targets-file", str(file), "--format", "json")
    slow, small = (row["plan"] for row in json.loads(result.stdout)["rows"])
    assert slow["fits"] and not small["fits"]
    assert slow["objective"] == "time"
    assert slow["bound"] == "compute"
    assert slow["step_s"] >= slow["flops"] / 1e9
    assert slow["tokens_per_s"] == pytest.approx(32 * 16 / slow["step_s"])
    assert slow["cost_per_million_tokens"] == pytest.approx(0.36 / 3600 * 1e6 / slow["tokens_per_s"])


def test_the_table_of_targets_names_those_where_nothing_fits_or_that_failed(fitted):
    over = dataclasses.replace(fitted, result=dataclasses.replace(fitted.result, fits=False))
    rows = (PlanRow(target="a", plan=fitted), PlanRow(target="b", plan=over), PlanRow(target="c", plan=None, error="lost"))
    text = sections_markdown(table_sections(PlanTable(step=STEP, options=(), rows=rows))).replace("\\|", "|")
    assert f"| a | {fitted.result.plan} |" in text
    assert f"| b | nothing fits; smallest: {fitted.result.plan} |" in text
    assert "| c | failed: lost |" in text


@pytest.mark.slow
def test_the_frontier_is_compiled_at_its_ends_and_needs_no_budget():
    data = json.loads(run(STEP, *UNIFORM, "--target", "cpu", "--frontier", "--format", "json").stdout)
    points = data["points"]
    assert [point["cost"] for point in points] == sorted((point["cost"] for point in points), reverse=True)
    assert points[-1]["cost"] == points[-1]["recompute_flops"] == 0
    assert points[0]["plan"] == "full" and points[0]["compiled_total_bytes"] == total_bytes("full", depth=4)
    assert points[-1]["compiled_total_bytes"] == total_bytes(points[-1]["plan"], depth=4)


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_one_does_not():
    settings = remat_kit.PlanSettings(budget=1500 * KiB, options={"depth": 4, "mixes": False})
    found = remat_kit.plan_largest(STEP, target="cpu", knob="batch", settings=settings)
    assert found.value is not None and found.next_value == found.value + 1
    assert found.total_bytes <= 1500 * KiB
    assert found.next_total_bytes == total_bytes("full", depth=4, batch=found.next_value) > 1500 * KiB
    assert found.plan is not None and found.plan.result.fits
    assert dict(found.plan.options)["batch"] == str(found.value)


@pytest.mark.slow
def test_a_sequence_that_the_step_refuses_is_the_limit():
    settings = remat_kit.PlanSettings(budget="1GiB", options={"depth": 2, "mixes": False})
    found = remat_kit.plan_largest(STEP, target="cpu", knob="seq", settings=settings)
    assert (found.value, found.next_value) == (64, None)
    assert found.plan is not None and found.plan.result.recompute_flops == 0


def largest_difference(found, expected):
    """Over the whole tree, relative to its largest entry."""
    scale = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(expected))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs) / scale


def test_a_plan_file_runs_in_a_training_step(written, fitted):
    _, path = written
    plan = remat_kit.load_plan(path)
    assert plan.plan == fitted.result.plan and plan.proof.compiled_total_bytes == fitted.result.compiled_total_bytes
    step = plan_steps.layers(plan.policies, jax.devices(), depth=DEPTH)
    params, x_BTD = step.init(jax.random.key(0))
    expected, found = (
        jax.jit(jax.grad(plan_steps.layers_loss(policies)))(params, x_BTD) for policies in (NO_REMAT, plan.policies)
    )
    assert largest_difference(found, expected) <= 2e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for policies in (plan.policies, NO_REMAT):
            remat_kit.load_plan(path, step=plan_steps.layers(policies, jax.devices(), depth=DEPTH))
    with pytest.warns(RematWarning, match="was planned for tests.plan_steps:layers depth=6 on cpu: this step has other"):
        remat_kit.load_plan(path, step=plan_steps.layers(plan.policies, jax.devices(), depth=DEPTH, batch=8))
    jax.jit(step.fn, donate_argnums=step.donate)(params, x_BTD)


def test_compare_takes_a_plan_file_as_a_policy(written, fitted):
    _, path = written
    arguments = ["compare", STEP, "--policy", f"@{path}", "--target", "cpu", "--set", f"depth={DEPTH}", "--format", "json"]
    result = CliRunner().invoke(main, arguments)
    assert json.loads(result.stdout)["rows"][0]["total_bytes"] == fitted.result.compiled_total_bytes
    with pytest.warns(
        RematWarning, match="planned for 'tests.plan_steps:layers depth=6' and is used for 'tests.plan_steps:layers'"
    ):
        CliRunner().invoke(main, ["compare", STEP, "--policy", f"@{path}", "--target", "nosuch"])


def test_modules_of_a_model_that_nobody_edits(tmp_path):
    step, path = "tests.plan_steps:unnamed", tmp_path / "plan.toml"
    given = (step, "--wrap", "h_*", "--target", "cpu", "--budget", "2080KiB", "--set", "depth=6", "--set", "batch=256")
    run(*given, "--out", str(path))
    plan = remat_kit.load_plan(path)
    assert plan.wraps
    options = {"depth": 6, "batch": 256}
    assert plan.proof.compiled_total_bytes <= 2080 * KiB
    model = plan_steps.Model(6, 32)
    params, x_BD = plan_steps.unnamed(NO_REMAT, jax.devices(), **options).init(jax.random.key(0))
    expected = jax.jit(jax.grad(plan_steps.unnamed_loss(model)))(params, x_BD)
    with remat_kit.rematerialize(plan.wraps):
        found = jax.jit(jax.grad(plan_steps.unnamed_loss(model)))(params, x_BD)
    assert largest_difference(found, expected) <= 2e-6
    arguments = ["compare", step, "--wrap", f"@{path}", "--target", "cpu", "--set", "depth=6", "--set", "batch=256"]
    result = CliRunner().invoke(main, [*arguments, "--format", "json"])
    assert json.loads(result.stdout)["rows"][0]["total_bytes"] == plan.proof.compiled_total_bytes


@pytest.mark.slow
@pytest.mark.long
def test_a_plan_for_gpt2_trains_on_cpu(tmp_path):
    options = {"layers": 4, "dtype": "float32"}
    planned = remat_kit.plan("models:gpt2_tiny", target="cpu", budget="6MiB", options=options)
    write_plan(planned, tmp_path / "plan.json")
    plan = remat_kit.load_plan(tmp_path / "plan.json")
    assert planned.result.recompute_flops > 0
    device = jax.devices()[:1]
    step, plain = (models.gpt2_tiny(policies, device, **options) for policies in (plan.policies, NO_REMAT))
    state, batch = step.init(jax.random.key(0))
    (expected_loss, expected), (loss, found) = (
        jax.jit(jax.value_and_grad(made.evaluate))(state.params, batch) for made in (plain, step)
    )
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    assert largest_difference(found, expected) <= 2e-6
    remat_kit.load_plan(tmp_path / "plan.json", step=step)
    jax.jit(step.fn, donate_argnums=step.donate)(state, batch)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not availability("cuda").is_available, reason="needs XLA's GPU compiler: pip install 'remat-kit[gpu]'")
def test_gpt2_small_on_h100():
    settings = remat_kit.PlanSettings(budget="2800MiB", options={"layers": 6, "attention": "xla"})
    table = remat_kit.plan_targets("models:gpt2_small", targets=["h100"], settings=settings)
    planned = table.rows[0].plan
    assert planned is not None and planned.result.fits
    assert 0.9 * 2800 * 2**20 <= planned.result.compiled_total_bytes <= 2800 * 2**20
    assert planned.result.predicted_total_bytes == pytest.approx(planned.result.compiled_total_bytes, rel=0.05)
    assert planned.step_s is not None and planned.step_s >= planned.result.flops / 989e12
    assert planned.bound in ("compute", "memory")
