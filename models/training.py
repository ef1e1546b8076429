"""One training step: loss, AdamW, state, gradient accumulation. Everything a loop needs beside data; `steps.py` makes factories.

`update` and `make_optimizer` know no model: a loss is any function of parameters and a batch with `weights`, whose mean it takes.
A batch whose weights are all 0 has nothing to learn from: it counts as a step and changes nothing else, no decay, no momentum.

Legend: A micro-batches of a step, B batch, T tokens of a sequence.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict

import jax
import jax.numpy as jnp
import optax

from models.config import DecoderConfig
from models.decoder import Decoder, Runtime
from models.loss import Head, chunked_cross_entropy
from models.sharding import BATCH, Layout, names_of, shard_like_parameters
from remat_kit import StepError
from remat_kit.attention import Kernel

Parameters = Any
Metrics = dict[str, jax.Array]

# Parameters and a batch to the mean over the batch, weighted by its `weights`: an f32 scalar, 0 when all weights are 0.
Loss = Callable[[Parameters, Any], jax.Array]

# The names of a parameter's path -> whether it trains.
IsTrained = Callable[[tuple[str, ...]], bool]

# Of AdamW's two moments (Brown et al., 2020, appendix B).
DECAYS = (0.9, 0.95)

# Where the cosine ends, as a share of the peak learning rate (Hoffmann et al., 2022).
FINAL_SHARE = 0.1

# float16 has no exponent for gradients of a mean over thousands of tokens: the loss is scaled up, the gradients down again.
FLOAT16_LOSS_SCALE = 2.0**15


def all_train(names: tuple[str, ...]) -> bool:
    """Every parameter trains."""
    del names
    return True


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


class LanguageModel(Protocol):
    """What a loss wants of a model, whatever it is written in."""

    @property
    def config(self) -> DecoderConfig:
        """What the model is."""
        ...

    @property
    def runtime(self) -> Runtime:
        """How it runs."""
        ...

    def apply(self, variables: Mapping[str, Any], tokens_BT: jax.Array, /) -> Any:
        """Hidden states under the parameters `variables["params"]`, and the load-balancing losses (L, B) of experts or None."""
        ...


def loss_fn(params: Parameters, batch: Batch, *, model: LanguageModel, chunk: int) -> jax.Array:
    """The mean cross-entropy of a batch, and of experts their load-balancing loss: an f32 scalar.

    Args:
        params: The parameter tree.
        batch: See `Batch`.
        model: The decoder.
        chunk: Tokens of each sequence whose logits exist at a time.
    """
    cross_entropy, balance = losses(params, batch, model=model, chunk=chunk)
    return cross_entropy if balance is None else cross_entropy + balance


def losses(params: Parameters, batch: Batch, *, model: LanguageModel, chunk: int) -> tuple[jax.Array, jax.Array | None]:
    """The two parts of `loss_fn`: cross-entropy, and the weighted load-balancing loss of experts.

    That is a mean over layers and sequences, of sequences by their share of the batch's weight: as the cross-entropy of a batch
    is that of its micro-batches, so is this.
    """
    hidden_BTD, balance_LB = model.apply({"params": params}, batch["tokens"])
    head_VD = params["embedding" if model.config.has_tied_head else "head"]
    layout, head = model.runtime.layout, Head.TRAINED if model.runtime.adapter is None else Head.FROZEN
    weights = batch["weights"]
    loss = chunked_cross_entropy(hidden_BTD, head_VD, batch["labels"], weights, chunk=chunk, layout=layout, head=head)
    experts = model.config.experts
    if experts is None:
        return loss, None
    weights_B = weights.astype(jnp.float32).sum(1)
    balance = (balance_LB.mean(0) * weights_B).sum() / jnp.maximum(weights_B.sum(), 1e-6)
    return loss, experts.balance_weight * balance


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


def make_optimizer(options: OptimizerOptions = OptimizerOptions()) -> optax.GradientTransformationExtraArgs:
    """AdamW with clipping and the schedule of the options; weights decay, norms and biases do not.

    Its `update` takes `is_empty`: a batch without weight, which leaves the optimizer's state as it is.
    """
    return optax.chain(optax.clip_by_global_norm(options.max_norm), _adamw(options))


def _adamw(options: OptimizerOptions) -> optax.GradientTransformationExtraArgs:
    """AdamW that keeps its moments by decays of 1 where a batch is empty, and its counters by a choice.

    A choice between old and new moments cost a leaf's worth of memory on eight H100, a conditional copies the state (optax#472).
    """
    rate = make_schedule(options) if options.warmup or options.decay_steps else options.learning_rate

    def rule(b1: Any, b2: Any) -> optax.GradientTransformation:
        return optax.adamw(rate, b1=b1, b2=b2, weight_decay=options.weight_decay, mask=_is_decayed)

    def update(updates: Any, state: Any, params: Any = None, *, is_empty: Any = False, **_: Any) -> tuple[Any, Any]:
        decays = (jnp.where(is_empty, 1.0, decay) for decay in DECAYS)
        updates, after = rule(*decays).update(updates, state, params)
        return updates, jax.tree.map(lambda new, old: jnp.where(is_empty, old, new) if new.ndim == 0 else new, after, state)

    return optax.GradientTransformationExtraArgs(rule(*DECAYS).init, update)


def _is_decayed(params: Parameters) -> Parameters:
    return jax.tree_util.tree_map_with_path(lambda path, _: names_of(path)[-1] not in ("bias", "scale"), params)


def init_params(key: jax.Array, *, model: Decoder) -> Parameters:
    """Fresh f32 parameters of a decoder; jit it with `out_shardings` to make them on the mesh."""
    plain = dataclasses.replace(model.runtime, kernel=Kernel.XLA, layout=Layout(devices=()))
    return model.clone(runtime=plain).init(key, jnp.zeros((1, 1), jnp.int32))["params"]


def split(params: Parameters, is_trained: IsTrained) -> tuple[Parameters, Parameters]:
    """The parameters that train and the frozen ones: two trees of one structure, with None for what the other has."""
    marks = jax.tree_util.tree_map_with_path(lambda path, _: is_trained(names_of(path)), params)
    trained = jax.tree.map(lambda mark, leaf: leaf if mark else None, marks, params)
    return trained, jax.tree.map(lambda mark, leaf: None if mark else leaf, marks, params)


def join(trained: Parameters, frozen: Parameters) -> Parameters:
    """What `split` took apart."""
    return jax.tree.map(lambda new, old: old if new is None else new, trained, frozen, is_leaf=lambda leaf: leaf is None)


def update(
    state: TrainState,
    batch: Mapping[str, jax.Array],
    *,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    accumulate: int = 1,
    loss_scale: float = 1.0,
    is_trained: IsTrained = all_train,
) -> tuple[TrainState, Metrics]:
    """Forward, backward and update.

    Args:
        state: The state before.
        batch: Arrays of B rows, among them `weights`.
        loss: See `Loss`.
        optimizer: See `make_optimizer`; told `is_empty`, whether the batch has no weight. Parameters then stay with any.
        layout: The devices.
        accumulate: Micro-batches that the batch is split into.
        loss_scale: The loss is scaled up by it, the gradients down again.
        is_trained: Which parameters have gradients and optimizer state; the others go through as they are.

    Returns:
        The state after, and the metrics `loss` and `grad_norm`; both 0 when every weight is 0, and only `step` moved on.
    """
    params, frozen = split(state.params, is_trained)
    gradient = jax.value_and_grad(lambda params, part: loss(join(params, frozen), part) * loss_scale)
    if accumulate == 1:
        value, grads = gradient(params, batch)
    else:
        value, grads = _accumulated(gradient, params, batch, layout, accumulate)
    grads = grads if loss_scale == 1.0 else jax.tree.map(lambda grad: grad / loss_scale, grads)
    is_empty = batch["weights"].astype(jnp.float32).sum() == 0
    updates, opt_state = optax.with_extra_args_support(optimizer).update(grads, state.opt_state, params, is_empty=is_empty)
    trained = jax.tree.map(lambda new, old: jnp.where(is_empty, old, new), optax.apply_updates(params, updates), params)
    metrics = {"loss": value / loss_scale, "grad_norm": optax.tree.norm(grads)}
    return TrainState(join(trained, frozen), opt_state, state.step + 1), metrics


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
