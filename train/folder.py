"""The folder of a run: which one, and its configuration file.

A new run never writes into a folder that has checkpoints, a resumed one only there.
"""

import dataclasses
import itertools
import json
from pathlib import Path

from remat_kit.files import default_mode, write_whole
from train.config import ProcessConfig, TrainConfig, to_mapping
from train.errors import CheckpointError, ConfigError

CONFIG_FILE = "config.json"
CHECKPOINTS_FOLDER = "checkpoints"
SUMMARY_FILE = "summary.json"
PLOT_FILE = "loss.png"
BEATS_FOLDER = "beats"
LOGS_FOLDER = "logs"

_ROOT = Path("runs")


def choose_folder(config: TrainConfig, resume: str | None) -> Path:
    """The folder that a run writes to; it is made.

    Args:
        config: Its `run.dir` may name one.
        resume: What `--resume` named.

    Raises:
        CheckpointError: A new run, and the folder has checkpoints.
        ConfigError: One of several processes was given no folder, or the folder can't be made, or a resumed one another.
    """
    given = config.run.dir
    if resume is not None:
        if given is not None and Path(given).resolve() != Path(resume).resolve():
            raise ConfigError(f"--resume {resume} goes on in that folder, not in --dir {given}: give one of them.")
        return Path(resume)
    if given is None and config.process.coordinator is not None:
        raise ConfigError("several processes need one folder: give --dir, or start with train.launch.")
    folder = Path(given) if given is not None else _free_folder(config.model.model.rpartition(":")[2])
    if any((folder / CHECKPOINTS_FOLDER).glob("*")):
        raise CheckpointError(f"{folder} has checkpoints of an earlier run: go on with --resume {folder}, or give another --dir.")
    try:
        (folder / CHECKPOINTS_FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--dir {folder}: it can't be made: {error.strerror}.") from None
    return folder


def _free_folder(name: str) -> Path:
    numbered = (_ROOT / f"{name}-{number}" for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())


def store_config(config: TrainConfig, folder: Path) -> None:
    """Writes the effective configuration, as JSON that `--config` and `--resume` read."""
    # Which process this is does not belong to the run.
    text = json.dumps(to_mapping(dataclasses.replace(config, process=ProcessConfig())), indent=2) + "\n"
    write_whole(folder / CONFIG_FILE, text.encode(), mode=default_mode())
