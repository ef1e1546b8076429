"""Compiled against real on a CPU: what a run says of its memory, in a step with more than 4 GiB of temps."""

import json

import pytest

from tests.train_runs import FILES, finish, start

GIB = 2**30


@pytest.mark.slow
@pytest.mark.long
def test_the_process_grows_by_what_was_compiled(tmp_path):
    """Many short sequences without rematerialization, f32: 6.3 GiB of temps, no buffer that matters alone, and few FLOPs.

    With a few large buffers it may not hold: the library's copy of one operand of attention over 2048 tokens was 0.75 GiB.
    """
    args = ("--model", "llama3_tiny", "--set", "layers=3", "chunk=4", "--batch", "16384", "--seq", "16", "--dtype", "float32")
    data = ("--files", *FILES, "--held-out", "0.2", "--steps", "1", "--log-every", "1", "--eval-batches", "1", "--no-plot")
    run = start("train", "--dir", str(tmp_path / "run"), *args, *data, cache=tmp_path / "programs", log=tmp_path / "log")
    code, output = finish(run, tmp_path / "log", timeout_s=900)
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["is_growth"]
    assert summary["promised_bytes"] > 4 * GIB
    assert summary["peak_bytes"] == pytest.approx(summary["promised_bytes"], rel=0.1), output
