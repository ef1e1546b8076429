"""The plan of a run: from `--policy TEXT` or `--plan FILE` to a `Plan`, with what its file promised.

A plan file is what `remat-kit plan --output` writes; a file that holds nothing but a plan's text will do as well.
"""

from dataclasses import dataclass
from pathlib import Path

from remat_kit import Plan, PolicyError, parse_plan
from train.config import ModelConfig
from train.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a plan file said its step would take, on the device that it was made for.

    Attributes:
        target: The target, as remat-kit spells it.
        device_kind: What JAX calls its devices.
        total_bytes: Compiled bytes of a device; None = the file doesn't say.
        step_time_s: Predicted; None = the file doesn't say.
    """

    target: str
    device_kind: str
    total_bytes: int | None
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """A plan and where it came from.

    Attributes:
        plan: The policies.
        source: For people: the option or the file.
        promise: Of the file; None = there is none.
    """

    plan: Plan
    source: str
    promise: Promise | None = None


def choose_plan(config: ModelConfig) -> ChosenPlan:
    """The plan that the configuration asks for; without any, nothing is recomputed.

    Raises:
        ConfigError: The plan file can't be read.
        PolicyError: The text is not a plan.
    """
    if config.plan is not None:
        return _read(Path(config.plan.removeprefix("@")))
    text = config.policy or "none"
    if text.startswith("@"):
        return _read(Path(text.removeprefix("@")))
    return ChosenPlan(plan=parse_plan(text), source="--policy" if config.policy else "default")


def _read(path: Path) -> ChosenPlan:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: can't be read: {error}.") from None
    try:
        return ChosenPlan(plan=parse_plan(text.strip()), source=str(path))
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from None
