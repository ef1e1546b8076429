"""From a configuration to steps: the one that trains, under its plan, and the one that evaluates, without rematerialization.

The factory is called as remat-kit calls it, with the same option texts, so that what `remat-kit compare` measures is what runs.
"""

import dataclasses
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import models
from models import ModelStep
from remat_kit import Step, StepError, rematerialize
from remat_kit.errors import nearest
from remat_kit.plans import NO_REMAT
from remat_kit.records import StepTrace
from remat_kit.trace import trace_step
from remat_kit.verbs.build import bind_plan, build, check_names, read_options
from remat_kit.verbs.question import load_factory
from train.config import OptimizerConfig, TrainConfig, pairs, warmup_steps
from train.errors import ConfigError
from train.plans import ChosenPlan, choose_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The steps of a run.

    Attributes:
        step: What trains.
        plain: The same without rematerialization: what evaluates.
        plan: The plan of `step`.
        model_flops: FLOPs of `plain` per device, the numerator of model-FLOPs utilization.
        remat_flops: FLOPs per device that `step` computes again.
        factory: Name of the factory.
        options: Pairs of option and text that it was given.
        xla: Pairs of compiler option and text.
    """

    step: Step
    plain: Step
    plan: ChosenPlan
    model_flops: int
    remat_flops: int
    factory: str
    options: tuple[tuple[str, str], ...]
    xla: tuple[tuple[str, str], ...]

    @property
    def evaluate(self) -> Callable[[Any, Any], jax.Array] | None:
        """`(params, batch) -> loss`; None = the factory is not one of `models/` and says nothing about evaluation."""
        return self.plain.evaluate if isinstance(self.plain, ModelStep) else None

    @property
    def question(self) -> str:
        """The command that compiles the same step for a target."""
        asked = "--wrap" if self.plan.wraps else "--policy"
        return self._command("compare", f"{asked} {shlex.quote(str(self.plan))}")

    @property
    def planning(self) -> str:
        """The command that finds a plan for the same step."""
        return self._command("plan", "--out plan.toml")

    def _command(self, verb: str, asked: str) -> str:
        settings = " ".join(f"--set {shlex.quote(f'{name}={text}')}" for name, text in self.options)
        xla = "".join(f" --xla {shlex.quote(f'{name}={text}')}" for name, text in self.xla)
        return f"remat-kit {verb} {self.factory} {settings} {asked}{xla} --target TARGET"


def build_steps(config: TrainConfig, devices: Sequence[jax.Device]) -> Built:
    """Builds the steps of a run.

    Raises:
        ConfigError: No such model, or an option that is not NAME=VALUE.
        StepError, PolicyError: The factory's options or the plan make no sense for it.
    """
    name = factory_name(config.model.model)
    factory = load_factory(name)
    texts = option_texts(config, factory)
    options = read_options(factory, texts)
    plain = build(factory, NO_REMAT, devices, options)
    chosen = choose_plan(config.model, plain)
    step = build(factory, bind_plan(chosen.plan, plain), devices, options)
    if chosen.wraps:
        step = dataclasses.replace(step, fn=rematerialize(dict(chosen.wraps))(step.fn))
    plain_trace, trace = trace_step(plain)[1], trace_step(step)[1]
    check_names(chosen.plan, plain_trace, trace)
    _check_contract(step)
    return Built(
        step=step,
        plain=plain,
        plan=chosen,
        model_flops=plain_trace.flops,
        remat_flops=_recomputed(trace, plain_trace),
        factory=name,
        options=texts,
        xla=pairs("--xla", config.run.xla),
    )


def factory_name(model: str) -> str:
    """`module:function` of what `--model` names.

    Raises:
        ConfigError: No model of `models/` has this name.
    """
    if ":" in model:
        return model
    known = [name for name, value in vars(models).items() if name in models.__all__ and _is_factory(value)]
    if model not in known:
        raise ConfigError(f"--model {model}: there are {', '.join(known)}, or module:function.{nearest(model, known)}")
    return f"models:{model}"


def _is_factory(value: object) -> bool:
    if not inspect.isfunction(value):
        return False
    parameters = inspect.signature(value).parameters
    return list(parameters)[:2] == ["policies", "devices"]


def option_texts(config: TrainConfig, factory: Callable[..., object]) -> tuple[tuple[str, str], ...]:
    """What the factory is given: options of the configuration that it has, those that were set, and `--set`."""
    given = _model_options(config) | _optimizer_options(config)
    defaults = _model_options(TrainConfig())
    allowed = inspect.signature(factory).parameters
    kept = {name: value for name, value in given.items() if name in allowed or (name in defaults and value != defaults[name])}
    return (*((name, str(value)) for name, value in kept.items() if value is not None), *pairs("--set", config.model.set))


def _model_options(config: TrainConfig) -> dict[str, object]:
    model = config.model
    return {
        "batch": model.batch,
        "seq": model.seq,
        "accumulate": model.accumulate,
        "mesh": model.mesh,
        "dtype": model.dtype,
    }


def _optimizer_options(config: TrainConfig) -> dict[str, object]:
    optimizer: OptimizerConfig = config.optimizer
    return {
        "learning_rate": optimizer.learning_rate,
        "warmup": warmup_steps(config),
        "decay_steps": config.run.steps if optimizer.decay else 0,
        "weight_decay": optimizer.weight_decay,
        "max_norm": optimizer.max_norm,
    }


def _recomputed(trace: StepTrace, plain: StepTrace) -> int:
    return max(0, trace.flops - plain.flops)


def _check_contract(step: Step) -> None:
    if len(step.args) != 2 or not isinstance(step.args[1], Mapping) or step.init is None:
        raise StepError(
            "a step that trains takes two arguments, a state and a batch that is a mapping of arrays by name, and has an init."
        )
    made = jax.eval_shape(step.fn, *step.args)
    state = made[0] if isinstance(made, tuple) and len(made) == 2 else None
    if jax.tree.structure(state) != jax.tree.structure(step.args[0]) or not _has_loss(made[1]):
        raise StepError("a step that trains returns the new state, of the same tree, and metrics with a 'loss'.")


def compile_step(built: Built) -> Any:
    """The training step, compiled; it takes its state for good."""
    lowered = jax.jit(built.step.fn, donate_argnums=built.step.donate).lower(*built.step.args)
    return lowered.compile(compiler_options=dict(built.xla) or None)


def _has_loss(metrics: object) -> bool:
    return isinstance(metrics, Mapping) and "loss" in metrics
