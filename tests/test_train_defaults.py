"""The first thing that a person tries: plan, then train with the defaults, on two CPU cores."""

import json
import resource
import subprocess
import sys

import pytest

from tests.train_runs import ROOT, environment, finish, metrics, start

# Five minutes of two cores, whatever else runs on the machine.
MOST_CPU_S = 2 * 300


@pytest.mark.slow
@pytest.mark.long
def test_defaults_learn_more_than_frequencies_in_five_minutes_under_a_plan(tmp_path):
    plan = tmp_path / "plan.toml"
    asked = ("models:gpt2_tiny", "--set", "batch=16", "--set", "seq=64", "--target", "cpu", "--budget", "24MiB")
    subprocess.run(
        [sys.executable, "-m", "remat_kit.cli", "plan", *asked, "--out", str(plan)],
        check=True,
        cwd=ROOT,
        env=environment(tmp_path / "programs"),
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = start("train", "--plan", str(plan), "--dir", str(tmp_path / "run"), cache=tmp_path / "programs", log=tmp_path / "log")
    code, output = finish(run, tmp_path / "log", timeout_s=1800)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 0, output
    assert f"(from {plan})" in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["step"] == 1500
    assert summary["recompute_percent"] > 0, "the plan recomputes something"
    assert summary["held_out_loss"] < summary["floor"] - 0.5
    assert metrics(tmp_path / "run")["held_out_loss"][1500] == summary["held_out_loss"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_CPU_S
