"""Causal attention whose kernel a policy can save.

`save(attn)` means that the attention kernel is not run again in the backward pass. For that, what its backward kernel needs (the
output *and* the softmax statistics) must carry the name inside the forward rule; a name put on the output alone, from outside,
saves the output and re-runs the kernel. Plain XLA attention has no statistics: its context is named, and the backward pass forms
the probabilities again.

Legend: B batch, T query tokens, S key tokens, H query heads, G key/value heads (H = G x R), K width of a head.
"""

import functools
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec


class Kernel(StrEnum):
    """Who computes attention."""

    XLA = "xla"
    CUDNN = "cudnn"
    SPLASH = "splash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """How a kernel runs on a mesh: each device its sequences and heads.

    Attributes:
        mesh: The mesh.
        batch: Axes that split the batch.
        heads: Axis that splits the heads.
    """

    mesh: Mesh
    batch: tuple[str, ...]
    heads: str


def causal_attention(
    q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, kernel: Kernel, partition: Partition | None = None, name: str = "attn"
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over the keys up to each query.

    Args:
        q_BTHK: Queries.
        k_BSGK: Keys; H must be a multiple of G.
        v_BSGK: Values.
        kernel: Who computes it.
        partition: How fused kernels run on more than one device.
        name: Given to what saves the kernel from running again.

    Returns:
        The context, shaped like the queries.
    """
    match kernel:
        case Kernel.XLA:
            return checkpoint_name(xla_attention(q_BTHK, k_BSGK, v_BSGK), name)
        case Kernel.CUDNN | Kernel.SPLASH:
            raise NotImplementedError
        case _:
            assert_never(kernel)


def xla_attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """Attention as two matmuls around a softmax in f32; keeps the probabilities in the dtype of the queries."""
    batch, num_tokens, num_heads, width = q_BTHK.shape
    q_BTGRK = q_BTHK.reshape(batch, num_tokens, k_BSGK.shape[2], -1, width)
    # The cotangent of f32 logits is f32: without a named algorithm its two matmuls would run in f32 too.
    algorithm = _ALGORITHMS.get(q_BTHK.dtype.name)
    logits = jnp.einsum("btgrk,bsgk->bgrts", q_BTGRK, k_BSGK, precision=algorithm, preferred_element_type=jnp.float32)
    probabilities = _causal_softmax(logits, width**-0.5, q_BTHK.dtype)
    return jnp.einsum("bgrts,bsgk->btgrk", probabilities, v_BSGK).reshape(q_BTHK.shape)


_ALGORITHMS = {"bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _causal_softmax(logits: jax.Array, scale: float, dtype: jnp.dtype) -> jax.Array:
    """Softmax over keys up to the query, logits (..., T, S). A custom VJP, so that only the rounded result is kept."""
    num_queries, num_keys = logits.shape[-2:]
    visible = jnp.arange(num_queries)[:, None] >= jnp.arange(num_keys)
    return jax.nn.softmax(jnp.where(visible, logits * scale, -jnp.inf), axis=-1).astype(dtype)


def _softmax_forward(logits: jax.Array, scale: float, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    probabilities = _causal_softmax(logits, scale, dtype)
    return probabilities, probabilities


def _softmax_backward(scale: float, dtype: jnp.dtype, probabilities: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    del dtype
    weighted = probabilities.astype(jnp.float32) * gradient.astype(jnp.float32)
    return (scale * (weighted - probabilities.astype(jnp.float32) * weighted.sum(-1, keepdims=True)),)


_causal_softmax.defvjp(_softmax_forward, _softmax_backward)
