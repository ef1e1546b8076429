"""The plan of a run: from `--policy TEXT` or `--plan FILE` to a `Plan`, with what its file promised.

A plan file is what `remat-kit plan --out` writes (TOML or JSON); any other file holds a plan's text. A file that was made for
another step or with other versions warns.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import remat_kit
from remat_kit import Plan, PolicyError, Step, parse_plan
from remat_kit.plan_file import SUFFIXES
from remat_kit.targets import load_rows, parse_target
from train.config import ModelConfig
from train.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a plan file said its step would take, on the device that it was made for.

    Attributes:
        target: The target, as remat-kit spells it.
        device_kind: What JAX calls its devices.
        total_bytes: Compiled bytes of a device.
        step_time_s: Predicted, a floor; None = the target's rates are not known.
    """

    target: str
    device_kind: str
    total_bytes: int
    step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """A plan and where it came from.

    Attributes:
        plan: The policies of stacks.
        wraps: Module pattern -> policy, for a model that nobody edits.
        source: For people: the option or the file.
        promise: Of the file; None = there is none.
    """

    plan: Plan
    wraps: Mapping[str, str] = field(default_factory=dict)
    source: str
    promise: Promise | None = None

    def __str__(self) -> str:
        return "; ".join(f"{pattern}={policy}" for pattern, policy in self.wraps.items()) or str(self.plan)


def choose_plan(config: ModelConfig, step: Step) -> ChosenPlan:
    """The plan that the configuration asks for; without any, nothing is recomputed.

    Args:
        config: Has a policy, a plan file or none of them.
        step: Without rematerialization: what a plan file is held against.

    Raises:
        ConfigError: The plan file can't be read.
        PolicyError: The text is not a plan, the file not a plan file.
    """
    text = config.policy or "none"
    file = config.plan if config.plan is not None else text if text.startswith("@") else None
    if file is None:
        return ChosenPlan(plan=parse_plan(text), source="--policy" if config.policy else "default")
    path = Path(file.removeprefix("@"))
    return _from_plan_file(path, step) if path.suffix in SUFFIXES else _from_text_file(path)


def _from_plan_file(path: Path, step: Step) -> ChosenPlan:
    found = remat_kit.load_plan(path, step=step)
    target = parse_target(found.target, load_rows())
    promise = Promise(
        target=found.target,
        device_kind=target.device_kind,
        total_bytes=found.proof.compiled_total_bytes,
        step_time_s=found.proof.step_s,
    )
    plan = parse_plan("none") if found.wraps else found.stack_plan
    return ChosenPlan(plan=plan, wraps=dict(found.wraps), source=str(path), promise=promise)


def _from_text_file(path: Path) -> ChosenPlan:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: can't be read: {error}.") from None
    try:
        return ChosenPlan(plan=parse_plan(text.strip()), source=str(path))
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from None
