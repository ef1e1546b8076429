"""Step factories of vision transformers: `remat-kit compare models:vit_b16 --set image=1024 …`.

Like those of `steps.py`: `f(policies, devices, **options) -> ModelStep`, AdamW on f32 parameters, the state donated.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from models.checks import check_counts, check_layout
from models.decoder import Runtime, roles
from models.devices import choose_attention, choose_dtype
from models.model_step import ModelStep, Trained, make_model_step
from models.sharding import BATCH, make_layout
from models.training import FLOAT16_LOSS_SCALE, OptimizerOptions
from models.vit import CHANNELS, Batch, Vit, VitConfig, init_params, loss_fn, vit
from remat_kit import Knobs, Policies, Stack, StepError
from remat_kit.presets import resolve_stack

OPTIMIZER = OptimizerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class VitOptions:
    """Options of every factory here.

    Attributes:
        batch: Images in all, over all devices.
        attention: `auto`, `xla`, `cudnn` or `splash`.
        mesh: Like `data:2,fsdp:4`; empty = all devices on fsdp.
        dtype: Of the computation: `auto`, `bfloat16`, `float16` or `float32`; parameters are f32.
        accumulate: Micro-batches that the batch is split into.
        optimizer: AdamW and its schedule.
    """

    batch: int
    attention: str = "auto"
    mesh: str = ""
    dtype: str = "auto"
    accumulate: int = 1
    optimizer: OptimizerOptions = OPTIMIZER


def make_vit_step(config: VitConfig, policies: Policies, devices: Sequence[Any], options: VitOptions) -> ModelStep:
    """The training step of a vision transformer.

    Args:
        config: What the model is.
        policies: `policies["layers"]` is the plan of its stack.
        devices: The target's devices.
        options: See `VitOptions`.

    Returns:
        A step of `(TrainState, models.vit.Batch) -> (TrainState, metrics)`, its state donated.

    Raises:
        StepError: An option does not fit the model, the devices or another option.
    """
    check_counts(batch=options.batch, layers=config.blocks.num_layers, image=config.image)
    if config.image % config.patch:
        near = max(config.patch, config.image - config.image % config.patch)
        raise StepError(f"image={config.image}: patches of {config.patch} do not cover it; give a multiple, like image={near}.")
    layout = make_layout(devices, options.mesh)
    check_layout(config.blocks, layout, batch=options.batch, mesh=options.mesh)
    dtype = choose_dtype(options.dtype, devices)
    kernel, notes = choose_attention(options.attention, devices, config=config.blocks, seq=config.num_patches, dtype=dtype)
    stack = Stack(name="layers", num_layers=config.blocks.num_layers, accepts_mixed=True, roles=roles(config.blocks))
    plan = resolve_stack(policies["layers"], stack.roles)
    model = Vit(config, Runtime(dtype=dtype, kernel=kernel, layout=layout), plan)
    return _as_step(model, stack, options, (*notes, f"patches: {config.num_patches} an image"))


def _as_step(model: Vit, stack: Stack, options: VitOptions, notes: tuple[str, ...]) -> ModelStep:
    layout, config = model.runtime.layout, model.config
    trained = Trained(
        init_params=functools.partial(init_params, model=model),
        loss=functools.partial(loss_fn, model=model),
        batch={
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(BATCH))
            for name, (shape, dtype) in _batch_types(config, options.batch).items()
        },
        random_batch=functools.partial(_random_batch, config=config, batch=options.batch),  # pyright: ignore[reportArgumentType]
        layout=layout,
        stack=stack,
        num_labels=config.num_classes,
        loss_scale=FLOAT16_LOSS_SCALE if model.runtime.dtype == jnp.float16 else 1.0,
        notes=notes,
    )
    knobs = Knobs(batch="batch", depth="layers")
    return make_model_step(trained, optimizer=options.optimizer, accumulate=options.accumulate, knobs=knobs)


def _batch_types(config: VitConfig, batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {
        "images": ((batch, config.image, config.image, CHANNELS), "uint8"),
        "labels": ((batch,), "int32"),
        "weights": ((batch,), "float32"),
    }


def _random_batch(key: jax.Array, *, config: VitConfig, batch: int) -> Batch:
    of_images, of_labels = jax.random.split(key)
    return {
        "images": jax.random.bits(of_images, _batch_types(config, batch)["images"][0], jnp.uint8),
        "labels": jax.random.randint(of_labels, (batch,), 0, config.num_classes, jnp.int32),
        "weights": jnp.ones(batch, jnp.float32),
    }


def _factory(name: str, default: VitConfig, default_batch: int) -> Callable[..., ModelStep]:
    def factory(
        policies: Policies,
        devices: Sequence[Any],
        *,
        batch: int = default_batch,
        image: int = default.image,
        layers: int = default.blocks.num_layers,
        attention: str = "auto",
        mesh: str = "",
        dtype: str = "auto",
        accumulate: int = 1,
        learning_rate: float = OPTIMIZER.learning_rate,
        warmup: int = OPTIMIZER.warmup,
        decay_steps: int = OPTIMIZER.decay_steps,
        weight_decay: float = OPTIMIZER.weight_decay,
        max_norm: float = OPTIMIZER.max_norm,
    ) -> ModelStep:
        optimizer = OptimizerOptions(
            learning_rate=learning_rate, warmup=warmup, decay_steps=decay_steps, weight_decay=weight_decay, max_norm=max_norm
        )
        options = VitOptions(batch=batch, attention=attention, mesh=mesh, dtype=dtype, accumulate=accumulate, optimizer=optimizer)
        blocks = dataclasses.replace(default.blocks, num_layers=layers)
        return make_vit_step(dataclasses.replace(default, blocks=blocks, image=image), policies, devices, options)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"A training step of {name}: AdamW, donated state, FSDP. Options: see `VitOptions`, `image`, `layers`."
    return factory


vit_tiny = _factory("vit_tiny", vit(2, 64, 4, image=32, patch=8, num_classes=10), 8)
vit_b16 = _factory("vit_b16", vit(12, 768, 12, image=224, patch=16, num_classes=1000), 64)
vit_l16 = _factory("vit_l16", vit(24, 1024, 16, image=512, patch=16, num_classes=1000), 32)
