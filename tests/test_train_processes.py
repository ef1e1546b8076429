"""Runs as processes of their own: killed at random moments, told to stop, several at once, and one of several dying."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.train_runs import (
    ARGUMENTS,
    ROOT,
    end_all,
    environment,
    finish,
    metrics,
    same_bits,
    saved_state,
    saved_steps,
    start,
    steps_logged,
    wait_for,
)

pytestmark = pytest.mark.slow


STEPS = 80
LENGTH = ("--steps", str(STEPS), "--checkpoint-every", "5")


@pytest.fixture(autouse=True)
def nothing_is_left_running():
    """Also when a test fails."""
    yield
    end_all()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Compiled programs that all processes here share."""
    return tmp_path_factory.mktemp("programs")


def start_run(folder, log, cache):
    """Starts a run, or goes on with it."""
    begun = (folder / "config.json").exists()
    where = ("--resume", str(folder)) if begun else ("--dir", str(folder), *ARGUMENTS, *LENGTH, "--policy", "full*1 | save(q)*1")
    return start("train", *where, cache=cache, log=log)


def resumed_steps(log):
    """From which steps a run went on, each time that it did."""
    return list(map(int, re.findall(r"going on from step (\d+)", log.read_text(errors="replace"))))


def test_killed_at_5_random_moments_it_ends_with_the_same_bits(tmp_path, cache):
    whole, twin = tmp_path / "whole", tmp_path / "twin"
    code, output = finish(start_run(whole, tmp_path / "whole.log", cache), tmp_path / "whole.log")
    assert code == 0, output
    rng, log = random.Random(0), tmp_path / "twin.log"
    for num_resumed in range(5):
        process = start_run(twin, log, cache)
        wait_for(lambda count=num_resumed: len(resumed_steps(log)) == count, process, log)
        step = (resumed_steps(log)[-1] if num_resumed else 5) + rng.randint(1, 8)
        wait_for(lambda step=step: saved_steps(twin) and steps_logged(twin) >= step, process, log)
        time.sleep(rng.uniform(0.0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it ended before it was killed: give it more steps"
    code, output = finish(start_run(twin, log, cache), log)
    assert code == 0, output
    resumed = resumed_steps(log)
    assert len(resumed) == 5, "each time from a checkpoint"
    assert all(step % 5 == 0 for step in resumed)
    assert same_bits(saved_state(twin, STEPS), saved_state(whole, STEPS))
    assert metrics(twin)["loss"] == metrics(whole)["loss"]


def test_sigterm_saves_and_ends(tmp_path, cache):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start_run(folder, log, cache)
    wait_for(lambda: steps_logged(folder) >= 7, process, log)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, log)
    assert code == 0, output
    stopped = json.loads((folder / "summary.json").read_text())
    assert stopped["was_stopped"]
    assert 7 <= stopped["step"] < STEPS
    assert saved_steps(folder)[-1] == stopped["step"]
    assert f"steps      {stopped['step']} of {STEPS}, stopped by a signal" in output


def launch(folder, log, cache, *args):
    return start(
        "train.launch", "--processes", "2", "--", "--dir", str(folder), "--cpu-devices", "4", *args, cache=cache, log=log
    )


def test_two_processes_are_one(tmp_path, cache):
    args = (*ARGUMENTS, "--steps", "20", "--checkpoint-every", "10", "--policy", "full", "--mesh", "data:2,fsdp:4")
    one = start("train", "--dir", str(tmp_path / "one"), "--cpu-devices", "8", *args, cache=cache, log=tmp_path / "one.log")
    code, output = finish(one, tmp_path / "one.log")
    assert code == 0, output
    code, output = finish(launch(tmp_path / "two", tmp_path / "two.log", cache, *args), tmp_path / "two.log")
    assert code == 0, output
    found, expected = (metrics(tmp_path / name)["loss"] for name in ("two", "one"))
    assert list(found) == list(expected) == list(range(1, 21))
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    assert expected[20] < expected[1] - 1.0


def test_when_one_of_two_dies_the_launcher_says_which_where_and_how_to_go_on(tmp_path, cache):
    folder, log = tmp_path / "run", tmp_path / "log"
    args = (*ARGUMENTS, "--steps", "16", "--checkpoint-every", "4", "--policy", "full", "--mesh", "data:2,fsdp:4")
    launcher = launch(folder, log, cache, *args)
    wait_for(lambda: saved_steps(folder)[-1:] >= [4], launcher, log)
    victim = children_of(launcher.pid)[1]
    killed_at = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    code, output = finish(launcher, log, timeout_s=60)
    assert code == 4, output
    assert time.monotonic() - killed_at < 30
    said = re.search(r"process 1 was killed by SIGKILL at step (\d+); the newest checkpoint is of step (\d+)\.", output)
    assert said, output
    assert 4 <= int(said[2]) <= int(said[1]) + 1
    assert "terminating process" not in output.lower()
    command = re.search(r"Go on with: python (.*)", output)[1].split()
    resumed = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment(cache), capture_output=True, text=True, timeout=300, check=False
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "going on from step" in resumed.stdout
    assert saved_steps(folder)[-1] == 16


def children_of(parent):
    """Process ids of the children of a process, in the order in which they were started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True, check=True)
    return sorted(map(int, listed.stdout.split()))


def test_sigterm_to_the_launcher_has_both_save_the_same_step(tmp_path, cache):
    folder, log = tmp_path / "run", tmp_path / "log"
    args = (*ARGUMENTS, "--steps", "400", "--checkpoint-every", "0", "--policy", "full", "--mesh", "data:2,fsdp:4")
    launcher = launch(folder, log, cache, *args)
    wait_for(lambda: steps_logged(folder) >= 3, launcher, log)
    launcher.send_signal(signal.SIGTERM)
    code, output = finish(launcher, log)
    assert code == 0, output
    stopped = json.loads((folder / "summary.json").read_text())
    assert stopped["was_stopped"]
    assert saved_steps(folder) == [stopped["step"]]


def test_bad_input_comes_through_the_launcher_as_it_is(tmp_path, cache):
    log = tmp_path / "log"
    code, output = finish(launch(tmp_path / "run", log, cache, *ARGUMENTS, "--steps", "3", "--policy", "save(qq)"), log)
    assert code == 2
    assert "error: 'save(qq)': no value is named 'qq'" in output
