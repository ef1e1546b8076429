"""Step factories: `remat-kit compare models:gpt2_small --set batch=8 --set seq=1024 …`.

Each is `f(policies, devices, **options) -> Step`; the options are those of `StepOptions`. The step is AdamW on f32 parameters,
the state donated; on more than one device parameters and optimizer state are sharded over the mesh (its axes are Auto).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp

from models import config as configs
from models.adapters import Adapter, Frozen, is_factor, make_adapter
from models.alternatives import alternatives
from models.checks import check_counts, check_layout
from models.config import DecoderConfig
from models.decoder import Decoder, Runtime, roles
from models.devices import choose_attention, choose_dtype
from models.experts import ROUTING, keep_routing
from models.model_step import ModelStep, Trained, make_model_step
from models.nnx_decoder import NnxLanguageModel, init_nnx_params
from models.sharding import BATCH, Layout, make_layout
from models.training import FLOAT16_LOSS_SCALE, Batch, LanguageModel, OptimizerOptions, all_train, init_params, loss_fn, losses
from remat_kit import Knobs, Policies, Stack, StepError
from remat_kit.policy import FULL
from remat_kit.presets import resolve_stack

DEFAULT_CHUNK = 256
OPTIMIZER = OptimizerOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Options of every factory here.

    Attributes:
        batch: Sequences in all, over all devices.
        seq: Tokens of a sequence.
        layers: Blocks.
        attention: `auto`, `xla`, `cudnn` or `splash`.
        mesh: Like `data:2,fsdp:4`; empty = all devices on fsdp.
        dtype: Of the computation: `auto`, `bfloat16`, `float16` or `float32`; parameters are f32.
        chunk: At most so many tokens of each sequence whose logits exist at a time.
        accumulate: Micro-batches that the batch is split into.
        group: How layers under `full` keep only some of their inputs: empty = each its own, `sqrt` or `recursive`, see
            `remat_kit.stack`.
        optimizer: AdamW and its schedule.
        adapter: Low-rank adapters train, the model is frozen; None = the model trains.
    """

    batch: int
    seq: int
    layers: int
    attention: str = "auto"
    mesh: str = ""
    dtype: str = "auto"
    chunk: int = DEFAULT_CHUNK
    accumulate: int = 1
    group: str = ""
    optimizer: OptimizerOptions = OPTIMIZER
    adapter: Adapter | None = None


class Api(StrEnum):
    """Which of Flax's two APIs a decoder is written in."""

    LINEN = "linen"
    NNX = "nnx"


def make_step(
    config: DecoderConfig, policies: Policies, devices: Sequence[Any], options: StepOptions, *, api: Api = Api.LINEN
) -> ModelStep:
    """The training step of a decoder.

    Args:
        config: What the model is; its number of layers is taken from the options.
        policies: `policies["layers"]` is the plan of its stack.
        devices: The target's devices.
        options: See `StepOptions`.
        api: In NNX there are GPT-2s, without adapters.

    Returns:
        A step of `(TrainState, Batch) -> (TrainState, metrics)`, its state donated.

    Raises:
        StepError: An option does not fit the model, the devices or another option.
    """
    config = dataclasses.replace(config, num_layers=options.layers)
    layout = make_layout(devices, options.mesh)
    _check_sizes(config, layout, options, api)
    dtype = choose_dtype(options.dtype, devices)
    kernel, notes = choose_attention(options.attention, devices, config=config, seq=options.seq, dtype=dtype)
    stack = Stack(name="layers", num_layers=config.num_layers, accepts_mixed=True, roles=roles(config))
    plan = resolve_stack(policies["layers"], stack.roles)
    if config.experts is not None:
        plan, notes = keep_routing(plan), (*notes, f"{ROUTING}: saved under every policy")
    runtime = Runtime(dtype=dtype, kernel=kernel, layout=layout, adapter=options.adapter)
    group = options.group if any(segment.policy == FULL and segment.num_layers != 1 for segment in plan.segments) else None
    if api is Api.NNX:
        model = NnxLanguageModel(config=config, runtime=runtime, plan=plan, group=group or None)  # pyright: ignore[reportArgumentType]
        return _as_step(model, functools.partial(init_nnx_params, model=model), stack, options, notes)
    model = Decoder(config, runtime, plan, group=group or None)
    made = _as_step(model, functools.partial(init_params, model=model), stack, options, notes)
    return dataclasses.replace(made, alternatives=alternatives(config, options, num_shards=layout.axis_size(BATCH)))


def _as_step(
    model: LanguageModel, init: Callable[[jax.Array], Any], stack: Stack, options: StepOptions, notes: tuple[str, ...]
) -> ModelStep:
    layout = model.runtime.layout
    trained = Trained(
        init_params=init,
        loss=functools.partial(loss_fn, model=model, chunk=options.chunk),
        batch=_abstract_batch(layout, options),
        random_batch=functools.partial(_random_batch, vocab_size=model.config.vocab_size, options=options),  # pyright: ignore[reportArgumentType]
        layout=layout,
        stack=stack,
        num_labels=model.config.vocab_size,
        loss_scale=FLOAT16_LOSS_SCALE if model.runtime.dtype == jnp.float16 else 1.0,
        notes=notes,
        is_trained=all_train if model.runtime.adapter is None else is_factor,
        evaluate=functools.partial(_cross_entropy, model=model, chunk=options.chunk),
    )
    knobs = Knobs(batch="batch", seq="seq", depth="layers")
    return make_model_step(trained, optimizer=options.optimizer, accumulate=options.accumulate, knobs=knobs)


def _cross_entropy(params: Any, batch: Batch, *, model: LanguageModel, chunk: int) -> jax.Array:
    return losses(params, batch, model=model, chunk=chunk)[0]


def _check_sizes(config: DecoderConfig, layout: Layout, options: StepOptions, api: Api) -> None:
    check_counts(batch=options.batch, seq=options.seq, layers=options.layers, chunk=options.chunk)
    if config.max_seq is not None and options.seq > config.max_seq:
        raise StepError(
            f"seq={options.seq}: this model has {config.max_seq} learned positions; give seq={config.max_seq} or less."
        )
    check_layout(config, layout, batch=options.batch, mesh=options.mesh)
    if api is Api.NNX and options.adapter is not None:
        raise StepError("lora_rank: models in NNX have no adapters here; give lora_rank=0, or the model in Linen.")
    if options.adapter is not None and config.experts is not None:
        raise StepError("lora_rank: experts have no adapters here; give lora_rank=0, or a model without experts.")


def _abstract_batch(layout: Layout, options: StepOptions) -> dict[str, jax.ShapeDtypeStruct]:
    def of(dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((options.batch, options.seq), dtype, sharding=layout.sharding(BATCH))

    return {"tokens": of("int32"), "labels": of("int32"), "weights": of("float32")}


def _random_batch(key: jax.Array, *, vocab_size: int, options: StepOptions) -> Batch:
    shape = (options.batch, options.seq)
    tokens = jax.random.randint(key, (shape[0], shape[1] + 1), 0, vocab_size, jnp.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": jnp.ones(shape, jnp.float32)}


def _factory(
    name: str,
    config: DecoderConfig,
    default_batch: int,
    default_seq: int,
    *,
    default_rank: int = 0,
    default_frozen: str = Frozen.BF16.value,
    api: Api = Api.LINEN,
) -> Callable[..., ModelStep]:
    def factory(
        policies: Policies,
        devices: Sequence[Any],
        *,
        batch: int = default_batch,
        seq: int = default_seq,
        layers: int = config.num_layers,
        attention: str = "auto",
        mesh: str = "",
        dtype: str = "auto",
        chunk: int = DEFAULT_CHUNK,
        accumulate: int = 1,
        group: str = "",
        lora_rank: int = default_rank,
        frozen: str = default_frozen,
        learning_rate: float = OPTIMIZER.learning_rate,
        warmup: int = OPTIMIZER.warmup,
        decay_steps: int = OPTIMIZER.decay_steps,
        weight_decay: float = OPTIMIZER.weight_decay,
        max_norm: float = OPTIMIZER.max_norm,
    ) -> ModelStep:
        optimizer = OptimizerOptions(
            learning_rate=learning_rate, warmup=warmup, decay_steps=decay_steps, weight_decay=weight_decay, max_norm=max_norm
        )
        options = StepOptions(
            batch=batch,
            seq=seq,
            layers=layers,
            attention=attention,
            mesh=mesh,
            dtype=dtype,
            chunk=chunk,
            accumulate=accumulate,
            group=group,
            optimizer=optimizer,
            adapter=make_adapter(lora_rank, frozen),
        )
        return make_step(config, policies, devices, options, api=api)

    return _named(factory, name)


def _named(factory: Callable[..., ModelStep], name: str) -> Callable[..., ModelStep]:
    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"A training step of {name}: AdamW, donated state, FSDP. Options: see `StepOptions` and `OptimizerOptions`."
    return factory


gpt2_tiny = _factory("gpt2_tiny", configs.GPT2_TINY, 4, 32)
gpt2_small = _factory("gpt2_small", configs.GPT2_SMALL, 8, 1024)
gpt2_medium = _factory("gpt2_medium", configs.GPT2_MEDIUM, 8, 1024)
gpt2_large = _factory("gpt2_large", configs.GPT2_LARGE, 8, 1024)
gpt2_xl = _factory("gpt2_xl", configs.GPT2_XL, 8, 1024)
llama3_tiny = _factory("llama3_tiny", configs.LLAMA3_TINY, 4, 32)
llama3_8b = _factory("llama3_8b", configs.LLAMA3_8B, 32, 2048)
llama3_70b = _factory("llama3_70b", configs.LLAMA3_70B, 128, 4096)
llama3_8b_lora = _factory("llama3_8b_lora", configs.LLAMA3_8B, 8, 2048, default_rank=16)
llama3_8b_qlora = _factory("llama3_8b_qlora", configs.LLAMA3_8B, 8, 2048, default_rank=16, default_frozen=Frozen.NF4.value)
moe_tiny = _factory("moe_tiny", configs.MOE_TINY, 4, 32)
moe_small = _factory("moe_small", configs.MOE_SMALL, 8, 1024)
mixtral_8x7b = _factory("mixtral_8x7b", configs.MIXTRAL_8X7B, 32, 2048)
gpt2_nnx_tiny = _factory("gpt2_nnx_tiny", configs.GPT2_TINY, 4, 32, api=Api.NNX)
gpt2_nnx_small = _factory("gpt2_nnx_small", configs.GPT2_SMALL, 8, 1024, api=Api.NNX)
