"""Small runs of `train/` for tests: in this process on one CPU device, or as processes of their own that can be killed."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from train.run import train

ROOT = Path(__file__).parent.parent
STDLIB = Path(sysconfig.get_path("stdlib"))
FILES = tuple(str(STDLIB / name) for name in ("json", "email", "logging"))

QUICK_XLA = "xla_backend_optimization_level=0"
QUICK = TrainConfig(
    model=ModelConfig(model="gpt2_tiny", batch=4, seq=16, dtype="float32", policy="full"),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup=2),
    data=DataConfig(files=FILES, held_out=0.2),
    run=RunConfig(steps=12, log_every=1, eval_every=6, eval_batches=2, checkpoint_every=4, keep=2, plot=False, xla=(QUICK_XLA,)),
)


def changed(config=QUICK, **groups):
    """The configuration with keys changed, such as model={"policy": "none"}."""
    made = {name: dataclasses.replace(getattr(config, name), **values) for name, values in groups.items()}
    return dataclasses.replace(config, **made)


def run(folder, *, resume=False, **groups):
    """A run in this process; gives its summary and the lines it told."""
    lines = []
    config = changed(changed(**groups), run={"dir": str(folder)})
    summary = train(config, jax.devices("cpu")[:1], resume=str(folder) if resume else None, tell=lines.append)
    return summary, lines


def metrics(folder):
    """Name -> step -> number, of a run's `metrics.jsonl`."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        numbers = json.loads(line)
        for name in numbers.keys() - {"step"}:
            found.setdefault(name, {})[numbers["step"]] = numbers[name]
    return found


def saved_steps(folder):
    """Steps of the checkpoints of a run."""
    names = [re.fullmatch(r"step_(\d+)", path.name) for path in (folder / "checkpoints").glob("step_*")]
    return sorted(int(name[1]) for name in names if name)


def saved_state(folder, step):
    """Arrays of a checkpoint, by orbax alone, on one device."""
    path = folder.resolve() / "checkpoints" / f"step_{step}" / "state"
    with ocp.StandardCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), tree)
        return jax.tree.map(np.asarray, reader.restore(path, like))


def same_bits(tree, other):
    """Whether two trees have the same structure, dtypes and bits."""
    if jax.tree.structure(tree) != jax.tree.structure(other):
        return False
    return all(
        a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(*map(jax.tree.leaves, (tree, other)), strict=True)
    )


ARGUMENTS = (
    *("--batch", "8", "--seq", "16", "--dtype", "float32", "--no-plot", "--eval-batches", "2", "--eval-every", "0"),
    *("--log-every", "1", "--xla", QUICK_XLA, "--held-out", "0.2", "--files", *FILES),
)


def environment(cache):
    """Of a process: one CPU device unless told otherwise, and compiled programs kept in a folder."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return (
        kept
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cache)}
        | {
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    )


def start(module, *args, cache, log):
    """Starts `python -m MODULE ARGS` with its output in a file."""
    with Path(log).open("ab") as file:
        command = [sys.executable, "-m", module, *args]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(cache), stdout=file, stderr=subprocess.STDOUT)
    STARTED.append(process)
    return process


STARTED = []
"""Processes that `start` started."""


def end_all():
    """Ends what a failed test left running; the launcher passes SIGTERM on and kills what does not end."""
    for process in STARTED:
        if process.poll() is None:
            process.terminate()
            process.wait(30)
    STARTED.clear()


def finish(process, log, timeout_s=300):
    """Waits for a process; gives its exit code and its output."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(Path(log).read_text(errors="replace")) from None
    return code, Path(log).read_text(errors="replace")


def wait_for(ready, process, log, timeout_s=300):
    """Waits until something is so while a process runs."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert process.poll() is None, Path(log).read_text(errors="replace")
        assert time.monotonic() < deadline, Path(log).read_text(errors="replace")
        time.sleep(0.02)


def steps_logged(folder):
    """Steps that a run has logged so far."""
    path = folder / "metrics.jsonl"
    return max([0, *(json.loads(line)["step"] for line in path.read_text().splitlines()[:-1])]) if path.is_file() else 0
