"""What a run records while it trains: progress lines, metrics, evaluation, and the diagnosis of a loss that is not finite.

A `Recorder` is the loop's other half: it knows the model's FLOPs, the device's peak, the promises and the folder, and gives the
loop its hooks. Processes other than 0 evaluate with the rest and write nothing.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from models import ModelStep, make_schedule
from train.build import Built
from train.config import TrainConfig
from train.data import Splits
from train.devices import peak_flops_per_s
from train.errors import DataError
from train.feed import held_out_batches
from train.loop import Hooks, Numbers, checks_donation
from train.memory import MemoryWatch, Promised, promised_memory
from train.metrics import MetricsWriter
from train.progress import Progress, progress_line
from train.state import State, non_finite_leaves
from train.stopping import ShouldStop

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a recorder is made of.

    Attributes:
        config: The effective configuration.
        folder: Where it writes.
        built: The steps.
        splits: The data.
        compiled: The step, compiled.
        first_step: Steps done before.
        tell: Takes lines for people.
    """

    config: TrainConfig
    folder: Path
    built: Built
    splits: Splits
    compiled: Any
    first_step: int
    tell: Tell


class Recorder(AbstractContextManager["Recorder"]):
    """Records a run; enter it when the state is there and no step has run."""

    def __init__(self, run: Recorded) -> None:
        """Prepares what every line needs."""
        self.run = run
        self.logged: list[Progress] = []
        self.held_out_loss: float | None = None
        self._batch = run.built.step.args[1]
        self._promised: Promised | None = promised_memory(run.compiled)
        self._device = jax.local_devices()[0]
        self._rate = _learning_rate(run.built)
        self._evaluate = _weighted_evaluation(run.built)

    def __enter__(self) -> "Recorder":
        """Opens the files, on process 0, and starts to watch memory."""
        is_writer = jax.process_index() == 0
        self._writer = MetricsWriter(self.run.folder, first_step=self.run.first_step) if is_writer else None
        self.memory = MemoryWatch(self._device)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the files."""
        if self._writer is not None:
            self._writer.close()

    def hooks(
        self, *, save: Callable[[State, int, float | None], None], beat: Callable[[int], None], should_stop: ShouldStop
    ) -> Hooks:
        """The loop's hooks."""
        return Hooks(
            step=checks_donation(self.run.compiled),
            evaluate=None if self._evaluate is None else self._evaluate_and_tell,
            save=save,
            show=self._show,
            explain=self._explain,
            beat=beat,
            should_stop=should_stop,
        )

    def _show(self, step: int, numbers: Numbers, step_time_s: float) -> None:
        progress = self._progress(step, numbers, step_time_s)
        self.logged.append(progress)
        self.run.tell(progress_line(progress))
        self._write(
            step,
            {
                **numbers,
                "learning_rate": progress.learning_rate,
                "step_time_s": step_time_s,
                f"{progress.unit}_per_s": progress.units_per_s,
                "utilization": progress.utilization,
                "peak_bytes": progress.peak_bytes,
                "promised_bytes": progress.promised_bytes,
            },
        )

    def _progress(self, step: int, numbers: Numbers, step_time_s: float) -> Progress:
        run = self.run
        return Progress(
            step=step,
            steps=run.config.run.steps,
            loss=numbers["loss"],
            grad_norm=numbers.get("grad_norm"),
            learning_rate=self._rate(step),
            step_time_s=step_time_s,
            units_per_s=math.prod(self._batch["weights"].shape) / step_time_s,
            unit=run.splits.unit,
            flops_per_s=run.built.model_flops / step_time_s,
            peak_flops_per_s=peak_flops_per_s(self._device, run.config.run.peak_flops),
            peak_bytes=self.memory.peak_bytes(),
            promised_bytes=self.memory.promised_bytes(self._promised),
            is_growth=self.memory.is_process,
        )

    def _write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        if self._writer is not None:
            self._writer.write(step, numbers)

    def _evaluate_and_tell(self, state: State, step: int) -> float:
        assert self._evaluate is not None
        batches = held_out_batches(self.run.splits.held_out, self._batch, num_batches=self.run.config.run.eval_batches)
        sums = [jax.device_get(self._evaluate(state.params, batch)) for batch in batches]
        weight = sum(weight for _, weight in sums)
        if not weight:
            raise DataError(f"--data {self.run.config.data.data}: no weight of the held-out examples is above 0.")
        loss = float(sum(total for total, _ in sums) / weight)
        self.held_out_loss = loss
        floor, name = self.run.splits.floor, self.run.splits.floor_name
        self.run.tell(f"step {step}: held-out loss {loss:.4f}" + (f" ({name}: {floor:.4f})" if floor is not None else ""))
        self._write(step, {"held_out_loss": loss})
        return loss

    def _explain(self, step: int, numbers: Numbers, before: Numbers, state: State) -> str:
        return explain_divergence(
            step,
            numbers,
            before,
            bad_leaves=non_finite_leaves(state),
            learning_rate=self._rate(step),
            folder=self.run.folder,
        )


def _learning_rate(built: Built) -> Callable[[int], float | None]:
    """Number of a step -> its learning rate; None where the step doesn't say."""
    if not isinstance(built.step, ModelStep):
        return lambda _: None
    schedule = make_schedule(built.step.optimizer)
    return lambda step: float(np.asarray(schedule(step - 1)))  # pyright: ignore[reportArgumentType]


def _weighted_evaluation(built: Built) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]] | None:
    evaluate = built.evaluate
    if evaluate is None:
        return None

    def weighted(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        weight = batch["weights"].sum()
        return evaluate(params, batch) * weight, weight

    return jax.jit(weighted)


def explain_divergence(
    step: int,
    numbers: Numbers,
    before: Numbers,
    *,
    bad_leaves: list[str],
    learning_rate: float | None,
    folder: Path,
) -> str:
    """Says that a number is not finite, since when, and what to look at."""
    now = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
    then = ", ".join(f"{name} {value:.4g}" for name, value in before.items()) or "none, it was the first one"
    rate = "" if learning_rate is None else f" The learning rate was {learning_rate:.3g}: try a lower one, or a longer --warmup."
    leaves = f" Not finite are now: {', '.join(bad_leaves[:4])}{' …' if len(bad_leaves) > 4 else ''}." if bad_leaves else ""
    return (
        f"step {step}: {now}. The step before: {then}.{leaves}{rate} A gradient norm that grew before points to the learning "
        "rate, a sudden one to the batch of this step or to the dtype: --dtype float32 tells. JAX_DEBUG_NANS=1 names the "
        "operation. "
        f"Nothing after the newest checkpoint in {folder} was saved: --resume {folder} goes on from it."
    )
