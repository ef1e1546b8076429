"""GPT-2 in Flax NNX, with the parameter tree of the Linen one: the same numbers from the same parameters, in the same step.

A training step is a pure function, so the model stands in it as a graph definition and a tree of parameters: `NnxLanguageModel`
makes the one and merges the other. The blocks are one module with stacked parameters, which `remat_kit.stack` runs.

Legend: B batch, T tokens, D model width, F width out, H heads, K width of a head, V vocabulary.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from models.config import DecoderConfig
from models.decoder import Runtime
from models.layers import DENSE, WEIGHT_INIT, project
from models.sharding import BATCH, DATA, FSDP, TENSOR, constrain, parameter_axes
from remat_kit import StackPlan, stack
from remat_kit.apply.segments import GroupOption
from remat_kit.attention import Partition, attend


class Linear(nnx.Module):
    """`x @ kernel + bias`, the weight gathered from its shards; its name says how it is split."""

    def __init__(self, name: str, num_inputs: int, num_features: int, runtime: Runtime, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(WEIGHT_INIT(rngs.params(), (num_inputs, num_features), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(num_features, jnp.float32))
        self.axes = parameter_axes((name, "kernel"), (num_inputs, num_features), runtime.layout)
        self.runtime = runtime

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The projected input."""
        dtype, layout = self.runtime.dtype, self.runtime.layout
        return project(x_BTD.astype(dtype), self.kernel[...], layout, self.axes, DENSE) + self.bias[...].astype(dtype)


class Block(nnx.Module):
    """Attention and MLP, each after a norm and added to the stream; names as in `models/decoder.py`."""

    def __init__(self, config: DecoderConfig, runtime: Runtime, *, rngs: nnx.Rngs) -> None:
        self.config, self.runtime = config, runtime
        d_model, d_ff = config.d_model, config.d_ff
        self.attn_norm = make_norm(config, runtime, rngs=rngs)
        self.q = Linear("q", d_model, d_model, runtime, rngs=rngs)
        self.k = Linear("k", d_model, d_model, runtime, rngs=rngs)
        self.v = Linear("v", d_model, d_model, runtime, rngs=rngs)
        self.attn_out = Linear("attn_out", d_model, d_model, runtime, rngs=rngs)
        self.mlp_norm = make_norm(config, runtime, rngs=rngs)
        self.up = Linear("up", d_model, d_ff, runtime, rngs=rngs)
        self.down = Linear("down", d_ff, d_model, runtime, rngs=rngs)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The stream after the block."""
        x_BTD = checkpoint_name(constrain(x_BTD, self.runtime.layout, BATCH), "block_in")
        x_BTD += self.attend(self.attn_norm(x_BTD))
        up_BTF = checkpoint_name(self.up(self.mlp_norm(x_BTD)), "up")
        x_BTD += checkpoint_name(self.down(nnx.gelu(up_BTF)), "down")
        return constrain(x_BTD, self.runtime.layout, BATCH)

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Causal attention with its projections."""
        layout = self.runtime.layout
        partition = None if layout.mesh is None else Partition(mesh=layout.mesh, batch=BATCH, heads=TENSOR)
        q_BTHK, k_BTHK, v_BTHK = (self.heads(layer(x_BTD), name) for name, layer in (("q", self.q), ("k", self.k), ("v", self.v)))
        a_BTHK = attend(q_BTHK, k_BTHK, v_BTHK, kernel=self.runtime.kernel, partition=partition, name="attn")
        return checkpoint_name(self.attn_out(a_BTHK.reshape(x_BTD.shape)), "attn_out")

    def heads(self, y_BTD: jax.Array, name: str) -> jax.Array:
        """A projection as heads."""
        y_BTHK = y_BTD.reshape(*y_BTD.shape[:2], self.config.num_heads, self.config.head_dim)
        return checkpoint_name(constrain(y_BTHK, self.runtime.layout, BATCH, None, TENSOR), name)


class NnxDecoder(nnx.Module):
    """Tokens to hidden states.

    Args:
        config: What the model is; a GPT-2.
        runtime: How it runs.
        plan: Policies of its stack `layers`.
        group: See `models.decoder.Decoder`.
    """

    def __init__(self, config: DecoderConfig, runtime: Runtime, plan: StackPlan, group: GroupOption, *, rngs: nnx.Rngs) -> None:
        self.config, self.runtime, self.plan, self.group = config, runtime, plan, group
        self.embedding = nnx.Param(WEIGHT_INIT(rngs.params(), (config.vocab_size, config.d_model), jnp.float32))
        self.positions = nnx.Param(WEIGHT_INIT(rngs.params(), (config.max_seq, config.d_model), jnp.float32))
        make = nnx.vmap(functools.partial(_make_block, config, runtime), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=config.num_layers)(make)(rngs)
        self.final_norm = make_norm(config, runtime, rngs=rngs)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Hidden states after the final norm."""
        graph, params = nnx.split(self.layers)

        def layer(params: Any, x_BTD: jax.Array) -> jax.Array:
            return nnx.merge(graph, params)(x_BTD)

        return self.final_norm(stack(layer, params, self.embed(tokens_BT), self.plan, group=self.group))  # pyright: ignore[reportArgumentType]

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Rows of the embedding, plus positions."""
        layout, dtype = self.runtime.layout, self.runtime.dtype
        x_BTD = jnp.take(self.embedding[...].astype(dtype), tokens_BT, axis=0)
        x_BTD = constrain(x_BTD, layout, DATA, None, FSDP if self.config.d_model % layout.axis_size(FSDP) == 0 else None)
        return constrain(x_BTD + self.positions[...][: tokens_BT.shape[1]].astype(dtype), layout, BATCH)


def _make_block(config: DecoderConfig, runtime: Runtime, rngs: nnx.Rngs) -> Block:
    return Block(config, runtime, rngs=rngs)


def make_norm(config: DecoderConfig, runtime: Runtime, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """GPT-2's norm."""
    return nnx.LayerNorm(config.d_model, epsilon=config.norm_epsilon, dtype=runtime.dtype, rngs=rngs)


@dataclass(frozen=True, slots=True, kw_only=True)
class NnxLanguageModel:
    """What a loss wants of a model (`models.training.LanguageModel`), of one in NNX.

    Attributes:
        config: What the model is.
        runtime: How it runs.
        plan: Policies of its stack.
        group: See `models.decoder.Decoder`.
    """

    config: DecoderConfig
    runtime: Runtime
    plan: StackPlan
    group: GroupOption = None

    def apply(self, variables: Mapping[str, Any], tokens_BT: jax.Array) -> tuple[jax.Array, None]:
        """Hidden states under the parameters in `variables["params"]`, and no load-balancing losses."""
        graph, _ = nnx.split(nnx.eval_shape(lambda: self.make(jax.random.key(0))))
        return nnx.merge(graph, variables["params"])(tokens_BT), None

    def make(self, key: jax.Array) -> NnxDecoder:
        """The module with fresh parameters."""
        return NnxDecoder(self.config, self.runtime, self.plan, self.group, rngs=nnx.Rngs(params=key))


def init_nnx_params(key: jax.Array, *, model: NnxLanguageModel) -> Any:
    """Fresh f32 parameters as nested dicts."""
    return nnx.to_pure_dict(nnx.state(model.make(key), nnx.Param))
