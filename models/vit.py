"""A vision transformer for images of any size: patches, a scanned stack of the decoder's blocks that sees all of them, a head.

After Dosovitskiy et al. (2020) with the changes of Beyer et al. (2022) that matter for memory: the mean of the patches instead of
a class token, so that the number of tokens stays a multiple of what fused kernels take. Names of values are those of
`models/decoder.py`; the step factories are in `vit_steps.py`.

Legend: B batch, S height and width of an image, C channels, T patches, P pixels of a patch times channels, D model width,
V classes.
"""

import dataclasses
from dataclasses import dataclass
from typing import TypedDict

import jax
import jax.numpy as jnp
from flax import linen as nn

from models.config import DecoderConfig, gpt2
from models.decoder import Block, Runtime
from models.layers import WEIGHT_INIT, Projection, make_norm
from models.sharding import BATCH, Layout, constrain
from remat_kit import StackPlan
from remat_kit.apply.linen_stack import stack_module
from remat_kit.attention import Kernel, Mask

CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    """Sizes of a vision transformer.

    Attributes:
        blocks: Its blocks: those of a GPT-2 in which a token sees all others.
        image: Height and width of an image in pixels.
        patch: The same of a patch; it divides `image`.
        num_classes: Labels of an image.
    """

    blocks: DecoderConfig
    image: int
    patch: int
    num_classes: int

    @property
    def num_patches(self) -> int:
        """Tokens of an image."""
        return (self.image // self.patch) ** 2


class Batch(TypedDict):
    """Images (B, S, S, C) uint8, labels (B,) int32, and the weight of each image in the loss (B,) f32, 0 = left out."""

    images: jax.Array
    labels: jax.Array
    weights: jax.Array


def vit(num_layers: int, d_model: int, num_heads: int, *, image: int, patch: int, num_classes: int) -> VitConfig:
    """A vision transformer of these sizes."""
    decoder = gpt2(num_layers, d_model, num_heads, vocab_size=num_classes)
    blocks = dataclasses.replace(decoder, mask=Mask.FULL, max_seq=None, norm_epsilon=1e-6)
    return VitConfig(blocks=blocks, image=image, patch=patch, num_classes=num_classes)


class Vit(nn.Module):
    """Images to logits.

    Attributes:
        config: What the model is.
        runtime: How it runs.
        plan: Policies of its stack `layers`.
    """

    config: VitConfig
    runtime: Runtime
    plan: StackPlan

    @nn.compact
    def __call__(self, images_BSSC: jax.Array) -> jax.Array:
        """Logits (B, V) in f32."""
        blocks, runtime = self.config.blocks, self.runtime
        x_BTD = self.embed(images_BSSC)
        layers = stack_module(Block, num_layers=blocks.num_layers, plan=self.plan)(blocks, runtime, name="layers")
        x_BTD = make_norm(blocks, runtime.dtype, name="final_norm")(layers(x_BTD, None)[0])
        mean_BD = x_BTD.mean(1, dtype=jnp.float32)
        classifier = Projection(self.config.num_classes, True, jnp.dtype(jnp.float32), runtime.layout, name="classifier")
        return classifier(mean_BD[:, None])[:, 0]

    def embed(self, images_BSSC: jax.Array) -> jax.Array:
        """Patches, projected, with learned positions."""
        config, runtime = self.config, self.runtime
        patches_BTP = split_into_patches(images_BSSC, config.patch).astype(runtime.dtype) / 127.5 - 1
        x_BTD = Projection(config.blocks.d_model, True, runtime.dtype, runtime.layout, name="patches")(patches_BTP)
        place_TD = self.param("positions", WEIGHT_INIT, (config.num_patches, config.blocks.d_model), jnp.float32)
        return constrain(x_BTD + place_TD.astype(runtime.dtype), runtime.layout, BATCH)


def split_into_patches(images_BSSC: jax.Array, patch: int) -> jax.Array:
    """Images as rows of patches (B, T, P), from the top left, each patch from its top left."""
    batch, height, width, channels = images_BSSC.shape
    tiles = images_BSSC.reshape(batch, height // patch, patch, width // patch, patch, channels).swapaxes(2, 3)
    return tiles.reshape(batch, -1, patch * patch * channels)


def loss_fn(params: object, batch: Batch, *, model: Vit) -> jax.Array:
    """The mean cross-entropy of a batch, weighted, an f32 scalar."""
    logits_BV: jax.Array = model.apply({"params": params}, batch["images"])  # type: ignore[assignment]
    is_label_BV = jnp.arange(logits_BV.shape[1]) == batch["labels"][:, None]
    loss_B = jax.nn.logsumexp(logits_BV, axis=-1) - jnp.where(is_label_BV, logits_BV, 0.0).sum(-1)
    weights_B = batch["weights"].astype(jnp.float32)
    return (loss_B * weights_B).sum() / jnp.maximum(weights_B.sum(), 1e-6)


def init_params(key: jax.Array, *, model: Vit) -> object:
    """Fresh f32 parameters; jit it with `out_shardings` to make them on the mesh."""
    plain = dataclasses.replace(model.runtime, kernel=Kernel.XLA, layout=Layout(devices=()))
    image = jnp.zeros((1, model.config.image, model.config.image, CHANNELS), jnp.uint8)
    return model.clone(runtime=plain).init(key, image)["params"]
