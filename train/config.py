"""A run, as plain data: frozen records that the command line, presets and files fill in, and that every run folder stores.

Values are texts, numbers and tuples only, so that a record goes to JSON and TOML and back unchanged. A key that no record has is
an error that names the near miss.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from remat_kit.errors import nearest
from train.errors import ConfigError

_Record = TypeVar("_Record")

# Llama 3 (Grattafiori et al., 2024) and GPT-3 warm up for about as many steps.
LONGEST_WARMUP = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is trained, and under which plan.

    Attributes:
        model: A step factory: a name of `models/`, or module:function.
        policy: A policy or a plan as text, like 'save(q,k,v)' or 'full*8 | none*4'.
        plan: File with a plan, instead of a policy.
        batch: Sequences of an optimizer step, over all devices; none = the factory's.
        seq: Tokens of a sequence; none = the factory's.
        accumulate: Micro-batches that a batch is split into.
        mesh: Like data:2,fsdp:4; empty = all devices on fsdp.
        dtype: Of the computation: auto, bfloat16, float16 or float32; parameters are float32.
        set: More options of the factory, like layers=4.
    """

    model: str = "gpt2_tiny"
    policy: str | None = None
    plan: str | None = None
    batch: int | None = None
    seq: int | None = None
    accumulate: int = 1
    mesh: str = ""
    dtype: str = "auto"
    set: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW: a linear warm-up to the learning rate, then a cosine to a tenth of it at the last step.

    Attributes:
        learning_rate: The highest.
        warmup: Steps of the warm-up; none = a tenth of the run, at most 2000.
        decay: Whether the learning rate falls after it.
        weight_decay: Of weights; norms and biases do not decay.
        max_norm: Gradients are scaled down to this global norm.
    """

    learning_rate: float = 3e-4
    warmup: int | None = None
    decay: bool = True
    weight_decay: float = 0.1
    max_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What it is trained on.

    Attributes:
        data: Where examples come from: text, digits (images), or module:function (see train.data).
        files: Files and folders of text; none = the Python standard library's own sources.
        suffix: Of the files taken from folders.
        tokenizer: A tokenizers JSON file; none = bytes.
        held_out: Share of the files that is kept for evaluation.
        data_seed: Of the order of examples.
    """

    data: str = "text"
    files: tuple[str, ...] = ()
    suffix: str = ".py"
    tokenizer: str | None = None
    held_out: float = 0.02
    data_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How long, how often, and where to.

    Attributes:
        steps: Optimizer steps in all.
        seed: Of the parameters.
        dir: Folder of the run; none = a new one under runs/.
        log_every: Steps between progress lines.
        eval_every: Steps between evaluations, 0 = only at the end.
        eval_batches: Batches of an evaluation.
        checkpoint_every: Steps between checkpoints, 0 = only at the end.
        keep: Newest checkpoints that are kept, beside the best one.
        peak_flops: FLOP/s of a device for the utilization; none = that of remat-kit's row of the device.
        cpu_devices: Devices that a CPU counts as; none = one, or what XLA_FLAGS says.
        compile_cache: Folder of JAX's compilation cache; none = no cache.
        xla: Compiler options of the step, like xla_gpu_autotune_level=0.
        plot: Whether to draw the run at its end (needs matplotlib).
    """

    steps: int = 2000
    seed: int = 0
    dir: str | None = None
    log_every: int = 20
    eval_every: int = 500
    eval_batches: int = 8
    checkpoint_every: int = 500
    keep: int = 3
    peak_flops: float | None = None
    cpu_devices: int | None = None
    compile_cache: str | None = None
    xla: tuple[str, ...] = ()
    plot: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Which of several processes this is; `train.launch` fills it in.

    Attributes:
        coordinator: host:port of process 0; auto = what the cluster says (Slurm, TPU pods …); none = a single process.
        num_processes: How many.
        process_id: Which, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole run.

    Attributes:
        model: What is trained, and under which plan.
        optimizer: AdamW and its schedule.
        data: What it is trained on.
        run: How long, how often, and where to.
        process: Which of several processes this is.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)


def to_mapping(config: TrainConfig) -> dict[str, Any]:
    """The configuration as JSON data."""
    return msgspec.to_builtins(config)


def from_mapping(mapping: Mapping[str, Any], *, base: TrainConfig, where: str) -> TrainConfig:
    """Puts values over a configuration.

    Args:
        mapping: Group -> key -> value, as `to_mapping` gives it; groups and keys may be missing.
        base: What stands where the mapping says nothing.
        where: What the mapping was read from, for messages.

    Raises:
        ConfigError: An unknown group or key, or a value of the wrong type.
    """
    groups = {group.name: getattr(base, group.name) for group in dataclasses.fields(base)}
    _check_keys(mapping, groups, where)
    changed = {name: _over(groups[name], values, f"{where}, [{name}]") for name, values in mapping.items()}
    return check(dataclasses.replace(base, **changed))


def _over(record: _Record, values: Any, where: str) -> _Record:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a table of keys, not {values!r}.")
    fields = {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}  # type: ignore[arg-type]
    _check_keys(values, fields, where)
    try:
        return msgspec.convert(fields | dict(values), type(record))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}.") from None


def _check_keys(given: Mapping[str, Any], allowed: Mapping[str, Any], where: str) -> None:
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{where}: no key {key!r}; allowed are {', '.join(allowed)}.{nearest(key, allowed)}")


def check(config: TrainConfig) -> TrainConfig:
    """Checks what a type can't say, and returns the configuration.

    Raises:
        ConfigError: A number out of range, or two values that exclude each other.
    """
    run, model = config.run, config.model
    if model.policy is not None and model.plan is not None:
        raise ConfigError(f"--policy {model.policy!r} and --plan {model.plan!r} exclude each other: give one of them.")
    for name, value, least in (
        ("steps", run.steps, 1),
        ("log_every", run.log_every, 1),
        ("eval_every", run.eval_every, 0),
        ("eval_batches", run.eval_batches, 1),
        ("checkpoint_every", run.checkpoint_every, 0),
        ("keep", run.keep, 1),
    ):
        if value < least:
            raise ConfigError(f"{name}={value}: it must be at least {least}.")
    if not 0 < config.data.held_out < 1:
        raise ConfigError(f"held_out={config.data.held_out}: it must lie between 0 and 1, like 0.02.")
    if config.optimizer.decay and warmup_steps(config) >= run.steps:
        raise ConfigError(
            f"warmup={config.optimizer.warmup} must be below steps={run.steps}: give --warmup {run.steps // 10} or --no-decay."
        )
    return config


def pairs(option: str, texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Reads NAME=VALUE texts.

    Raises:
        ConfigError: One is not of this form.
    """
    found = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            raise ConfigError(f"{option} {text!r} is not NAME=VALUE.")
        found.append((name, value))
    return tuple(found)


def warmup_steps(config: TrainConfig) -> int:
    """Steps of the warm-up, whether given or not."""
    given = config.optimizer.warmup
    return min(config.run.steps // 10, LONGEST_WARMUP) if given is None else given
