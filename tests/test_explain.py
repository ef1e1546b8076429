"""`explain` end to end on CPU: the step's numbers by hand, every format, saved reports read again, differences, the command line.

The step is `tests.steps:mlp`: of its block's two matmuls, the second is dead in a recomputed layer.
"""

import dataclasses
import functools
import io
import json
import tempfile
import zlib
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from steps import matmul_flops

from remat_kit.analysis.differences import difference
from remat_kit.analysis.roofline import step_floor
from remat_kit.analysis.summary import columns
from remat_kit.cli import main
from remat_kit.compile.compiler import AGAIN_NOTE
from remat_kit.errors import StepError
from remat_kit.explanation import Explanation
from remat_kit.memory import PeakKind, StepPhase
from remat_kit.report.explain_json import SCHEMA, explanation_json, read_explanation
from remat_kit.report.explain_markdown import explanation_markdown
from remat_kit.report.explain_table import write_explanation
from remat_kit.targets import load_rows, parse_target
from remat_kit.verbs.compare import compare
from remat_kit.verbs.explain import explain, load_explanation

STEP = "tests.steps:mlp"
DEPTH, BATCH, WIDTH = 4, 64, 32
ONE_MATMUL_OF_ALL_LAYERS = DEPTH * matmul_flops(batch=BATCH, width=WIDTH)

_scratch = tempfile.TemporaryDirectory(prefix="remat-kit-test-")
CACHE = Path(_scratch.name)


@functools.cache
def explained(policy: str) -> Explanation:
    return explain(STEP, policy=policy, target="cpu", cache_dir=CACHE, most_checks=0)


def run(*arguments: str):
    return CliRunner(env={"REMAT_KIT_CACHE": str(CACHE)}).invoke(main, ["explain", "--checks", "0", *arguments])


every_policy = pytest.mark.parametrize("policy", ["none", "full", "save(up)"])


@every_policy
def test_the_peak_sums_to_the_row_s_total(policy):
    found = explained(policy)
    assert sum(line.bytes for line in found.memory.peak_classes) == found.memory.peak_bytes == found.row.total_bytes
    weights_bytes = 4 * DEPTH * 2 * WIDTH * 4 * WIDTH
    by_kind = {line.kind: 0 for line in found.memory.peak_classes}
    for line in found.memory.peak_classes:
        by_kind[line.kind] += line.bytes
    assert by_kind[PeakKind.PARAMETERS] == weights_bytes
    assert by_kind[PeakKind.BATCH] == 4 * BATCH * WIDTH


def test_a_saved_name_has_its_layers_bytes_and_line():
    (line,) = (line for line in explained("save(up)").memory.peak_classes if line.name == "up")
    assert (line.kind, line.layers) == (PeakKind.RESIDUALS, DEPTH)
    assert line.logical_bytes == 4 * DEPTH * BATCH * 4 * WIDTH
    assert line.source.startswith("tests/steps.py:")
    assert not any(line.name == "up" for line in explained("full").memory.peak_classes if line.kind is PeakKind.RESIDUALS)


@every_policy
def test_both_counts_of_flops_are_those_by_hand(policy):
    counted = {each.phase: each for each in explained(policy).agreement}
    again = {"none": 0, "full": 1, "save(up)": 0}[policy]
    wanted = {StepPhase.FORWARD: 2, StepPhase.RECOMPUTE: again, StepPhase.BACKWARD: 4, StepPhase.UPDATE: 0}
    for phase, num_matmuls in wanted.items():
        assert counted[phase].trace_flops == num_matmuls * ONE_MATMUL_OF_ALL_LAYERS
        assert counted[phase].hlo_flops == num_matmuls * ONE_MATMUL_OF_ALL_LAYERS
        assert counted[phase].reasons == ()


def test_the_floor_is_the_slowest_resource():
    found, target = explained("full"), parse_target("h100:8", load_rows())
    floor = step_floor(found.work, found.agreement, found.memory, target)
    assert floor.compute_s == pytest.approx(7 * ONE_MATMUL_OF_ALL_LAYERS / 989e12)
    assert (floor.bound, floor.floor_s) == ("memory", floor.memory_s)
    assert floor.collectives_s == floor.host_s == 0
    assert explained("full").floor.floor_s is None and explained("full").floor.notes


@every_policy
def test_a_report_is_read_again_whole(policy, tmp_path):
    found = explained(policy)
    path = tmp_path / "report.json"
    path.write_text(explanation_json(found))
    assert load_explanation(path) == found


def test_json_has_the_row_and_the_peak_at_the_top():
    data = json.loads(explanation_json(explained("save(up)")))
    assert data["schema"] == SCHEMA
    assert data["total_bytes"] == data["peak_bytes"] == sum(line["bytes"] for line in data["peak_classes"])
    assert {"class", "name", "layers", "bytes", "logical_bytes", "source"} <= set(data["peak_classes"][0])
    assert {each["phase"] for each in data["phases"]} == {"forward", "recompute", "backward", "update"}
    assert data["host_bytes"] is None and data["host_classes"] == []
    assert data["versions"]["jax"]
    assert all({"code", "bytes", "flops", "message", "remedy"} <= set(finding) for finding in data["findings"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: "no JSON", "is not JSON"),
        (lambda text: text.replace(SCHEMA, "remat-kit/compare/1"), "has schema 'remat-kit/compare/1'.*has 'remat-kit/explain/"),
        (lambda text: text.replace('"peak_bytes"', '"peek_bytes"'), "damaged report.*peak_bytes"),
        (lambda text: text.replace('"saved residuals"', '"saved"'), "damaged report.*saved"),
        (lambda _: "[1]", "has schema None"),
    ],
)
def test_a_wrong_report_is_named(change, words):
    text = change(explanation_json(explained("save(up)")))
    with pytest.raises(StepError, match=rf"old\.json .*{words}"):
        read_explanation(text, name="old.json")


def test_a_missing_report_is_named(tmp_path):
    with pytest.raises(StepError, match=r"gone\.json: No such file"):
        load_explanation(tmp_path / "gone.json")


def test_a_difference_names_what_appeared():
    changes = difference(explained("full"), explained("save(up)"))
    assert (changes.before, changes.after) == ("full", "save(up)")
    (up,) = (change for change in changes.appeared if change.name == "up")
    assert (up.kind, up.before_bytes, up.after_bytes) == (PeakKind.RESIDUALS, 0, 4 * DEPTH * BATCH * 4 * WIDTH)
    amounts = {change.what: (change.before, change.after) for change in changes.amounts}
    assert amounts["recompute_flops"] == (ONE_MATMUL_OF_ALL_LAYERS, 0)
    before, after = (explained(policy).compiled.device.temp_bytes for policy in ("full", "save(up)"))
    assert changes.temps_grew_by == pytest.approx(after / before - 1)
    sides = [sum(change.before_bytes for change in group) for group in (changes.vanished, changes.grew, changes.shrank)]
    assert sum(sides) <= explained("full").memory.peak_bytes


def test_nothing_differs_from_itself():
    changes = difference(explained("full"), explained("full"))
    assert (changes.appeared, changes.vanished, changes.grew, changes.shrank, changes.settings) == ((), (), (), (), ())
    assert changes.temps_grew_by == 0


def test_what_the_compiler_moved_is_a_setting():
    newer = dataclasses.replace(
        explained("full"), compiled=dataclasses.replace(explained("full").compiled, versions=(("jax", "99"),))
    )
    assert ("version jax", dict(explained("full").versions)["jax"], "99") in difference(explained("full"), newer).settings


def test_an_explanation_is_cached_and_a_plain_compile_says_that_it_is_not_enough(tmp_path):
    compare(STEP, policies=["full"], targets=["cpu"], options={"depth": 2}, cache_dir=tmp_path)
    ask = functools.partial(explain, STEP, policy="full", target="cpu", options={"depth": 2}, cache_dir=tmp_path, most_checks=0)
    again, cached = ask(), ask()
    assert AGAIN_NOTE in again.notes and not again.compiled.from_cache
    assert cached.compiled.from_cache and AGAIN_NOTE not in cached.notes
    assert cached.memory == again.memory and cached.work == again.work
    (dump,) = tmp_path.glob("compile/*.dump")
    dump.write_bytes(zlib.compress(b"{}"))
    broken = ask()
    assert broken.memory == cached.memory and not broken.compiled.from_cache


def table(explanation: Explanation, **options) -> str:
    stream = io.StringIO()
    write_explanation(explanation, Console(file=stream, width=140), **options)
    return stream.getvalue()


def test_the_table_says_first_what_fills_the_peak():
    text = table(explained("save(up)"))
    lines = text.splitlines()
    assert lines[0] == f"{STEP} · save(up) · cpu"
    assert lines[1].startswith("Needs ") and "has no budget" in lines[1]
    assert "saved residuals" in text and "tests/steps.py:" in text
    assert "Step-time model: not available for this target." in text


def test_all_shows_every_line_of_the_peak():
    found = explained("save(up)")
    short, whole = table(found), table(found, lines=found.memory.peak_classes)
    assert "weights['up']" in whole and "weights['down']" in whole
    assert "smaller" in short and "smaller" not in whole


def test_the_timeline_marks_the_peak():
    found = explained("full").memory
    shown = columns(found, width=20)
    assert max(column.live_bytes for column in shown) == max(point.live_bytes for point in found.timeline)
    (peak,) = (column for column in shown if column.is_peak)
    assert peak.live_bytes == max(column.live_bytes for column in shown)
    assert {column.phase for column in shown} >= {StepPhase.FORWARD, StepPhase.BACKWARD}


def test_markdown_has_the_same_rows():
    text = explanation_markdown(explained("save(up)"))
    (line,) = (line for line in text.splitlines() if line.startswith("| saved residuals | up |"))
    assert "| 4 | 128.00 KiB |" in line
    assert text.startswith(f"### {STEP} · save(up) · cpu\n")


def test_two_policies_are_held_against_each_other():
    done = run(STEP, "--policy", "full", "--policy", "save(up)", "--target", "cpu", "--fail-over", "1")
    assert done.exit_code == 1, done.output
    assert "appeared" in done.output and "up" in done.output and "n/a" in done.output  # the host's bytes, on CPU


def test_growth_between_saved_reports_can_fail(tmp_path):
    paths = []
    for policy in ("full", "save(up)"):
        paths.append(tmp_path / f"{len(paths)}.json")
        paths[-1].write_text(explanation_json(explained(policy)))
    grown = run(*map(str, paths), "--format", "json", "--fail-over", "1")
    assert grown.exit_code == 1
    assert any(change["name"] == "up" for change in json.loads(grown.output)["appeared"])
    assert run(*map(str, paths), "--fail-over", "1000").exit_code == 0
    assert run(*map(str, reversed(paths)), "--fail-over", "1").exit_code == 0
    shown = run(str(paths[0]), "--format", "markdown")
    assert shown.exit_code == 0 and shown.output == explanation_markdown(explained("full"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((STEP,), "give the target to explain the step for"),
        ((STEP, "--policy", "full", "--policy", "none", "--target", "cpu", "--target", "h100"), "this asks for 4 explanations"),
        ((STEP, "--target", "cpu", "--fail-over", "5"), "nothing to compare with"),
        (("gone.json",), "gone.json: No such file"),
        ((STEP, "--target", "cpuu"), "Did you mean 'cpu'?"),
    ],
)
def test_wrong_questions_are_bad_input(arguments, words):
    done = run(*arguments)
    assert done.exit_code == 2
    assert words in done.output
