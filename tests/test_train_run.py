"""Whole runs on one CPU device: they learn, resume to the bit, keep the right checkpoints, and say what went wrong."""

import json
import shutil
import warnings

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from tests.train_runs import changed, metrics, run, same_bits, saved_state, saved_steps
from train.cli import read_arguments
from train.data import Splits
from train.errors import CheckpointError, DataError, DivergedError, OtherModelError, TrainWarning

# orbax drops the futures of a checkpoint that could not be read.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def compiled_programs(tmp_path_factory):
    """Equal programs of this module are compiled once."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0.0, -1), strict=True):
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 steps, never interrupted: its folder, its summary and its lines."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, *run(folder)


def test_it_learns_and_says_what_was_promised(whole):
    folder, summary, lines = whole
    losses = metrics(folder)["loss"]
    assert list(losses) == list(range(1, 13))
    assert losses[12] < losses[1] - 1.0
    assert summary.held_out_loss == metrics(folder)["held_out_loss"][12]
    assert summary.step == 12
    assert not summary.was_stopped
    assert summary.step_time_s is not None
    assert summary.promised_bytes is not None
    assert 15 < summary.recompute_percent < 35
    text = "\n".join(lines)
    assert "plan: full (from --policy)" in text
    assert "remat-kit compare models:gpt2_tiny --set batch=4" in text
    assert "step 12/12  loss" in text
    assert "a unigram model has" in text
    assert json.loads((folder / "summary.json").read_text())["held_out_loss"] == summary.held_out_loss


def test_the_newest_checkpoints_are_kept(whole):
    assert saved_steps(whole[0]) == [8, 12]


def test_tensorboard_has_the_same_numbers(whole):
    folder = whole[0]
    (events,) = (folder / "tensorboard").glob("events*")
    data, found = events.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        event = event_pb2.Event.FromString(data[12 : 12 + size])
        data = data[16 + size :]
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    expected = metrics(folder)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found["loss"].values()), list(expected["loss"].values()), rtol=1e-6)


def test_a_run_that_was_interrupted_ends_with_the_same_bits(whole, tmp_path):
    folder = tmp_path / "twin"
    with pytest.raises(KeyboardInterrupt):
        interrupted(folder, after=6)
    assert saved_steps(folder) == [4]
    _, lines = run(folder, resume=True)
    assert "going on from step 4" in lines
    assert same_bits(saved_state(folder, 12), saved_state(whole[0], 12))
    assert metrics(folder)["loss"] == metrics(whole[0])["loss"]


def interrupted(folder, *, after, **groups):
    """A run that ends hard after a step, between two checkpoints."""
    import train.recorder as recording

    def show(self, step, numbers, step_time_s):
        shown(self, step, numbers, step_time_s)
        if step == after:
            raise KeyboardInterrupt

    shown = recording.Recorder._show
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording.Recorder, "_show", show)
        run(folder, **groups)


@pytest.mark.parametrize("plan", ["none", "full*1 | save(q,attn)*1", "dots"])
def test_any_plan_goes_on_from_any_checkpoint(whole, tmp_path, plan):
    folder = copied(whole[0], tmp_path, up_to=8)
    summary, lines = run(folder, resume=True, model={"policy": plan})
    assert "going on from step 8, which was trained under full" in lines
    assert summary.plan == plan
    np.testing.assert_allclose(metrics(folder)["loss"][12], metrics(whole[0])["loss"][12], rtol=1e-5)


def copied(folder, tmp_path, *, up_to):
    """A copy of a run without its later checkpoints."""
    twin = tmp_path / "twin"
    shutil.copytree(folder, twin)
    for step in saved_steps(twin):
        if step > up_to:
            shutil.rmtree(twin / "checkpoints" / f"step_{step}")
    return twin


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.unlink()], ids=["cut", "a bit flipped", "missing"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(whole, tmp_path, damage):
    folder = tmp_path / "twin"
    shutil.copytree(whole[0], folder)
    damage(largest_file(folder / "checkpoints" / "step_12" / "state"))
    with pytest.warns(TrainWarning, match="checkpoint of step 12: .*; trying the one before"):
        _, lines = run(folder, resume=True)
    assert "going on from step 8" in lines
    assert same_bits(saved_state(folder, 12), saved_state(whole[0], 12))
    assert [path.name.split("-")[0] for path in (folder / "damaged").iterdir()] == ["step_12"]


def test_a_partial_checkpoint_is_no_checkpoint(whole, tmp_path):
    folder = copied(whole[0], tmp_path, up_to=8)
    partial = folder / "checkpoints" / "step_12.orbax-checkpoint-tmp"
    shutil.copytree(folder / "checkpoints" / "step_8", partial)
    _, lines = run(folder, resume=True)
    assert "going on from step 8" in lines
    assert not partial.exists()


def test_when_all_are_damaged_it_says_so(whole, tmp_path):
    folder = tmp_path / "twin"
    shutil.copytree(whole[0], folder)
    for step in (8, 12):
        cut(largest_file(folder / "checkpoints" / f"step_{step}" / "state"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainWarning)
        with pytest.raises(CheckpointError, match=r"no checkpoint can be read: step 12: .*; step 8: "):
            run(folder, resume=True)


def test_the_best_checkpoint_stays(tmp_path):
    """A learning rate that spoils the model makes the first evaluated checkpoint the best one."""
    run(
        tmp_path,
        run={"eval_every": 2, "checkpoint_every": 2, "keep": 1},
        optimizer={"learning_rate": 3.0, "warmup": 2, "decay": False},
    )
    losses = metrics(tmp_path)["held_out_loss"]
    best = min(losses, key=losses.get)
    assert best < 12
    assert saved_steps(tmp_path) == [best, 12]


def test_other_data_or_batches_are_not_gone_on_with(whole, tmp_path):
    folder = copied(whole[0], tmp_path, up_to=8)
    with pytest.raises(CheckpointError, match="was trained on other data"):
        run(folder, resume=True, data={"held_out": 0.3})
    with pytest.raises(CheckpointError, match=r"took batches of .*give the --batch and --seq that it had"):
        run(folder, resume=True, model={"batch": 8})
    assert read_arguments(["--resume", str(folder)]).config.model.batch == 4, "what failed is not what the next one finds"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"model": "llama3_tiny"}, r"step 8 .* is of another model: its .params\['embedding'\] is float32\[257, 64\], the "),
        ({"set": ("layers=3",)}, r"is of another model: its .* is float32\[2, 64\], the model's float32\[3, 64\]\."),
    ],
)
def test_another_model_does_not_go_on(whole, tmp_path, model, message):
    folder = copied(whole[0], tmp_path, up_to=8)
    with pytest.raises(OtherModelError, match=message):
        run(folder, resume=True, model={**model, "policy": "none"})


def test_a_run_that_is_done_stays_done(whole, tmp_path):
    folder = copied(whole[0], tmp_path, up_to=12)
    summary, _ = run(folder, resume=True)
    assert (summary.step, summary.loss) == (12, None)
    assert saved_steps(folder) == [8, 12]


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(tmp_path):
    with pytest.raises(DivergedError) as caught:
        run(tmp_path, optimizer={"learning_rate": 1e38, "warmup": 0, "decay": False}, run={"checkpoint_every": 1})
    message = str(caught.value)
    step = int(message.split(":")[0].removeprefix("step "))
    assert 1 < step <= 4
    assert saved_steps(tmp_path)[-1] < step
    for words in (
        "The step before: ",
        "The learning rate was 1e+38",
        "Not finite are now: ",
        "JAX_DEBUG_NANS=1",
        "--dtype float32",
    ):
        assert words in message


def test_a_foreign_step_trains_without_evaluation(tmp_path):
    model = {"model": "tests.test_train_run:foreign", "policy": None, "dtype": "auto"}
    summary, lines = run(tmp_path, model=model, run={"steps": 4, "checkpoint_every": 2, "plot": True})
    assert summary.held_out_loss is None
    assert any("no evaluation" in line for line in lines)
    assert saved_steps(tmp_path) == [2, 4]
    assert (tmp_path / "loss.png").read_bytes()[1:4] == b"PNG"


def foreign(policies, devices, *, batch: int = 4, seq: int = 16, mesh: str = ""):
    """A step that `models/` knows nothing of: a table of next tokens."""
    import jax.numpy as jnp

    from remat_kit import Stack, Step

    del policies, mesh

    def fn(table, batch):
        def loss(table):
            logits = table[batch["tokens"]]
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1)
            return -picked.mean()

        value, grads = jax.value_and_grad(loss)(table)
        return table - grads, {"loss": value}

    here = jax.sharding.SingleDeviceSharding(devices[0])
    spec = {name: jax.ShapeDtypeStruct((batch, seq), dtype, sharding=here) for name, dtype in DTYPES.items()}
    table = jax.ShapeDtypeStruct((256, 256), "float32", sharding=here)
    return Step(
        fn=fn,
        args=(table, spec),
        donate=(0,),
        stacks=(Stack(name="layers", num_layers=1),),
        init=lambda key: (jax.random.normal(key, (256, 256)), None),
    )


DTYPES = {"tokens": "int32", "labels": "int32", "weights": "float32"}


def masked(config, batch, *, held_out_weight=1.0):
    """Text in which every place is masked."""
    rng = np.random.default_rng(0)
    seq = batch["tokens"].shape[1]

    def example(weight):
        tokens = rng.integers(0, 256, seq + 1, np.int32)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "weights": np.full(seq, weight, np.float32)}

    kept = [example(held_out_weight)]
    return Splits(train=[example(0.0) for _ in range(9)], held_out=kept, num_labels=256, fingerprint="f", unit="tokens")


def masked_everywhere(config, batch):
    """The same with nothing to evaluate on either."""
    return masked(config, batch, held_out_weight=0.0)


def test_batches_without_any_token_change_nothing_and_warn(tmp_path):
    data, length = {"data": "tests.test_train_run:masked"}, {"steps": 4, "checkpoint_every": 2, "eval_every": 0}
    with pytest.warns(TrainWarning, match=r"step \d: loss and gradient are 0, as when no weight of its batch"):
        run(tmp_path, data=data, run=length)
    before, after = (saved_state(tmp_path, step)["state"] for step in (2, 4))
    for part in ("params", "opt_state"):
        assert same_bits(before[part], after[part])
    assert (before["step"], after["step"]) == (2, 4)


def test_nothing_to_evaluate_on_is_an_error(tmp_path):
    data = {"data": "tests.test_train_run:masked_everywhere"}
    with pytest.warns(TrainWarning), pytest.raises(DataError, match="no weight of the held-out examples is above 0"):
        run(tmp_path, data=data, run={"steps": 4})


def test_changed_keeps_the_rest():
    assert changed(run={"steps": 3}).model == changed().model
