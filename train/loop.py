"""The loop: batches through the compiled step, with logging, evaluation, checkpoints and an early end.

In: a state, a feed and `Hooks`, which `train.run` puts together. Out: the last state and how far it came. The host stays one step
ahead of the devices: a step's numbers are looked at when the next one is under way, or before they are shown or saved, so a loss
that is not finite never gets into a checkpoint.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from train.errors import DivergedError, TrainWarning
from train.state import State, buffer_addresses, reused_share
from train.stopping import ShouldStop

Batch = Mapping[str, jax.Array]
Numbers = Mapping[str, float]

# Below it a state was held twice in its first step.
LEAST_REUSED_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """How long and how often, in steps; 0 = only at the end.

    Attributes:
        steps: In all.
        log: Between logged steps.
        evaluate: Between evaluations.
        checkpoint: Between checkpoints.
    """

    steps: int
    log: int
    evaluate: int
    checkpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What the loop calls.

    Attributes:
        step: The compiled step, which takes its state for good.
        evaluate: (state, steps done) -> loss on what was held out; None = the step can't be evaluated.
        save: (state, steps done, held-out loss or None); starts to write a checkpoint.
        show: (steps done, numbers of the last step, mean seconds of a step since the last call).
        explain: (steps done, its numbers, those of the step before, a state) -> why a number is not finite, for people.
        beat: (steps done), before each step.
        should_stop: See `train.stopping`.
    """

    step: Callable[[State, Batch], tuple[State, Mapping[str, jax.Array]]]
    evaluate: Callable[[State, int], float] | None
    save: Callable[[State, int, float | None], None]
    show: Callable[[int, Numbers, float], None]
    explain: Callable[[int, Numbers, Numbers, State], str]
    beat: Callable[[int], None]
    should_stop: ShouldStop


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a loop ended.

    Attributes:
        state: The last one.
        step: Steps done.
        was_stopped: Whether it ended before the last step, by a signal.
    """

    state: State
    step: int
    was_stopped: bool


class _Clock:
    """Mean seconds of a step between two laps; what happens before `restart` does not count."""

    def __init__(self) -> None:
        self.restart(0)

    def restart(self, step: int) -> None:
        self._start, self._step = time.perf_counter(), step

    def lap(self, step: int) -> float:
        mean = (time.perf_counter() - self._start) / max(step - self._step, 1)
        self.restart(step)
        return mean


class _Watch:
    """Runs steps and looks at each one's numbers when the next one is under way."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._pending: tuple[int, Mapping[str, jax.Array]] | None = None
        self._last: Numbers = {}

    def run(self, state: State, batch: Batch, step: int) -> State:
        """The state after step number `step`."""
        state, metrics = self._hooks.step(state, batch)
        earlier, self._pending = self._pending, (step, metrics)
        self._look(earlier, state)
        return state

    def flush(self, state: State) -> Numbers:
        """Numbers of the last step, once it is done."""
        pending, self._pending = self._pending, None
        self._look(pending, state)
        return self._last

    def _look(self, pending: tuple[int, Mapping[str, jax.Array]] | None, state: State) -> None:
        if pending is None:
            return
        step, metrics = pending
        numbers = {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
        if not all(map(math.isfinite, numbers.values())):
            raise DivergedError(self._hooks.explain(step, numbers, self._last, state))
        if numbers["loss"] == numbers.get("grad_norm") == 0.0:
            warnings.warn(f"step {step}: loss and gradient are 0, as when no weight of its batch is above 0.", TrainWarning, 2)
        self._last = numbers


def run_loop(state: State, feed: Iterator[Batch], *, first_step: int, intervals: Intervals, hooks: Hooks) -> End:
    """Trains.

    Args:
        state: After `first_step` steps; it is used up.
        feed: Batches from there on.
        first_step: Steps done before.
        intervals: How long and how often.
        hooks: What is called.

    Returns:
        The last state, shown and saved; evaluated too unless a signal ended the loop.

    Raises:
        DivergedError: A loss or a gradient norm was not finite.
    """
    watch, clock = _Watch(hooks), _Clock()
    step = first_step
    clock.restart(step)
    stops = step >= intervals.steps or hooks.should_stop(step)
    while not stops:
        hooks.beat(step)
        state = watch.run(state, next(feed), step + 1)
        step += 1
        ends = step == intervals.steps
        stops = ends or hooks.should_stop(step)
        if stops or _is_due(step, intervals.log):
            hooks.show(step, watch.flush(state), clock.lap(step))
        saves = stops or _is_due(step, intervals.checkpoint)
        evaluates = hooks.evaluate is not None and (ends or _is_due(step, intervals.evaluate))
        if saves or evaluates:
            watch.flush(state)
            loss = hooks.evaluate(state, step) if evaluates and hooks.evaluate is not None else None
            if saves:
                hooks.save(state, step, loss)
            clock.restart(step)
    return End(state=state, step=step, was_stopped=step < intervals.steps)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def checks_donation(step: Callable[[State, Batch], Any]) -> Callable[[State, Batch], Any]:
    """The step, which in its first call warns when the new state does not lie in the buffers of the old one."""
    calls = 0

    def checked(state: State, batch: Batch) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            return step(state, batch)
        before = buffer_addresses(state)
        made = step(state, batch)
        share = reused_share(before, buffer_addresses(made[0]))
        if share < LEAST_REUSED_SHARE:
            warnings.warn(
                f"the first step reused {100 * share:.0f} % of the state's memory: the state is held twice. "
                "Are all its leaves donated, and made by JAX?",
                TrainWarning,
                stacklevel=2,
            )
        return made

    return checked
