"""Parts of a block: a projection whose weight is gathered where it is used, norms, rotary positions.

Parameters are f32, computing happens in `dtype`. Norms take their statistics in f32.

Legend: B batch, T tokens, D width in, F width out, H heads, K width of a head.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from models.config import DecoderConfig, Norm
from models.sharding import FSDP, Axis, Layout, constrain, parameter_axes

WEIGHT_INIT = nn.initializers.normal(stddev=0.02)


DENSE = "btd,df->btf"


def _project(x: jax.Array, kernel: jax.Array, layout: Layout, axes: tuple[Axis, ...], equation: str) -> jax.Array:
    """`einsum(equation, x, kernel)` in the dtype of `x`, the kernel's fsdp shards brought together for it.

    A custom VJP for three reasons. Between forward and backward only the f32 shard is kept, which is there anyway: by default the
    gathered copy in the dtype of `x` would be, of every layer. The gradient is scattered to the shards at once, where a plain
    sharding constraint would make it whole on every device first. And without any constraint the compiler may split the
    contraction and move activations instead of weights.

    Args:
        x: Input, like (B, T, D).
        kernel: f32 weight, like (D, F), split by `axes`.
        layout: The devices.
        axes: See `parameter_axes`.
        equation: Such as `DENSE`; every index stands in two of its three terms, or in all three.
    """
    return jnp.einsum(equation, x, gathered(kernel.astype(x.dtype), layout, axes))  # cast first: half the bytes on the wire


def gathered(kernel: jax.Array, layout: Layout, axes: tuple[Axis, ...]) -> jax.Array:
    """A weight with its fsdp shards brought together."""
    return constrain(kernel, layout, *(None if axis == FSDP else axis for axis in axes))


def _project_forward(
    x: jax.Array, kernel: jax.Array, layout: Layout, axes: tuple[Axis, ...], equation: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not by calling `project`: policies do not look into a custom VJP that is called, `dots` would save nothing here.
    return _project(x, kernel, layout, axes, equation), (x, kernel)


def _project_backward(
    layout: Layout, axes: tuple[Axis, ...], equation: str, saved: tuple[jax.Array, jax.Array], d_y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    of_x, of_kernel, of_y = equation.replace("->", ",").split(",")
    d_x = jnp.einsum(f"{of_y},{of_kernel}->{of_x}", d_y, gathered(kernel.astype(x.dtype), layout, axes))
    d_kernel = constrain(jnp.einsum(f"{of_x},{of_y}->{of_kernel}", x, d_y), layout, *axes)
    return d_x, d_kernel.astype(kernel.dtype)


project = jax.custom_vjp(_project, nondiff_argnums=(2, 3, 4))
project.defvjp(_project_forward, _project_backward)


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
        """The projected input."""
        shape = (x_BTD.shape[-1], self.num_features)
        kernel_DF = self.param("kernel", WEIGHT_INIT, shape, jnp.float32)
        axes = parameter_axes((self.name or "", "kernel"), shape, self.layout)
        y_BTF = project(x_BTD.astype(self.dtype), kernel_DF, self.layout, axes, DENSE)
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
