"""A sign of life of each process: a file that says which step it has done, written anew twice a second.

A thread writes it, so that a long compile or evaluation is no silence; the step is what the loop last told. `train.launch` reads
them.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from remat_kit.files import default_mode, write_whole
from train.folder import BEATS_FOLDER

BEAT_EVERY_S = 0.5
# Silent for so long, a process counts as dead.
SILENCE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a process last said.

    Attributes:
        step: Steps done.
        time_s: When, in seconds since the epoch.
    """

    step: int
    time_s: float


def heartbeat(folder: Path) -> Callable[[int], None]:
    """Starts to beat, and gives the function that the loop tells its steps; with one process nothing is written."""
    if jax.process_count() == 1:
        return lambda _: None
    path = beat_path(folder, jax.process_index())
    path.parent.mkdir(exist_ok=True)
    told = [0]

    def beat_on() -> None:
        while True:
            write_whole(path, json.dumps({"step": told[0], "time_s": time.time()}).encode(), mode=default_mode())
            time.sleep(BEAT_EVERY_S)

    def tell(step: int) -> None:
        told[0] = step

    threading.Thread(target=beat_on, daemon=True, name="heartbeat").start()
    return tell


def beat_path(folder: Path, process: int) -> Path:
    """The file of a process."""
    return folder / BEATS_FOLDER / f"{process}.json"


def read_beat(folder: Path, process: int) -> Beat | None:
    """What a process last said; None = nothing yet."""
    try:
        found = json.loads(beat_path(folder, process).read_bytes())
    except FileNotFoundError:
        return None
    return Beat(step=found["step"], time_s=found["time_s"])
