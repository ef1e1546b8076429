"""The decoder: embedding, a scanned stack of blocks under a policy, a final norm. Its output is hidden states, not logits.

Names in a block, in order: `block_in`, `q`, `k`, `v` (after rotation), `attn` (the attention context; for fused kernels with its
softmax statistics), `attn_out`, `gate` (SwiGLU only), `up` (before the activation), `down`.

Legend: B batch, T tokens, D model width, F MLP width, H query heads, G key/value heads, K width of a head, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from models.config import DecoderConfig, Mlp, Positions
from models.layers import WEIGHT_INIT, Projection, make_norm, rotary_angles, rotate
from models.sharding import BATCH, DATA, FSDP, TENSOR, Layout, constrain
from remat_kit import StackPlan, remat, stack
from remat_kit.attention import Kernel, Partition, attend
from remat_kit.policy import NONE
from remat_kit.presets import Role

Angles = tuple[jax.Array, jax.Array] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """How a model runs, as opposed to what it is.

    Attributes:
        dtype: Of the computation; parameters are f32.
        kernel: Which attention.
        layout: The devices.
    """

    dtype: jnp.dtype
    kernel: Kernel
    layout: Layout


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
    def __call__(self, x_BTD: jax.Array, angles: Angles) -> tuple[jax.Array, None]:
        """The stream after the block, and nothing to stack."""
        x_BTD = checkpoint_name(constrain(x_BTD, self.runtime.layout, BATCH), "block_in")
        x_BTD += self.attend(make_norm(self.config, self.runtime.dtype, name="attn_norm")(x_BTD), angles)
        x_BTD += self.feed(make_norm(self.config, self.runtime.dtype, name="mlp_norm")(x_BTD))
        return constrain(x_BTD, self.runtime.layout, BATCH), None

    def attend(self, x_BTD: jax.Array, angles: Angles) -> jax.Array:
        """Causal attention with its projections."""
        config, layout = self.config, self.runtime.layout
        q_BTHK = self.heads(x_BTD, "q", config.num_heads, angles)
        k_BTGK = self.heads(x_BTD, "k", config.num_kv_heads, angles)
        v_BTGK = self.heads(x_BTD, "v", config.num_kv_heads, None)
        partition = None if layout.mesh is None else Partition(mesh=layout.mesh, batch=BATCH, heads=TENSOR)
        a_BTHK = attend(q_BTHK, k_BTGK, v_BTGK, kernel=self.runtime.kernel, partition=partition, name="attn")
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
        bias, dtype = self.config.has_biases, self.runtime.dtype
        return Projection(num_features, bias, dtype, self.runtime.layout, name=name)(x_BTD)


class Decoder(nn.Module):
    """Tokens to hidden states.

    Attributes:
        config: What the model is.
        runtime: How it runs.
        plan: Policies of its stack `layers`.
    """

    config: DecoderConfig
    runtime: Runtime
    plan: StackPlan

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Hidden states after the final norm; the head is the loss's business."""
        config = self.config
        x_BTD, angles = self.embed(tokens_BT), self.angles(tokens_BT.shape[1])
        mixes = self.plan.is_mixed and not self.is_initializing()
        x_BTD = self.mixed_layers(x_BTD, angles) if mixes else self.layers(x_BTD, angles)
        if not config.has_tied_head:
            self.param("head", WEIGHT_INIT, (config.vocab_size, config.d_model), jnp.float32)
        return make_norm(config, self.runtime.dtype, name="final_norm")(x_BTD)

    def layers(self, x_BTD: jax.Array, angles: Angles) -> jax.Array:
        """The stack under one policy: a plain scan."""
        policy = NONE if self.plan.is_mixed else self.plan.policy
        is_loop = self.config.num_layers > 1  # XLA unrolls a loop of one: its recomputation would be merged away
        scanned = nn.scan(
            remat(Block, policy, prevent_cse=not is_loop),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,  # type: ignore[arg-type]  # Flax annotates less than it takes
            length=self.config.num_layers,
        )
        return scanned(self.config, self.runtime, name="layers")(x_BTD, angles)[0]

    def mixed_layers(self, x_BTD: jax.Array, angles: Angles) -> jax.Array:
        """The stack under a policy per segment, on the parameters that the scan makes."""
        block = Block(self.config, self.runtime, parent=None)

        def layer(params: Any, x_BTD: jax.Array, consts: tuple[Angles]) -> jax.Array:
            return block.apply({"params": params}, x_BTD, *consts)[0]

        return stack(layer, self.variables["params"]["layers"], x_BTD, self.plan, consts=(angles,))

    def angles(self, num_tokens: int) -> Angles:
        """Rotary angles, None for learned positions."""
        if self.config.positions is Positions.LEARNED:
            return None
        return rotary_angles(num_tokens, self.config.head_dim, self.config.rope_theta)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Rows of the embedding, plus positions where they are learned."""
        config, layout = self.config, self.runtime.layout
        table_VD = self.param("embedding", WEIGHT_INIT, (config.vocab_size, config.d_model), jnp.float32)
        x_BTD = jnp.take(table_VD.astype(self.runtime.dtype), tokens_BT, axis=0)
        # Each device looks up its slice of D for the tokens of its fsdp group; then slices are exchanged for sequences.
        x_BTD = constrain(x_BTD, layout, DATA, None, FSDP if config.d_model % layout.axis_size(FSDP) == 0 else None)
        if config.positions is Positions.LEARNED:
            shape = (config.max_seq, config.d_model)
            place_TD = self.param("positions", WEIGHT_INIT, shape, jnp.float32)[: tokens_BT.shape[1]]
            x_BTD += place_TD.astype(self.runtime.dtype)
        return constrain(x_BTD, layout, BATCH)
