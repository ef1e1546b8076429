"""Cross-entropy over a large vocabulary that never holds whole logits and recomputes nothing.

A custom VJP: the forward pass scans over chunks of tokens, forms one chunk's logits in f32, its loss, and at once the gradients
with respect to hidden states and head; the backward pass only scales them. So the three matmuls of a head are done once each,
and a chunk's logits are all that ever exists. On a mesh the vocabulary is split over fsdp and tensor while the tokens of a chunk
are brought together: the head's gradient is then never whole on a device.

Legend: B batch, T tokens of a sequence, C tokens of a chunk, D model width, V vocabulary.
"""

from enum import StrEnum

import jax
import jax.numpy as jnp

from models.sharding import BATCH, DATA, FSDP, TENSOR, Layout, constrain

VOCABULARY = (FSDP, TENSOR)

# The loss and its gradients with respect to hidden states and head, so far; a frozen head has None.
_Sums = tuple[jax.Array, jax.Array, jax.Array | None]


class Head(StrEnum):
    """Whether the output head gets a gradient, which is as large as it is, in f32."""

    TRAINED = "trained"
    FROZEN = "frozen"


def chunked_cross_entropy(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    chunk: int,
    layout: Layout,
    head: Head = Head.TRAINED,
) -> jax.Array:
    """Mean over tokens of -log softmax(hidden @ head.T)[label], weighted.

    Args:
        hidden_BTD: In the dtype of the computation.
        head_VD: The output head, f32 if it trains; it is cast to the dtype of `hidden_BTD`.
        labels_BT: The right token at each place.
        weights_BT: Weight of each token in the mean, such as 1 and 0 as a mask. Not differentiated.
        chunk: At most so many tokens of each sequence at a time.
        layout: The devices.
        head: Whether the head gets a gradient.

    Returns:
        The loss, an f32 scalar; 0 when every weight is 0.
    """
    pad = -labels_BT.shape[1] % min(chunk, labels_BT.shape[1])
    if pad:
        hidden_BTD = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0)))
        labels_BT, weights_BT = (jnp.pad(x, ((0, 0), (0, pad))) for x in (labels_BT, weights_BT))
    num_chunks = max(1, -(-labels_BT.shape[1] // chunk))
    weights_BT = weights_BT.astype(jnp.float32)
    total = _summed_cross_entropy(hidden_BTD, head_VD, labels_BT, weights_BT, num_chunks, layout, head)
    return total / jnp.maximum(weights_BT.sum(), 1e-6)


def _sum(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    num_chunks: int,
    layout: Layout,
    head: Head,
) -> jax.Array:
    return _forward(hidden_BTD, head_VD, labels_BT, weights_BT, num_chunks, layout, head)[0]


def _forward(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    num_chunks: int,
    layout: Layout,
    head: Head,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    table_VD = constrain(head_VD.astype(hidden_BTD.dtype), layout, VOCABULARY)
    size = hidden_BTD.shape[1] // num_chunks

    def step(carry: _Sums, index: jax.Array) -> tuple[_Sums, None]:
        loss, d_hidden_BTD, d_head_VD = carry
        h_BCD, labels_BC, weights_BC = (
            jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=1) for x in (hidden_BTD, labels_BT, weights_BT)
        )
        # Sliced where it lies, then brought together: in one step the whole of hidden would be, once per chunk.
        h_BCD = constrain(constrain(h_BCD, layout, BATCH), layout, DATA)
        chunk_loss, d_logits_BCV = _chunk_loss(h_BCD, table_VD, labels_BC, weights_BC, layout)
        d_h_BCD = constrain(jnp.einsum("bcv,vd->bcd", d_logits_BCV, table_VD), layout, BATCH)
        if d_head_VD is not None:
            d_head_VD += jnp.einsum("bcv,bcd->vd", d_logits_BCV, h_BCD, preferred_element_type=jnp.float32)
            d_head_VD = constrain(d_head_VD, layout, VOCABULARY)
        d_hidden_BTD = jax.lax.dynamic_update_slice_in_dim(d_hidden_BTD, d_h_BCD, index * size, axis=1)
        return (loss + chunk_loss, d_hidden_BTD, d_head_VD), None

    start = (
        jnp.zeros((), jnp.float32),
        constrain(jnp.zeros_like(hidden_BTD), layout, BATCH),
        constrain(jnp.zeros(head_VD.shape, jnp.float32), layout, VOCABULARY) if head is Head.TRAINED else None,
    )
    (loss, d_hidden_BTD, d_head_VD), _ = jax.lax.scan(step, start, jnp.arange(num_chunks))
    return loss, (d_hidden_BTD, d_head_VD)


def _chunk_loss(
    h_BCD: jax.Array, table_VD: jax.Array, labels_BC: jax.Array, weights_BC: jax.Array, layout: Layout
) -> tuple[jax.Array, jax.Array]:
    """The weighted loss of a chunk, summed, and its gradient with respect to the logits in the dtype of the computation."""
    logits_BCV = jnp.einsum("bcd,vd->bcv", h_BCD, table_VD, preferred_element_type=jnp.float32)
    logits_BCV = constrain(logits_BCV, layout, DATA, None, VOCABULARY)
    # A comparison instead of a gather: it stays local where V is split, and fuses.
    is_label_BCV = jnp.arange(table_VD.shape[0]) == labels_BC[..., None]
    log_norm_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    label_logit_BC = jnp.where(is_label_BCV, logits_BCV, 0.0).sum(-1)
    probabilities_BCV = jnp.exp(logits_BCV - log_norm_BC[..., None])
    d_logits_BCV = (probabilities_BCV - is_label_BCV) * weights_BC[..., None]
    return ((log_norm_BC - label_logit_BC) * weights_BC).sum(), d_logits_BCV.astype(h_BCD.dtype)


def _backward(
    num_chunks: int, layout: Layout, head: Head, gradients: tuple[jax.Array, jax.Array | None], scale: jax.Array
) -> tuple[jax.Array, jax.Array | None, None, None]:
    del num_chunks, layout, head
    d_hidden_BTD, d_head_VD = gradients
    d_head_VD = None if d_head_VD is None else d_head_VD * scale
    return (d_hidden_BTD * scale).astype(d_hidden_BTD.dtype), d_head_VD, None, None


_summed_cross_entropy = jax.custom_vjp(_sum, nondiff_argnums=(4, 5, 6))
_summed_cross_entropy.defvjp(_forward, _backward)
