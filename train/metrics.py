"""What a run writes down while it runs: a JSON line per logged step, and the same numbers for TensorBoard.

The JSON lines are what the plot and the summary read. A resumed run drops the lines behind its checkpoint, as it writes them
again.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from remat_kit.files import default_mode, write_whole

LINES_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"

Numbers = Mapping[str, float | None]


class MetricsWriter:
    """Writes numbers by step into a run folder."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Opens the folder.

        Args:
            folder: Of the run.
            first_step: Steps done before; lines behind it are dropped.
        """
        path = folder / LINES_FILE
        kept = [line for line in read_lines(folder) if line["step"] <= first_step]
        write_whole(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode(), mode=default_mode())
        self._lines = path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=first_step + 1 if first_step else None)

    def write(self, step: int, numbers: Numbers) -> None:
        """Writes the numbers of a step; those that are None are left out."""
        known = {name: value for name, value in numbers.items() if value is not None}
        self._lines.write(f"{json.dumps({'step': step, **known})}\n")
        self._lines.flush()
        for name, value in known.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Closes the files."""
        self._lines.close()
        self._board.close()


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, oldest first; one that a kill cut off is left out."""
    path = folder / LINES_FILE
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("}\n")]
