"""One training step: loss, AdamW, state, gradient accumulation. Everything a loop needs beside data; `steps.py` makes factories.

`update` and `make_optimizer` know no model: a loss is any function of parameters and a batch with `weights`, whose mean it takes.

Legend: A micro-batches of a step, B batch, T tokens of a sequence.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax

from models.decoder import Decoder
from models.loss import chunked_cross_entropy
from models.sharding import BATCH, Layout, shard_like_parameters
from remat_kit import StepError
from remat_kit.attention import Kernel

Parameters = Any
Metrics = dict[str, jax.Array]

# Parameters and a batch to the mean over the batch, weighted by its `weights`: an f32 scalar, 0 when all weights are 0.
Loss = Callable[[Parameters, Any], jax.Array]

# Where the cosine ends, as a share of the peak learning rate (Hoffmann et al., 2022).
FINAL_SHARE = 0.1

# float16 has no exponent for gradients of a mean over thousands of tokens: the loss is scaled up, the gradients down again.
FLOAT16_LOSS_SCALE = 2.0**15


class Batch(TypedDict):
    """Tokens (B, T) int32, the labels at the same places, and the weight of each place in the loss (f32, 0 = masked)."""

    tokens: jax.Array
    labels: jax.Array
    weights: jax.Array


class TrainState(NamedTuple):
    """What a step takes and gives back; donate it.

    Attributes:
        params: f32 parameters.
        opt_state: Of the optimizer.
        step: Number of steps done, an int32 scalar.
    """

    params: Parameters
    opt_state: optax.OptState
    step: jax.Array


def loss_fn(params: Parameters, batch: Batch, *, model: Decoder, chunk: int) -> jax.Array:
    """The mean cross-entropy of a batch, an f32 scalar.

    Args:
        params: The parameter tree.
        batch: See `Batch`.
        model: The decoder.
        chunk: Tokens of each sequence whose logits exist at a time.
    """
    hidden_BTD: Any = model.apply({"params": params}, batch["tokens"])
    head_VD = params["embedding" if model.config.has_tied_head else "head"]
    layout = model.runtime.layout
    return chunked_cross_entropy(hidden_BTD, head_VD, batch["labels"], batch["weights"], chunk=chunk, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """AdamW and its schedule.

    Attributes:
        learning_rate: The highest.
        warmup: Steps in which it rises from 0.
        decay_steps: Step at which its cosine ends, warm-up included; 0 = it stays.
        weight_decay: Of weights; norms and biases do not decay.
        max_norm: Gradients are scaled down to this global norm.
    """

    learning_rate: float = 3e-4
    warmup: int = 0
    decay_steps: int = 0
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (self.learning_rate > 0 and self.max_norm > 0 and self.weight_decay >= 0 and self.warmup >= 0):
            raise StepError(f"{self}: learning_rate and max_norm must be above 0, weight_decay and warmup at least 0.")
        if self.decay_steps and self.decay_steps <= self.warmup:
            raise StepError(f"decay_steps={self.decay_steps} must be above warmup={self.warmup}, or 0 for no decay.")


def make_schedule(options: OptimizerOptions) -> optax.Schedule:
    """Number of steps done -> learning rate: a linear warm-up, then a cosine down to `FINAL_SHARE`, or a constant."""
    peak = options.learning_rate
    if options.decay_steps:
        return optax.warmup_cosine_decay_schedule(0.0, peak, options.warmup, options.decay_steps, FINAL_SHARE * peak)
    return optax.linear_schedule(0.0, peak, options.warmup) if options.warmup else optax.constant_schedule(peak)


def make_optimizer(options: OptimizerOptions = OptimizerOptions()) -> optax.GradientTransformation:
    """AdamW with clipping and the schedule of the options; weights decay, norms and biases do not."""
    scheduled = options.warmup or options.decay_steps
    rate = make_schedule(options) if scheduled else options.learning_rate
    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=options.weight_decay, mask=_is_decayed)
    return optax.chain(optax.clip_by_global_norm(options.max_norm), adamw)


def _is_decayed(params: Parameters) -> Parameters:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


def init_params(key: jax.Array, *, model: Decoder) -> Parameters:
    """Fresh f32 parameters of a decoder; jit it with `out_shardings` to make them on the mesh."""
    plain = dataclasses.replace(model.runtime, kernel=Kernel.XLA, layout=Layout(devices=()))
    return model.clone(runtime=plain).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def update(
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    accumulate: int = 1,
    loss_scale: float = 1.0,
) -> tuple[TrainState, Metrics]:
    """Forward, backward and update.

    Args:
        state: The state before.
        batch: Arrays of B rows, among them `weights`.
        loss: See `Loss`.
        optimizer: See `make_optimizer`.
        layout: The devices.
        accumulate: Micro-batches that the batch is split into.
        loss_scale: The loss is scaled up by it, the gradients down again.

    Returns:
        The state after, and the metrics `loss` and `grad_norm`.
    """
    gradient = jax.value_and_grad(lambda params, part: loss(params, part) * loss_scale)
    if accumulate == 1:
        value, grads = gradient(state.params, batch)
    else:
        value, grads = _accumulated(gradient, state.params, batch, layout, accumulate)
    grads = grads if loss_scale == 1.0 else jax.tree.map(lambda grad: grad / loss_scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": value / loss_scale, "grad_norm": optax.tree.norm(grads)}
    return TrainState(params, opt_state, state.step + 1), metrics


def _accumulated(
    gradient: Callable[..., Any], params: Parameters, batch: Mapping[str, jax.Array], layout: Layout, accumulate: int
) -> tuple[jax.Array, Parameters]:
    """Loss and gradients of the whole batch, a micro-batch at a time, each by its share of the batch's weight."""
    total = jnp.maximum(batch["weights"].astype(jnp.float32).sum(), 1e-6)

    def add(sums: tuple[jax.Array, Parameters], part: Mapping[str, jax.Array]) -> tuple[tuple[jax.Array, Parameters], None]:
        share = part["weights"].astype(jnp.float32).sum() / total
        value, grads = gradient(params, part)
        sum_of_grads = jax.tree.map(lambda old, new: old + new.astype(jnp.float32) * share, sums[1], grads)
        return (sums[0] + value * share, sum_of_grads), None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    if layout.mesh is not None:
        zeros = jax.lax.with_sharding_constraint(zeros, shard_like_parameters(zeros, layout))
    parts = jax.tree.map(lambda x: _split(x, layout, accumulate), dict(batch))
    return jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), parts)[0]


def _split(x: jax.Array, layout: Layout, accumulate: int) -> jax.Array:
    """(B, …) to (A, B/A, …): micro-batch a has the rows a, a + A, a + 2A, …, so that no row leaves its device."""
    parts = x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1)
    return parts if layout.mesh is None else jax.lax.with_sharding_constraint(parts, layout.sharding(None, BATCH))
