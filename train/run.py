"""One run, from a configuration to a summary: builds the steps, finds the data, opens the folder, resumes, trains, sums up.

The folder holds `config.json` (the effective configuration), `checkpoints/`, `metrics.jsonl`, `tensorboard/`, `summary.json` and
`loss.png`. With several processes all of them write checkpoints, and process 0 everything else.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec

from models import ModelStep
from remat_kit import Step
from remat_kit.files import default_mode, write_whole
from train.build import Built, build_steps, compile_step
from train.checkpoints import Checkpoints, Record, Restored, abstract_batch, described_leaves, installed_versions
from train.config import TrainConfig, to_mapping
from train.data import Splits, load_splits
from train.errors import CheckpointError
from train.failures import explained
from train.feed import Feed
from train.folder import CHECKPOINTS_FOLDER, SUMMARY_FILE, choose_folder, store_config
from train.heartbeat import heartbeat
from train.loop import End, Intervals, run_loop
from train.plans import Promise
from train.plot import plot_run
from train.recorder import Recorded, Recorder
from train.state import State, fingerprints
from train.stopping import stop_signal
from train.summary import Outcome, Summary, summarise, summary_text

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run before its first step.

    Attributes:
        config: The effective configuration.
        folder: Where it writes.
        built: Its steps.
        splits: Its data.
        compiled: The step, compiled.
        checkpoints: Of the folder.
        tell: Takes lines for people.
    """

    config: TrainConfig
    folder: Path
    built: Built
    splits: Splits
    compiled: Any
    checkpoints: Checkpoints
    tell: Tell


def train(config: TrainConfig, devices: Sequence[jax.Device], *, resume: str | None, tell: Tell) -> Summary:
    """Trains.

    Args:
        config: The run.
        devices: All of it, those of other processes included.
        resume: Folder of the run to go on with; None = a new run.
        tell: Takes lines for people; called by process 0 only.

    Returns:
        What was measured; it is also in the folder, as `summary.json`.

    Raises:
        RematKitError: Bad input, or a run that diverged.
    """
    tell = tell if jax.process_index() == 0 else _silent
    built = build_steps(config, devices)
    batch = built.step.args[1]
    num_labels = built.step.num_labels if isinstance(built.step, ModelStep) else None
    splits = load_splits(config.data, batch, num_labels=num_labels)
    folder = choose_folder(config, resume)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=str(folder)))
    if resume is None:
        _store(config, folder)
    _announce(config, built, splits, tell)
    checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, keep=config.run.keep)
    try:
        with explained(built):
            run = Prepared(
                config=config,
                folder=folder,
                built=built,
                splits=splits,
                compiled=compile_step(built),
                checkpoints=checkpoints,
                tell=tell,
            )
            return _run(run)
    finally:
        checkpoints.close()


def _store(config: TrainConfig, folder: Path) -> None:
    if jax.process_index() == 0:
        store_config(config, folder)


def _silent(_: str) -> None:
    return


def _announce(config: TrainConfig, built: Built, splits: Splits, tell: Tell) -> None:
    for group, values in to_mapping(config).items():
        tell(f"[{group}] " + " ".join(f"{name}={json.dumps(value)}" for name, value in values.items()))
    for note in (*built.step.notes, *splits.notes):
        tell(note)
    tell(f"plan: {built.plan} (from {built.plan.source})")
    tell(f"the same step for a target: {built.question}")


def _run(run: Prepared) -> Summary:
    config, step = run.config, run.built.step
    feed = Feed(run.splits.train, step.args[1], num_batches=config.run.steps, seed=config.data.data_seed)
    state, first_step = _begin(run, feed, run.checkpoints.restore(step.args[0]))
    _store(config, run.folder)  # not before: what a run can't go on with is not what the next --resume should find
    recorder = Recorder(
        Recorded(
            config=config,
            folder=run.folder,
            built=run.built,
            splits=run.splits,
            compiled=run.compiled,
            first_step=first_step,
            tell=run.tell,
        )
    )

    def save(state: State, step: int, loss: float | None) -> None:
        run.checkpoints.save(state, _record(run, state, feed, step), held_out_loss=loss)

    with stop_signal() as should_stop, recorder:
        hooks = recorder.hooks(save=save, beat=heartbeat(run.folder), should_stop=should_stop)
        end = run_loop(state, feed, first_step=first_step, intervals=_intervals(config), hooks=hooks)
    run.checkpoints.wait()
    return _finish(run, recorder, end)


def _intervals(config: TrainConfig) -> Intervals:
    run = config.run
    return Intervals(steps=run.steps, log=run.log_every, evaluate=run.eval_every, checkpoint=run.checkpoint_every)


def _begin(run: Prepared, feed: Feed, restored: Restored | None) -> tuple[State, int]:
    """The state to start from and the steps that it has done; the feed goes there too."""
    if restored is None:
        return _fresh_state(run.built.step, run.config.run.seed), 0
    record = restored.record
    _check_record(run, record)
    feed.go_to(record.position)
    plan = str(run.built.plan)
    run.tell(f"going on from step {record.step}" + ("" if plan == record.plan else f", which was trained under {record.plan}"))
    changed = [name for name, version in installed_versions().items() if record.versions.get(name) != version]
    if changed:
        run.tell(f"other versions than before, so not to the bit: {', '.join(changed)}")
    return restored.state, record.step


def _fresh_state(step: Step, seed: int) -> State:
    key = jax.random.key(seed)
    if isinstance(step, ModelStep):
        return step.make_state(key)
    assert step.init is not None
    return step.init(key)[0]


def _check_record(run: Prepared, record: Record) -> None:
    batch = abstract_batch(run.built.step.args[1])
    if record.data_fingerprint != run.splits.fingerprint:
        raise CheckpointError(
            f"{run.folder} was trained on other data: the files, --seq, the tokenizer or --held-out changed since. "
            "Give what it had, or another --dir to start anew."
        )
    if record.batch != batch:
        raise CheckpointError(
            f"{run.folder} took batches of {_shapes(record.batch)}, now they are {_shapes(batch)}, and the position in the data "
            "counts batches: give the --batch and --seq that it had."
        )


def _shapes(batch: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in batch)


def _record(run: Prepared, state: State, feed: Feed, step: int) -> Record:
    return Record(
        step=step,
        position=feed.position,
        data_fingerprint=run.splits.fingerprint,
        batch=abstract_batch(run.built.step.args[1]),
        seed=run.config.run.seed,
        plan=str(run.built.plan),
        versions=installed_versions(),
        fingerprints=fingerprints(state),
        leaves=described_leaves(state),
    )


def _finish(run: Prepared, recorder: Recorder, end: End) -> Summary:
    built, promise = run.built, run.built.plan.promise
    fits = promise is not None and promise.device_kind == jax.local_devices()[0].device_kind
    outcome = Outcome(
        step=end.step,
        was_stopped=end.was_stopped,
        plan=str(built.plan),
        promise=promise if fits else None,
        held_out_loss=recorder.held_out_loss,
        floor=run.splits.floor,
        floor_name=run.splits.floor_name,
        recompute_percent=100 * built.remat_flops / max(built.model_flops, 1),
        is_growth=recorder.memory.is_process,
        notes=_notes(run, promise, fits=fits),
    )
    summary = summarise(outcome, recorder.logged, steps=run.config.run.steps, unit=run.splits.unit)
    if jax.process_index() == 0:
        write_whole(run.folder / SUMMARY_FILE, msgspec.json.encode(summary), mode=default_mode())
        _plot(run)
    run.tell(summary_text(summary))
    if end.was_stopped:
        run.tell(f"saved; to go on: --resume {run.folder}")
    return summary


def _notes(run: Prepared, promise: Promise | None, *, fits: bool) -> tuple[str, ...]:
    notes = []
    if promise is not None and not fits:
        notes.append(f"the plan was made for {promise.target}: its bytes and seconds are not comparable with those here")
    if run.built.evaluate is None:
        notes.append("no evaluation: the factory returns a Step, not a models.ModelStep")
    return tuple(notes)


def _plot(run: Prepared) -> None:
    if run.config.run.plot:
        run.tell(plot_run(run.folder, floor=run.splits.floor, floor_name=run.splits.floor_name))
