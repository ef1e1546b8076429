"""Weights in 4 bits: packed codes and a bf16 scale per block of 64 inputs, quantized and dequantized by qwix.

`int4` has evenly spaced values, `nf4` those that are evenly likely under a normal distribution (Dettmers et al., 2023). Codes are
packed two to a byte here and not left as int4 arrays: of these XLA for GPUs keeps an unpacked copy of a whole scanned stack.

Legend: D width in, F width out, K blocks of the D axis.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import qwix

BLOCK = 64

_CODES = {"int4": jnp.int4, "nf4": jnp.uint4}


class Quantized(NamedTuple):
    """A weight in 4 bits.

    Attributes:
        codes: (D, F/2) uint8, two columns to a byte.
        scales: (K, F) bf16.
    """

    codes: jax.Array
    scales: jax.Array


def quantize(kernel_DF: jax.Array, qtype: str) -> Quantized:
    """Rounds a weight to 4 bits, by the largest of each block.

    Args:
        kernel_DF: The weight; F is even. Blocks are the largest common divisor of D and `BLOCK`.
        qtype: `int4` or `nf4`.
    """
    block = math.gcd(kernel_DF.shape[0], BLOCK)
    array = qwix.quantize(kernel_DF, qtype, channelwise_axes=(1,), tiled_axes={0: block}, scale_dtype=jnp.bfloat16)
    pairs = array.qvalue.reshape(kernel_DF.shape[0], -1, 2)
    return Quantized(jax.lax.bitcast_convert_type(pairs, jnp.uint8), array.scale)


def dequantize(kernel: Quantized, qtype: str, dtype: Any) -> jax.Array:
    """The weight (D, F) that the codes stand for.

    Args:
        kernel: What `quantize` returned.
        qtype: As it was given there.
        dtype: Of the result.
    """
    codes_DF = jax.lax.bitcast_convert_type(kernel.codes, _CODES[qtype]).reshape(kernel.codes.shape[0], -1)
    # In the dtype of the result: what is multiplied in bf16 and then cast may or may not be rounded, as XLA fuses it.
    array = qwix.QArray(qvalue=codes_DF, scale=kernel.scales.astype(dtype), zero_point=None, qtype=qtype)
    return qwix.dequantize(array).astype(dtype)
