"""Parts of a block: a projection whose weight is gathered where it is used, norms, rotary positions.

Parameters are f32, computing happens in `dtype`. Norms take their statistics in f32.

Legend: B batch, T tokens, D width in, F width out, H heads, K width of a head.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from models.config import DecoderConfig, Norm
from models.sharding import FSDP, Axis, Layout, constrain, parameter_axes

WEIGHT_INIT = nn.initializers.normal(stddev=0.02)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather_weight(weight: jax.Array, layout: Layout, axes: tuple[Axis, ...]) -> jax.Array:
    """Brings the fsdp shards of one weight together; its gradient is scattered to the shards again.

    Without it the compiler may split a matmul's contraction instead and move activations. A plain sharding constraint would
    make the gradient whole on every device first.
    """
    return constrain(weight, layout, *(None if axis == FSDP else axis for axis in axes))


def _gather_forward(weight: jax.Array, layout: Layout, axes: tuple[Axis, ...]) -> tuple[jax.Array, None]:
    return gather_weight(weight, layout, axes), None


def _gather_backward(layout: Layout, axes: tuple[Axis, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (constrain(gradient, layout, *axes),)


gather_weight.defvjp(_gather_forward, _gather_backward)


class Projection(nn.Module):
    """`x @ kernel + bias` in `dtype`, the weight gathered from its shards.

    Attributes:
        num_features: F.
        has_bias: Whether there is a bias.
        dtype: Of the computation.
        layout: The devices.
    """

    num_features: int
    has_bias: bool
    dtype: jnp.dtype
    layout: Layout

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        shape = (x_BTD.shape[-1], self.num_features)
        kernel_DF = self.param("kernel", WEIGHT_INIT, shape, jnp.float32)
        axes = parameter_axes((self.name or "", "kernel"), shape, self.layout)
        y_BTF = x_BTD @ gather_weight(kernel_DF.astype(self.dtype), self.layout, axes)
        if self.has_bias:
            y_BTF += self.param("bias", nn.initializers.zeros, (self.num_features,), jnp.float32).astype(self.dtype)
        return y_BTF


def make_norm(config: DecoderConfig, dtype: jnp.dtype, *, name: str) -> nn.Module:
    """The family's norm."""
    match config.norm:
        case Norm.LAYER:
            return nn.LayerNorm(epsilon=config.norm_epsilon, dtype=dtype, name=name)
        case Norm.RMS:
            return nn.RMSNorm(epsilon=config.norm_epsilon, dtype=dtype, name=name)


def rotary_angles(num_tokens: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the rotary angles (Su et al., 2021), each (T, K/2) in f32."""
    inverse_frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = jnp.arange(num_tokens, dtype=jnp.float32)[:, None] * inverse_frequency
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTHK: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns each pair (k, k + K/2) of a head by its position's angle, in f32."""
    cos, sin = (part[None, :, None, :] for part in angles)
    first, second = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHK.dtype)
