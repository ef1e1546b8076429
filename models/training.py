"""One training step of a decoder: loss, AdamW, state. Everything a loop needs beside data; `steps.py` makes factories of it.

Legend: B batch, T tokens of a sequence.
"""

import dataclasses
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import optax

from models.decoder import Decoder
from models.loss import chunked_cross_entropy
from models.sharding import Layout
from remat_kit.attention import Kernel

Parameters = Any

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


def make_optimizer(
    *, learning_rate: float = 3e-4, weight_decay: float = 0.1, max_norm: float = 1.0
) -> optax.GradientTransformation:
    """AdamW with clipping; weights decay, norms and biases do not."""
    adamw = optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_is_decayed)
    return optax.chain(optax.clip_by_global_norm(max_norm), adamw)


def _is_decayed(params: Parameters) -> Parameters:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("bias", "scale"), params)


def init_state(key: jax.Array, *, model: Decoder, optimizer: optax.GradientTransformation) -> TrainState:
    """A fresh state; jit it with `out_shardings` to make it on the mesh."""
    plain = dataclasses.replace(model.runtime, kernel=Kernel.XLA, layout=Layout(devices=()))
    params = model.clone(runtime=plain).init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def train_step(
    state: TrainState, batch: Batch, *, model: Decoder, optimizer: optax.GradientTransformation, chunk: int
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Forward, backward and update.

    Args:
        state: The state before.
        batch: See `Batch`.
        model: The decoder.
        optimizer: See `make_optimizer`.
        chunk: See `loss_fn`.

    Returns:
        The state after, and the metrics `loss` and `grad_norm`.
    """
    loss_scale = FLOAT16_LOSS_SCALE if model.runtime.dtype == jnp.float16 else 1.0

    def scaled_loss(params: Parameters) -> jax.Array:
        return loss_fn(params, batch, model=model, chunk=chunk) * loss_scale

    loss, grads = jax.value_and_grad(scaled_loss)(state.params)
    grads = grads if loss_scale == 1.0 else jax.tree.map(lambda grad: grad / loss_scale, grads)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss / loss_scale, "grad_norm": optax.tree.norm(grads)}
    return TrainState(params, opt_state, state.step + 1), metrics
