"""The decoder: embedding, a scanned stack of blocks under a policy, a final norm. Its output is hidden states, not logits.

Names in a block, in order: `block_in`, `q`, `k`, `v` (after rotation), `attn` (the attention context; for fused kernels with its
softmax statistics), `attn_out`, `gate` (SwiGLU only), `up` (before the activation), `down`. Experts add `routing` (see
`experts.py`), adapters the name of each projection with `_lora` (see `adapters.py`).

Legend: B batch, T tokens, D model width, F MLP width, H query heads, G key/value heads, K width of a head, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from models.adapters import AdaptedProjection, Adapter
from models.config import DecoderConfig, Mlp, Positions
from models.experts import ExpertMlp
from models.layers import WEIGHT_INIT, Projection, make_norm, rotary_angles, rotate
from models.sharding import BATCH, DATA, FSDP, TENSOR, Layout, constrain
from remat_kit import StackPlan
from remat_kit.apply.linen_stack import stack_module
from remat_kit.attention import Kernel, Partition, attend
from remat_kit.presets import Role

Angles = tuple[jax.Array, jax.Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a model runs, as opposed to what it is.

    Attributes:
        dtype: Of the computation; parameters that train are f32.
        kernel: Which attention.
        layout: The devices.
        adapter: What trains instead of the model itself, if anything.
    """

    dtype: jnp.dtype
    kernel: Kernel
    layout: Layout
    adapter: Adapter | None = None

    @property
    def table_dtype(self) -> jnp.dtype:
        """Of the embedding and the head."""
        return jnp.dtype(jnp.float32 if self.adapter is None else jnp.bfloat16)


def roles(config: DecoderConfig) -> Mapping[str, tuple[str, ...]]:
    """Role -> names, for presets."""
    return {
        Role.LAYER_INPUT: ("block_in",),
        Role.QUERY: ("q",),
        Role.KEY: ("k",),
        Role.VALUE: ("v",),
        Role.ATTENTION_CONTEXT: ("attn",),
        Role.ATTENTION_OUT: ("attn_out",),
        Role.MLP_IN: ("gate", "up") if config.mlp is Mlp.SWIGLU else ("up",),
        Role.MLP_OUT: ("down",),
    }


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the stream."""

    config: DecoderConfig
    runtime: Runtime

    @nn.compact
    def __call__(self, x_BTD: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array | None]:
        """The stream after the block; of experts, their load-balancing loss (B,)."""
        x_BTD = checkpoint_name(constrain(x_BTD, self.runtime.layout, BATCH), "block_in")
        x_BTD += self.attend(make_norm(self.config, self.runtime.dtype, name="attn_norm")(x_BTD), angles)
        h_BTD = make_norm(self.config, self.runtime.dtype, name="mlp_norm")(x_BTD)
        if self.config.experts is None:
            y_BTD, balance_B = self.feed(h_BTD), None
        else:
            y_BTD, balance_B = ExpertMlp(self.config, self.runtime.dtype, self.runtime.layout, name="experts")(h_BTD)
        return constrain(x_BTD + y_BTD, self.runtime.layout, BATCH), balance_B

    def attend(self, x_BTD: jax.Array, angles: Angles) -> jax.Array:
        """Attention with its projections."""
        config, layout = self.config, self.runtime.layout
        q_BTHK = self.heads(x_BTD, "q", config.num_heads, angles)
        k_BTGK = self.heads(x_BTD, "k", config.num_kv_heads, angles)
        v_BTGK = self.heads(x_BTD, "v", config.num_kv_heads, None)
        partition = None if layout.mesh is None else Partition(mesh=layout.mesh, batch=BATCH, heads=TENSOR)
        kernel, mask = self.runtime.kernel, config.mask
        a_BTHK = attend(q_BTHK, k_BTGK, v_BTGK, kernel=kernel, mask=mask, partition=partition, name="attn")
        a_BTD = a_BTHK.reshape(*x_BTD.shape[:2], config.num_heads * config.head_dim)
        return checkpoint_name(self.project(a_BTD, "attn_out", config.d_model), "attn_out")

    def heads(self, x_BTD: jax.Array, name: str, num_heads: int, angles: Angles) -> jax.Array:
        """One of the three projections into heads, rotated when there are angles."""
        y_BTF = self.project(x_BTD, name, num_heads * self.config.head_dim)
        y_BTHK = y_BTF.reshape(*x_BTD.shape[:2], num_heads, self.config.head_dim)
        y_BTHK = constrain(y_BTHK, self.runtime.layout, BATCH, None, TENSOR)
        return checkpoint_name(y_BTHK if angles is None else rotate(y_BTHK, angles), name)

    def feed(self, x_BTD: jax.Array) -> jax.Array:
        """The MLP."""
        up_BTF = checkpoint_name(self.project(x_BTD, "up", self.config.d_ff), "up")
        match self.config.mlp:
            case Mlp.GELU:
                act_BTF = nn.gelu(up_BTF)
            case Mlp.SWIGLU:
                gate_BTF = checkpoint_name(self.project(x_BTD, "gate", self.config.d_ff), "gate")
                act_BTF = nn.silu(gate_BTF) * up_BTF
        return checkpoint_name(self.project(act_BTF, "down", self.config.d_model), "down")

    def project(self, x_BTD: jax.Array, name: str, num_features: int) -> jax.Array:
        """A projection of this name."""
        given = num_features, self.config.has_biases, self.runtime.dtype, self.runtime.layout
        adapter = self.runtime.adapter
        return (Projection(*given, name=name) if adapter is None else AdaptedProjection(*given, adapter, name=name))(x_BTD)


class Decoder(nn.Module):
    """Tokens to hidden states.

    Attributes:
        config: What the model is.
        runtime: How it runs.
        plan: Policies of its stack `layers`.
        group: How layers under `full` keep only some inputs, see `remat_kit.stack`; None = each keeps its own.
    """

    config: DecoderConfig
    runtime: Runtime
    plan: StackPlan
    group: str | None = None

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Hidden states after the final norm, as the head is the loss's business; and load-balancing losses (L, B) of experts."""
        config = self.config
        x_BTD, angles = self.embed(tokens_BT), self.angles(tokens_BT.shape[1])
        made = stack_module(Block, num_layers=config.num_layers, plan=self.plan, group=self.group)  # pyright: ignore[reportArgumentType]
        layers = made(config, self.runtime, name="layers")
        x_BTD, balance_LB = layers(x_BTD, angles)
        if not config.has_tied_head:
            self.param("head", WEIGHT_INIT, (config.vocab_size, config.d_model), self.runtime.table_dtype)
        return make_norm(config, self.runtime.dtype, name="final_norm")(x_BTD), balance_LB

    def angles(self, num_tokens: int) -> Angles:
        """Rotary angles, None for learned positions."""
        if self.config.positions is Positions.LEARNED:
            return None
        return rotary_angles(num_tokens, self.config.head_dim, self.config.rope_theta)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Rows of the embedding, plus positions where they are learned."""
        config, layout = self.config, self.runtime.layout
        table_VD = self.param("embedding", WEIGHT_INIT, (config.vocab_size, config.d_model), self.runtime.table_dtype)
        x_BTD = jnp.take(table_VD.astype(self.runtime.dtype), tokens_BT, axis=0)
        # Each device looks up its slice of D for the tokens of its fsdp group; then slices are exchanged for sequences.
        x_BTD = constrain(x_BTD, layout, DATA, None, FSDP if config.d_model % layout.axis_size(FSDP) == 0 else None)
        if config.positions is Positions.LEARNED:
            shape = (config.max_seq, config.d_model)
            place_TD = self.param("positions", WEIGHT_INIT, shape, jnp.float32)[: tokens_BT.shape[1]]
            x_BTD += place_TD.astype(self.runtime.dtype)
        return constrain(x_BTD, layout, BATCH)
