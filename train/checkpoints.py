"""Checkpoints of a run: orbax, asynchronous, the newest few and the best; whole or not there at all.

One holds the state and a JSON record beside it: where the data are, the key, the plan, versions, and a fingerprint of every leaf.
Orbax writes into a temporary folder and renames it at the end, so a kill leaves whole checkpoints only; one that was damaged
afterwards is found by its fingerprints, and the one before is taken, with a warning. The tree of a state does not depend on the
plan, so any plan goes on from any checkpoint.
"""

import contextlib
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import msgspec
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers as managers

from train.errors import CheckpointError, OtherModelError, TrainWarning
from train.state import State, fingerprints, rebuild

DAMAGED_FOLDER = "damaged"
# Orbax takes no tree that is a single array, as a state may be.
_ROOT = "state"

# What the system says of a disk that is full, or of a quota, somewhere in a message of tensorstore.
_WRITE_FAILURE = re.compile(r"No space left on device|Disk quota exceeded|File too large|Read-only file system|Permission denied")

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a checkpoint says beside its state.

    Attributes:
        step: Steps done.
        position: Where the data are, see `train.feed.Feed.position`.
        data_fingerprint: Of the examples.
        batch: Pairs of name and shape of the batch; the position counts such batches.
        seed: Of the parameters' key.
        plan: Text of the plan that trained the steps before.
        versions: Package -> version.
        fingerprints: See `train.state.fingerprints`.
        leaves: Path of each leaf of the state -> its dtype and shape, as text.
    """

    step: int
    position: str
    data_fingerprint: str
    batch: tuple[tuple[str, tuple[int, ...]], ...]
    seed: int
    plan: str
    versions: Mapping[str, str]
    fingerprints: Mapping[str, int]
    leaves: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint, read.

    Attributes:
        state: Donatable, on the devices that were asked for.
        record: What it says.
    """

    state: State
    record: Record


def installed_versions() -> dict[str, str]:
    """Package -> version of what decides a run's numbers."""
    return {name: metadata.version(name) for name in PACKAGES}


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Opens the folder, which is made when it is not there.

        Args:
            folder: Where; shared by all processes.
            keep: Newest ones that are kept, beside the best.
        """
        best = managers.BestN(get_metric_fn=_loss_of, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(keep), best]),
            cleanup_tmp_directories=True,
            step_prefix="step",
        )
        self._folder = folder.resolve()
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def steps(self) -> list[int]:
        """Steps of the whole checkpoints there are, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: State, record: Record, *, held_out_loss: float | None) -> None:
        """Starts to write a checkpoint; returns when the state may be donated again.

        Args:
            state: To be saved.
            record: Beside it.
            held_out_loss: By which the best is chosen; None = it can't be the best.

        Raises:
            CheckpointError: It, or the one before, can't be written.
        """
        args = ocp.args.Composite(
            state=ocp.args.StandardSave({_ROOT: state}),  # type: ignore[call-arg]
            record=ocp.args.JsonSave(msgspec.to_builtins(record)),  # type: ignore[call-arg]
        )
        metrics = None if held_out_loss is None else {"loss": held_out_loss}
        with self._writing():
            self._manager.save(record.step, args=args, metrics=metrics)

    def restore(self, like: State) -> Restored | None:
        """Reads the newest checkpoint that is whole; damaged ones after it are set aside, as training will write them again.

        Args:
            like: Abstract state with shardings.

        Returns:
            It; None when there is no checkpoint at all.

        Raises:
            CheckpointError: There are some, and all are damaged.
            OtherModelError: The newest one that can be read is of another model.
        """
        failures: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                found = self._read(step, like)
            except OtherModelError:
                raise
            except Exception as error:  # noqa: BLE001 - a damaged file fails in as many ways as there are readers
                failures[step] = f"step {step}: {_first_line(error)}"
                warnings.warn(f"checkpoint of {failures[step]}; trying the one before.", TrainWarning, stacklevel=2)
            else:
                self._set_aside(failures)
                return found
        if failures:
            raise CheckpointError(f"no checkpoint can be read: {'; '.join(failures.values())}. Give another --dir to start anew.")
        return None

    def _set_aside(self, steps: Iterable[int]) -> None:
        """Moves checkpoints out of the way, into the folder `damaged` beside this one."""
        if jax.process_index() == 0:
            for step in steps:
                place = self._folder.parent / DAMAGED_FOLDER
                place.mkdir(exist_ok=True)
                (self._folder / f"step_{step}").rename(place / f"step_{step}-{time.time_ns()}")
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("damaged checkpoints set aside")
        self._manager.reload()

    def _read(self, step: int, like: State) -> Restored:
        told = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))
        record = msgspec.convert(told["record"], Record)
        _check_leaves(record, like, self._folder)
        args = ocp.args.Composite(state=ocp.args.StandardRestore({_ROOT: like}))  # type: ignore[call-arg]
        state = rebuild(self._manager.restore(step, args=args)["state"][_ROOT])
        wrong = [name for name, number in fingerprints(state).items() if record.fingerprints.get(name) != number]
        if wrong:
            raise CheckpointError(f"damaged: the bits of {', '.join(wrong[:3])} are not those that were saved")
        return Restored(state=state, record=record)

    def wait(self) -> None:
        """Waits until every checkpoint that was started is there."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads that write."""
        self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says what a failed write means; that of an earlier checkpoint may come out of a later call."""
        try:
            yield
        except Exception as error:
            reason = _WRITE_FAILURE.search(str(error))
            if reason is None:
                raise
            run = self._folder.parent
            raise CheckpointError(
                f"{self._folder}: a checkpoint can't be written: {reason[0]}. Those before it are whole: make room, then go "
                f"on with --resume {run}."
            ) from error


def _loss_of(metrics: Any) -> float:
    return metrics["loss"]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:200]}"


def described_leaves(state: State) -> dict[str, str]:
    """Path of each leaf -> its dtype and shape, like "float32[2, 64]"."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_leaves(record: Record, like: State, folder: Path) -> None:
    there, here = dict(record.leaves), described_leaves(like)
    wrong = [name for name in there | here if there.get(name) != here.get(name)]
    if wrong:
        name = wrong[0]
        raise OtherModelError(
            f"the checkpoint of step {record.step} in {folder} is of another model: its {name} is {there.get(name, 'missing')}, "
            f"the model's {here.get(name, 'missing')}. Give the --model and options that it had, or another --dir."
        )


def abstract_batch(batch: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Pairs of name and shape, as records hold them."""
    return tuple((name, tuple(leaf.shape)) for name, leaf in sorted(batch.items()))
