"""Low-rank adapters on frozen projections: LoRA (Hu et al., 2021) over bf16 weights, QLoRA (Dettmers et al., 2023) over 4 bits.

The frozen weight is an input of the step like any other, without a gradient. Its projection has a derivative rule of its own
which keeps nothing but the weight as it is stored: 4-bit weights are dequantized where they are used, in the forward pass and
again in the backward one, and neither the input nor a dequantized copy waits in between, whatever the policy.

Legend: B batch, T tokens, D width in, F width out, R rank.
"""

from dataclasses import dataclass
from enum import StrEnum

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from models.layers import DENSE, WEIGHT_INIT, gathered, project
from models.quantized import Quantized, dequantize, quantize
from models.sharding import Axis, Layout, parameter_axes
from remat_kit.errors import StepError, nearest

Stored = jax.Array | Quantized
PartAxes = tuple[tuple[Axis, ...], ...]

FACTORS = ("lora_a", "lora_b")

# So that a learning rate serves any rank (Hu et al., 2021).
ALPHA = 16.0


class Frozen(StrEnum):
    """How frozen weights are stored."""

    BF16 = "bf16"
    INT4 = "int4"
    NF4 = "nf4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What is added to each projection of a block.

    Attributes:
        rank: R; what the adapter adds is scaled by `ALPHA` / R.
        frozen: How the projection's own weight is stored.
    """

    rank: int
    frozen: Frozen


def make_adapter(rank: int, frozen: str) -> Adapter | None:
    """Reads the options of a step.

    Args:
        rank: 0 = no adapter.
        frozen: A `Frozen`.

    Raises:
        StepError: The rank is negative, or there is no such way to store weights.
    """
    allowed = [each.value for each in Frozen]
    if frozen not in allowed:
        raise StepError(f"frozen={frozen!r}: choose from {', '.join(allowed)}.{nearest(frozen, allowed)}")
    if rank < 0:
        raise StepError(f"lora_rank={rank}: it must be at least 1, or 0 to train the model itself.")
    if rank == 0 and frozen != Frozen.BF16:
        raise StepError(f"frozen={frozen}: weights are frozen only beside adapters; give lora_rank=16, or leave frozen out.")
    return Adapter(rank=rank, frozen=Frozen(frozen)) if rank else None


def is_factor(names: tuple[str, ...]) -> bool:
    """Whether a parameter, by the names of its path, is an adapter's: these train, all others are frozen."""
    return names[-1] in FACTORS


def store(kernel_DF: jax.Array, frozen: Frozen) -> Stored:
    """A weight as it is stored."""
    return kernel_DF.astype(jnp.bfloat16) if frozen is Frozen.BF16 else quantize(kernel_DF, frozen)


def _frozen_project(x_BTD: jax.Array, kernel: Stored, frozen: Frozen, layout: Layout, axes: PartAxes) -> jax.Array:
    """`x @ kernel` in the dtype of `x`, the kernel gathered from its shards as it is stored, then dequantized."""
    return x_BTD @ _restored(kernel, x_BTD.dtype, frozen, layout, axes)


def _restored(kernel: Stored, dtype: jnp.dtype, frozen: Frozen, layout: Layout, axes: PartAxes) -> jax.Array:
    parts, treedef = jax.tree.flatten(kernel)
    whole = treedef.unflatten([gathered(part, layout, each) for part, each in zip(parts, axes, strict=True)])
    return dequantize(whole, frozen, dtype) if isinstance(whole, Quantized) else whole.astype(dtype)


def _forward(x_BTD: jax.Array, kernel: Stored, frozen: Frozen, layout: Layout, axes: PartAxes) -> tuple[jax.Array, Stored]:
    return _frozen_project(x_BTD, kernel, frozen, layout, axes), kernel


def _backward(frozen: Frozen, layout: Layout, axes: PartAxes, kernel: Stored, d_y_BTF: jax.Array) -> tuple[jax.Array, None]:
    return jnp.einsum("btf,df->btd", d_y_BTF, _restored(kernel, d_y_BTF.dtype, frozen, layout, axes)), None


frozen_project = jax.custom_vjp(_frozen_project, nondiff_argnums=(2, 3, 4))
frozen_project.defvjp(_forward, _backward)


class AdaptedProjection(nn.Module):
    """A frozen `x @ kernel + bias` plus a low-rank product that trains.

    Attributes:
        num_features: F.
        has_bias: Whether there is a bias.
        dtype: Of the computation.
        layout: The devices.
        adapter: What is added.
    """

    num_features: int
    has_bias: bool
    dtype: jnp.dtype
    layout: Layout
    adapter: Adapter

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """The projected input; its rank-R image carries the name of the projection with `_lora`."""
        name, adapter, x_BTD = self.name or "", self.adapter, x_BTD.astype(self.dtype)
        shape = (x_BTD.shape[-1], self.num_features)
        kernel = self.param("kernel", lambda key: store(WEIGHT_INIT(key, shape), adapter.frozen))
        axes = tuple(parameter_axes((name, "kernel"), part.shape, self.layout) for part in jax.tree.leaves(kernel))
        y_BTF = frozen_project(x_BTD, kernel, adapter.frozen, self.layout, axes)
        if self.has_bias:
            y_BTF += self.param("bias", nn.initializers.zeros, (self.num_features,), jnp.float32).astype(self.dtype)
        low_BTR = self.factor(x_BTD, "lora_a", nn.initializers.he_uniform(), adapter.rank)
        low_BTR = checkpoint_name(low_BTR * (ALPHA / adapter.rank), f"{name}_lora")
        return y_BTF + self.factor(low_BTR, "lora_b", nn.initializers.zeros, self.num_features)

    def factor(self, x_BTD: jax.Array, name: str, init: nn.initializers.Initializer, num_features: int) -> jax.Array:
        """One of the two factors."""
        shape = (x_BTD.shape[-1], num_features)
        axes = parameter_axes((self.name or "", name), shape, self.layout)
        return project(x_BTD, self.param(name, init, shape, jnp.float32), self.layout, axes, DENSE)
