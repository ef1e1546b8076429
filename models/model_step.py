"""From a loss and parameters to a step: `remat_kit.Step` for the compiler, with what a training loop wants beside it.

Every factory of `models/` ends here, whatever its model: in go a function that makes parameters, one that computes a loss and
the batch's abstract arrays; out comes a `ModelStep`, whose `fn` is what remat-kit compiles and what `train/` runs, donated state
and all.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.sharding import Layout, abstract, shard_like_parameters
from models.training import IsTrained, Loss, Metrics, OptimizerOptions, TrainState, all_train, make_optimizer, split, update
from remat_kit import Knobs, Stack, Step, StepError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep(Step):
    """A step of `(TrainState, batch) -> (TrainState, metrics)`.

    Attributes:
        evaluate: `(params, batch) -> loss`, for the policies of this step; ask a step without rematerialization for it.
        make_state: PRNG key -> a fresh state on the devices.
        layout: The devices.
        optimizer: What the update follows.
        num_labels: Labels of the batch are below it; of a language model, its vocabulary.
    """

    evaluate: Loss
    make_state: Callable[[jax.Array], TrainState]
    layout: Layout
    optimizer: OptimizerOptions
    num_labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model, as far as a step needs to know it.

    Attributes:
        init_params: PRNG key -> parameters.
        loss: See `models.training.Loss`.
        batch: Abstract arrays of B rows with shardings, among them `labels` and `weights`.
        random_batch: PRNG key -> a batch to time the step with, not yet on the devices.
        layout: The devices.
        stack: The stack that plans speak of.
        num_labels: See `ModelStep`.
        loss_scale: See `models.training.update`.
        notes: See `remat_kit.Step`.
        is_trained: See `models.training.update`.
        evaluate: What a batch is judged by; None = the loss.
    """

    init_params: Callable[[jax.Array], Any]
    loss: Loss
    batch: Mapping[str, jax.ShapeDtypeStruct]
    random_batch: Callable[[jax.Array], Mapping[str, jax.Array]]
    layout: Layout
    stack: Stack
    num_labels: int
    loss_scale: float = 1.0
    notes: tuple[str, ...] = ()
    is_trained: IsTrained = all_train
    evaluate: Loss | None = None


def make_model_step(model: Trained, *, optimizer: OptimizerOptions, accumulate: int, knobs: Knobs) -> ModelStep:
    """The training step of a model.

    Args:
        model: What to train.
        optimizer: See `OptimizerOptions`.
        accumulate: Micro-batches that each batch is split into.
        knobs: See `remat_kit.Step`.

    Raises:
        StepError: The rows of the batch can't be split into so many micro-batches.
    """
    _check_split(model, accumulate)
    rule = make_optimizer(optimizer)

    def fn(state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[TrainState, Metrics]:
        return update(
            state,
            batch,
            loss=model.loss,
            optimizer=rule,
            layout=model.layout,
            accumulate=accumulate,
            loss_scale=model.loss_scale,
            is_trained=model.is_trained,
        )

    fresh = functools.partial(_fresh_state, model=model, optimizer=rule)
    state = jax.eval_shape(fresh, jax.random.key(0))
    shardings = shard_like_parameters(state, model.layout)
    make_state = jax.jit(fresh, out_shardings=shardings)

    def init(key: jax.Array) -> tuple[TrainState, Mapping[str, jax.Array]]:
        places = {name: leaf.sharding for name, leaf in model.batch.items()}
        return make_state(key), jax.device_put(dict(model.random_batch(key)), places)

    return ModelStep(
        fn=fn,
        args=(abstract(state, shardings), dict(model.batch)),
        donate=(0,),
        roles=(TrainState("parameters", "optimizer_state", "other"), "batch"),  # type: ignore[arg-type]
        stacks=(model.stack,),
        knobs=knobs,
        init=init,
        notes=model.notes,
        evaluate=model.evaluate or model.loss,
        make_state=make_state,
        layout=model.layout,
        optimizer=optimizer,
        num_labels=model.num_labels,
    )


def _fresh_state(key: jax.Array, *, model: Trained, optimizer: optax.GradientTransformation) -> TrainState:
    params = model.init_params(key)
    return TrainState(params, optimizer.init(split(params, model.is_trained)[0]), jnp.zeros((), jnp.int32))


def _check_split(model: Trained, accumulate: int) -> None:
    rows = model.batch["weights"].shape[0]
    parts = model.layout.axis_size(("data", "fsdp"))
    if accumulate < 1 or rows % (accumulate * parts):
        raise StepError(
            f"accumulate={accumulate}: a batch of {rows} rows on {parts} devices of data x fsdp can't be split into so many "
            f"micro-batches; give a divisor of {rows // parts}."
        )
