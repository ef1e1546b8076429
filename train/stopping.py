"""When to stop before the last step: SIGTERM, which clusters send before they take a machine away, and Ctrl-C.

One process looks at a flag that its signal handler sets. Several must stop at the same step, or some would wait forever in a
collective: JAX's preemption service tells all of them a step that none has passed.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

ShouldStop = Callable[[int], bool]


@contextlib.contextmanager
def stop_signal() -> Iterator[ShouldStop]:
    """Gives a function of the step about to run that says whether to stop before it; restores the handlers at the end."""
    if jax.process_count() > 1:
        yield multihost_utils.reached_preemption_sync_point
        return
    asked: list[int] = []
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda number, _: _ask(asked, number)) for number in signals}
    try:
        yield lambda _: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ask(asked: list[int], number: int) -> None:
    if asked and number == signal.SIGINT:  # a second Ctrl-C: now
        raise KeyboardInterrupt
    asked.append(number)
