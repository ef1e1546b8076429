"""`python -m train`: from arguments, a preset, a file or an earlier run to a `TrainConfig`, and from errors to exit codes.

Arguments stand over what `--config` and `--resume` say, that stands over the preset. Tyro makes the flags out of the records.
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from remat_kit.errors import nearest
from train.config import TrainConfig, check, from_mapping
from train.errors import CheckpointError, ConfigError
from train.folder import CONFIG_FILE
from train.presets import DEFAULT, PRESETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where the configuration starts from.

    Attributes:
        preset: A preset's name; none = that of the model.
        config: A TOML or JSON file of groups and keys.
        resume: The folder of an earlier run: its configuration, and its newest checkpoint if it has one.
    """

    preset: str | None = None
    config: str | None = None
    resume: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Train a model under a rematerialization policy or a plan.

    Attributes:
        start: Where the configuration starts from.
        config: The run.
    """

    start: Start = field(default_factory=Start)
    config: TrainConfig = field(default_factory=lambda: PRESETS[DEFAULT])


def read_arguments(args: Sequence[str]) -> Arguments:
    """Reads the command line.

    Raises:
        ConfigError: An unknown preset, a file or values that make no sense.
        CheckpointError: `--resume` names no run.
        SystemExit: An unknown flag (tyro says the near miss), or `--help`.
    """
    first = _parse(args, Arguments(config=TrainConfig()))
    found = _parse(args, Arguments(config=_base(first)))
    check(found.config)
    return found


def _parse(args: Sequence[str], default: Arguments) -> Arguments:
    flat = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    what = f"Train a model under a rematerialization policy or a plan. Presets: {', '.join(PRESETS)}."
    return tyro.cli(Arguments, prog="python -m train", description=what, args=list(args), default=default, config=flat)


def _base(first: Arguments) -> TrainConfig:
    start, model = first.start, first.config.model.model
    if start.preset is not None and start.preset not in PRESETS:
        raise ConfigError(f"no preset {start.preset!r}; there are {', '.join(PRESETS)}.{nearest(start.preset, PRESETS)}")
    base = PRESETS[start.preset] if start.preset else PRESETS.get(model, TrainConfig())
    if start.resume is not None:
        base = _stored(Path(start.resume))
        base = dataclasses.replace(base, run=dataclasses.replace(base.run, dir=None))
    if start.config is not None:
        base = from_mapping(_read_file(Path(start.config)), base=base, where=start.config)
    asked = first.config.model
    if asked.policy is None and asked.plan is None:
        return base
    # What was asked for now takes the place of an earlier policy or plan, whichever it was.
    return dataclasses.replace(base, model=dataclasses.replace(base.model, policy=None, plan=None))


def _stored(folder: Path) -> TrainConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"--resume {folder}: no run there ({path.name} is missing). Give the folder of a run.")
    return from_mapping(_read_file(path), base=TrainConfig(), where=str(path))


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read as {'JSON' if path.suffix == '.json' else 'TOML'}: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected tables of keys, not a {type(found).__name__}.")
    return found
