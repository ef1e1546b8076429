"""Attention whose kernel a policy can save.

`save(attn)` means that the attention kernel is not run again in the backward pass. For that, what its backward kernel needs (the
output *and* the softmax statistics) must carry the name inside the forward rule; a name put on the output alone, from outside,
saves the output and re-runs the kernel. Plain XLA attention has no statistics: its context is named, and the backward pass forms
the probabilities again.

Legend: B batch, T query tokens, S key tokens, H = G x R query heads, G key/value heads, K width of a head.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from remat_kit import _jax


class Kernel(StrEnum):
    """Who computes attention."""

    XLA = "xla"
    CUDNN = "cudnn"
    SPLASH = "splash"


class Mask(StrEnum):
    """Which keys a query sees: those up to itself, or all."""

    CAUSAL = "causal"
    FULL = "full"


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


def attend(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    *,
    kernel: Kernel,
    mask: Mask = Mask.CAUSAL,
    partition: Partition | None = None,
    name: str = "attn",
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over the keys that each query sees.

    Args:
        q_BTHK: Queries.
        k_BSGK: Keys; H must be a multiple of G.
        v_BSGK: Values.
        kernel: Who computes it.
        mask: Which keys a query sees.
        partition: How fused kernels run on more than one device.
        name: Given to what saves the kernel from running again.

    Returns:
        The context, shaped like the queries.
    """
    match kernel:
        case Kernel.XLA:
            return checkpoint_name(xla_attention(q_BTHK, k_BSGK, v_BSGK, mask), name)
        case Kernel.CUDNN | Kernel.SPLASH:
            return _fused_attention(q_BTHK, k_BSGK, v_BSGK, Fused(kernel=kernel, mask=mask, partition=partition, name=name))
        case _:
            assert_never(kernel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """A fused kernel; see `attend`."""

    kernel: Kernel
    mask: Mask
    partition: Partition | None
    name: str


def _fused_context(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, fused: Fused) -> jax.Array:
    return _fused_forward(q_BTHK, k_BSGK, v_BSGK, fused)[0]


def _fused_forward(
    q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, fused: Fused
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    run = functools.partial(_cudnn_forward if fused.kernel is Kernel.CUDNN else _splash_forward, mask=fused.mask)
    out_BTHK, stats_BHT = _on_each_device(run, fused.partition, (q_BTHK, k_BSGK, v_BSGK), ranks=(4, 3))
    out_BTHK, stats_BHT = checkpoint_name(out_BTHK, fused.name), checkpoint_name(stats_BHT, fused.name)
    return out_BTHK, (q_BTHK, k_BSGK, v_BSGK, out_BTHK, stats_BHT)


def _fused_backward(
    fused: Fused, residuals: tuple[jax.Array, ...], d_out_BTHK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    run = functools.partial(_cudnn_backward if fused.kernel is Kernel.CUDNN else _splash_backward, mask=fused.mask)
    d_q_BTHK, d_k_BSGK, d_v_BSGK = _on_each_device(run, fused.partition, (*residuals, d_out_BTHK), ranks=(4, 4, 4))
    return d_q_BTHK, d_k_BSGK, d_v_BSGK


_fused_attention = jax.custom_vjp(_fused_context, nondiff_argnums=(3,))
_fused_attention.defvjp(_fused_forward, _fused_backward)


def _on_each_device(
    run: Callable[..., tuple[jax.Array, ...]],
    partition: Partition | None,
    operands: tuple[jax.Array, ...],
    *,
    ranks: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    """Runs a kernel on each device's part: the compiler can't split it. Rank 4 is (B, T, H, K), rank 3 statistics (B, H, T).

    Under jit, as JAX 0.10 never drops a bare Pallas call, used or not: a kernel whose results are saved would be run again.
    """
    if partition is None:
        return jax.jit(run)(*operands)
    specs = {
        4: PartitionSpec(partition.batch, None, partition.heads, None),
        3: PartitionSpec(partition.batch, partition.heads, None),
    }
    mapped = jax.shard_map(
        run,
        mesh=partition.mesh,
        in_specs=tuple(specs[operand.ndim] for operand in operands),
        out_specs=tuple(specs[rank] for rank in ranks),
        check_vma=False,  # Pallas calls do not say over which axes their results vary
    )
    return jax.jit(mapped)(*operands)


def _cudnn_forward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, mask: Mask) -> tuple[jax.Array, jax.Array]:
    scale, is_causal = q_BTHK.shape[-1] ** -0.5, mask is Mask.CAUSAL
    return _jax.cudnn_attention_forward(q_BTHK, k_BSGK, v_BSGK, scale=scale, is_causal=is_causal)


def _cudnn_backward(q_BTHK: jax.Array, *others: jax.Array, mask: Mask) -> tuple[jax.Array, jax.Array, jax.Array]:
    scale, is_causal = q_BTHK.shape[-1] ** -0.5, mask is Mask.CAUSAL
    return _jax.cudnn_attention_backward(q_BTHK, *others, scale=scale, is_causal=is_causal)


def _splash_forward(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, *, mask: Mask) -> tuple[jax.Array, jax.Array]:
    forward = functools.partial(_jax.splash_attention_forward, _splash_kernel(q_BTHK, mask))
    scaled_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
    out_BHTK, logsumexp_BHT = jax.vmap(forward)(*(x.swapaxes(1, 2) for x in (scaled_BTHK, k_BSGK, v_BSGK)))
    return out_BHTK.swapaxes(1, 2), logsumexp_BHT


def _splash_backward(
    q_BTHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    out_BTHK: jax.Array,
    logsumexp_BHT: jax.Array,
    d_out_BTHK: jax.Array,
    *,
    mask: Mask,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    scale = q_BTHK.shape[-1] ** -0.5
    backward = functools.partial(_jax.splash_attention_backward, _splash_kernel(q_BTHK, mask))
    q, k, v, out, d_out = (x.swapaxes(1, 2) for x in (q_BTHK * scale, k_BSGK, v_BSGK, out_BTHK, d_out_BTHK))
    d_q, d_k, d_v = (x.swapaxes(1, 2) for x in jax.vmap(backward)((q, k, v, out, logsumexp_BHT), d_out))
    return (d_q * scale).astype(q_BTHK.dtype), d_k.astype(k_BSGK.dtype), d_v.astype(v_BSGK.dtype)


SPLASH_BLOCKS = (512, 256, 128)


def _splash_kernel(q_BTHK: jax.Array, mask: Mask) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow to import

    num_tokens, num_heads = q_BTHK.shape[1:3]
    size = next(block for block in SPLASH_BLOCKS if num_tokens % block == 0)
    blocks = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    make_mask = splash.CausalMask if mask is Mask.CAUSAL else splash.FullMask
    masks = splash.MultiHeadMask([make_mask((num_tokens, num_tokens))] * num_heads)
    return splash.make_splash_mha(masks, block_sizes=blocks, head_shards=1, q_seq_shards=1)


def xla_attention(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask: Mask = Mask.CAUSAL) -> jax.Array:
    """Attention as two matmuls around a softmax in f32; keeps the probabilities in the dtype of the queries."""
    batch, num_tokens, _, width = q_BTHK.shape
    q_BGRTK = q_BTHK.reshape(batch, num_tokens, k_BSGK.shape[2], -1, width).transpose(0, 2, 3, 1, 4)
    k_BGSK, v_BGSK = k_BSGK.swapaxes(1, 2), v_BSGK.swapaxes(1, 2)
    # The cotangent of f32 logits is f32: without a named algorithm its two matmuls would run in f32 too.
    algorithm = _ALGORITHMS.get(q_BTHK.dtype.name)
    logits_BGRTS = jnp.einsum("bgrtk,bgsk->bgrts", q_BGRTK, k_BGSK, precision=algorithm, preferred_element_type=jnp.float32)
    probabilities_BGRTS = _softmax(logits_BGRTS, width**-0.5, q_BTHK.dtype, mask)
    context_BGRTK = jnp.einsum("bgrts,bgsk->bgrtk", probabilities_BGRTS, v_BGSK)
    return context_BGRTK.transpose(0, 3, 1, 2, 4).reshape(q_BTHK.shape)


_ALGORITHMS = {"bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32}


def _masked_softmax(logits: jax.Array, scale: float, dtype: jnp.dtype, mask: Mask) -> jax.Array:
    """Softmax over the keys that each query sees, of logits (..., T, S)."""
    if mask is Mask.FULL:
        return jax.nn.softmax(logits * scale, axis=-1).astype(dtype)
    num_queries, num_keys = logits.shape[-2:]
    visible = jnp.arange(num_queries)[:, None] >= jnp.arange(num_keys)
    return jax.nn.softmax(jnp.where(visible, logits * scale, -jnp.inf), axis=-1).astype(dtype)


def _softmax_forward(logits: jax.Array, scale: float, dtype: jnp.dtype, mask: Mask) -> tuple[jax.Array, jax.Array]:
    probabilities = _masked_softmax(logits, scale, dtype, mask)
    return probabilities, probabilities


def _softmax_backward(
    scale: float, dtype: jnp.dtype, mask: Mask, probabilities: jax.Array, gradient: jax.Array
) -> tuple[jax.Array]:
    del dtype, mask
    weighted = probabilities.astype(jnp.float32) * gradient.astype(jnp.float32)
    return (scale * (weighted - probabilities.astype(jnp.float32) * weighted.sum(-1, keepdims=True)),)


# A custom VJP, so that only the rounded result is kept.
_softmax = jax.custom_vjp(_masked_softmax, nondiff_argnums=(1, 2, 3))
_softmax.defvjp(_softmax_forward, _softmax_backward)
