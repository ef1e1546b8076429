"""Every example runs on CPU and answers its question; those that compile for other devices do so for small steps, slowly."""

import contextlib
import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train_runs import FILES, ROOT, environment, metrics, saved_steps
from train.cli import read_arguments

EXAMPLES = Path(__file__).parent.parent / "examples"
MOST_LINES = 80


def printed(name, capsys, *argv, **expected):
    """What an example prints; `code` is what its `main` returns."""
    main = importlib.import_module(f"examples.{name}").main
    assert (main(list(argv)) if argv else main()) == expected.get("code")
    return capsys.readouterr().out


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def kib(text):
    """Bytes in the order in which they stand in a text."""
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    return [float(number) * scale[unit] for number, unit in re.findall(r"([\d.]+) (B|KiB|MiB|GiB)\b", text)]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_is_short_and_says_how_to_run_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) < MOST_LINES
    assert lines[0].endswith("?"), "one question each"
    assert any(line.startswith(f"    python -m examples.{path.stem}") for line in lines)


def test_own_loop(capsys):
    text = printed("own_loop", capsys, "--policy", "full*2 | save(hidden)*2")
    losses = numbers(r"loss ([\d.]+)", text)
    assert losses[-1] < losses[0] / 2
    assert re.search(r"keeps .* 2 layers  hidden", text)


def test_own_loop_takes_a_plan_file(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("not = 'a plan'")
    with pytest.raises(ValueError, match=r"plan\.toml"):
        printed("own_loop", capsys, "--policy", f"@{path}")


@pytest.mark.slow
def test_unmodified_model(capsys):
    text = printed("unmodified_model", capsys)
    plain, full, widened = kib(text)
    assert full < widened < plain / 2
    assert max(numbers(r"at most (\S+)", text)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["bf16", "nf4"])
def test_finetune_lora(capsys, frozen):
    text = printed("finetune_lora", capsys, "--frozen", frozen, "--steps", "20")
    losses = numbers(r"loss ([\d.]+)", text)
    assert losses[-1] < losses[0] - 0.5
    trains, _, state = kib(text)
    assert state == pytest.approx(2 * trains, rel=0.01)


@pytest.mark.slow
@pytest.mark.long
def test_compare_presets(capsys):
    text = printed("compare_presets", capsys, "models:gpt2_tiny", "--target", "cpu", "--only", "minimal")
    rows = text.splitlines()
    assert [row.split()[0] for row in rows] == ["none", "minimal", "full"], "least work first"
    assert numbers(r"([\d.]+)%", rows[0]) == [0.0]


@pytest.mark.slow
@pytest.mark.long
def test_fit_tpu(capsys):
    text = printed("fit_tpu", capsys, "models:llama3_tiny", "--set", "seq=64", "--target", "cpu")
    assert "saved residuals" in text
    assert re.search(r"^full .* recomputed  ok", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.long
def test_plan_for_24gb(capsys, tmp_path):
    out = tmp_path / "plan.toml"
    text = printed("plan_for_24gb", capsys, "models:gpt2_tiny", "--target", "cpu", "--budget", "24GB", "--out", str(out), code=0)
    assert "--plan" in text
    assert out.read_text().count("none") >= 1, "everything fits in 24 GB: nothing is recomputed"
    assert "loss" in printed("own_loop", capsys, "--policy", f"@{out}")


@pytest.mark.slow
@pytest.mark.long
def test_long_context(capsys):
    text = printed("long_context", capsys, "models:llama3_tiny", "--target", "cpu", "--budget", "12MiB", "--set", "batch=1")
    (fits,), (fails,) = numbers(r"(\d+) tokens fit", text), numbers(r"(\d+) tokens do not", text)
    assert 0 < fits < fails


DRY = {
    "multi_gpu.sh": ({"GPUS": "4"}, ["h100:1x4"]),
    "multi_host_tpu.sh": ({"TPU": "mine", "TARGET": "v5p:2x2x4"}, ["v5p:2x2x4", "--worker all", "--coordinator auto"]),
}


@pytest.mark.parametrize("script", DRY)
def test_launch_scripts_say_what_they_would_run(script):
    variables, expected = DRY[script]
    subprocess.run(["bash", "-n", EXAMPLES / script], check=True)
    text = dry(script, **variables)
    for part in expected:
        assert part in text.replace("\\", "")  # as the shell would read it
    _check_training(text)


def test_under_slurm_there_is_a_process_per_gpu():
    text = dry("multi_gpu.sh", SLURM_JOB_NUM_NODES="2")
    assert "h100:2x8" in text
    assert "srun --ntasks 16 --ntasks-per-node 8 python -m train" in text
    _check_training(text)


def dry(script, **variables):
    """What a script would run."""
    environment = {"DRY_RUN": "1", "PATH": "/usr/bin:/bin", **variables}
    command = ["bash", EXAMPLES / script, "--log-every", "7"]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def _check_training(text):
    """The flags that a script gives to the training loop are flags that it has."""
    words = shlex.split(text.splitlines()[-1])
    words = next((shlex.split(word) for word in words if "-m train" in word), words)
    config = read_arguments(words[words.index("train") + 1 :]).config
    assert config.model.model.endswith("llama3_8b")
    assert config.run.log_every == 7


# Starts the tasks here, with the variables that Slurm gives each of them.
SRUN = """#!/bin/bash
num=$2; shift 4
for ((task = 0; task < num; task++)); do
    SLURM_NTASKS=$num SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_STEP_NODELIST=localhost "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || exit; done
"""


@pytest.mark.slow
@pytest.mark.long
def test_two_nodes_under_slurm_plan_and_train(tmp_path):
    """All but Slurm is real: the plan, JAX's finding its peers by Slurm's variables, the training on two devices."""
    for name, text in (("srun", SRUN), ("remat-kit", f'#!/bin/bash\nexec {sys.executable} -m remat_kit.cli "$@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    # JAX makes the port of the coordinator from the job's number.
    job = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(_free_port(61440) - 61440),
        "GPUS": "1",
        "TARGET": "cpu:2",
        "BUDGET": "1GiB",
    }
    sizes = {"MODEL": "gpt2_tiny", "BATCH": "8", "SEQ": "16", "STEPS": "5", "RUN": str(tmp_path / "run")}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    log = tmp_path / "log"
    with log.open("w") as file:
        code = subprocess.run(
            [EXAMPLES / "multi_gpu.sh", *("--files", *FILES, "--held-out", "0.2", "--log-every", "1", "--no-plot")],
            cwd=ROOT,
            env=environment(tmp_path / "programs") | job | sizes | {"PATH": path, "PLAN": str(tmp_path / "plan.toml")},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    assert code == 0, log.read_text()
    assert list(metrics(tmp_path / "run")["loss"]) == [1, 2, 3, 4, 5]
    assert saved_steps(tmp_path / "run") == [5]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["model"]["plan"] == str(tmp_path / "plan.toml")


def _free_port(least):
    for port in range(least, least + 4096):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no free port above {least}")


def test_the_list_has_every_example_and_its_question():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.*"):
        if path.suffix == ".py":
            question = path.read_text(encoding="utf-8").splitlines()[0].removeprefix('"""')
            assert f"| `{path.stem}` | {question} |" in text
        elif path.suffix == ".sh":
            question = path.read_text(encoding="utf-8").splitlines()[1].removeprefix("# ").split("?")[0]
            assert f"| `{path.name}` | {question}? |" in text
