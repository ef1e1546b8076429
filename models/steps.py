"""Step factories: `remat-kit compare models:gpt2_small --set batch=8 --set seq=1024 …`.

Each is `f(policies, devices, **options) -> Step`; the options are those of `StepOptions`. The step is AdamW on f32 parameters,
the state donated; on more than one device parameters and optimizer state are sharded over the mesh (its axes are Auto).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from models import config as configs
from models.config import DecoderConfig
from models.decoder import Decoder, Runtime, roles
from models.devices import choose_attention, choose_dtype
from models.sharding import BATCH, TENSOR, Layout, abstract, make_layout, shard_like_parameters
from models.training import Batch, TrainState, init_state, make_optimizer, train_step
from remat_kit import Knobs, Policies, Stack, Step, StepError
from remat_kit.presets import resolve_stack

DEFAULT_CHUNK = 256


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
    """

    batch: int
    seq: int
    layers: int
    attention: str = "auto"
    mesh: str = ""
    dtype: str = "auto"
    chunk: int = DEFAULT_CHUNK


def make_step(config: DecoderConfig, policies: Policies, devices: Sequence[Any], options: StepOptions) -> Step:
    """The training step of a decoder.

    Args:
        config: What the model is; its number of layers is taken from the options.
        policies: `policies["layers"]` is the plan of its stack.
        devices: The target's devices.
        options: See `StepOptions`.

    Returns:
        A step of `(TrainState, Batch) -> (TrainState, metrics)`, its state donated.

    Raises:
        StepError: An option does not fit the model, the devices or another option.
    """
    config = dataclasses.replace(config, num_layers=options.layers)
    layout = make_layout(devices, options.mesh)
    _check_sizes(config, layout, options)
    dtype = choose_dtype(options.dtype, devices)
    kernel, notes = choose_attention(options.attention, devices, config=config, seq=options.seq, dtype=dtype)
    stack = Stack(name="layers", num_layers=config.num_layers, accepts_mixed=True, roles=roles(config))
    plan = resolve_stack(policies["layers"], stack.roles)
    model = Decoder(config, Runtime(dtype=dtype, kernel=kernel, layout=layout), plan)
    return _as_step(model, stack, options, notes)


def _as_step(model: Decoder, stack: Stack, options: StepOptions, notes: tuple[str, ...]) -> Step:
    layout, optimizer = model.runtime.layout, make_optimizer()

    def fn(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        return train_step(state, batch, model=model, optimizer=optimizer, chunk=options.chunk)

    def init(key: jax.Array) -> tuple[TrainState, Batch]:
        make = jax.jit(functools.partial(init_state, model=model, optimizer=optimizer), out_shardings=shardings)
        return make(key), _random_batch(key, model, options)

    state = jax.eval_shape(lambda: init_state(jax.random.key(0), model=model, optimizer=optimizer))
    shardings = shard_like_parameters(state, layout)
    return Step(
        fn=fn,
        args=(abstract(state, shardings), _abstract_batch(layout, options)),
        donate=(0,),
        roles=(TrainState("parameters", "optimizer_state", "other"), "batch"),  # type: ignore[arg-type]
        stacks=(stack,),
        knobs=Knobs(batch="batch", seq="seq", depth="layers"),
        init=init,
        notes=notes,
    )


def _check_sizes(config: DecoderConfig, layout: Layout, options: StepOptions) -> None:
    for name in ("batch", "seq", "layers", "chunk"):
        if getattr(options, name) < 1:
            raise StepError(f"{name}={getattr(options, name)}: it must be at least 1.")
    if config.max_seq is not None and options.seq > config.max_seq:
        raise StepError(
            f"seq={options.seq}: this model has {config.max_seq} learned positions; give seq={config.max_seq} or less."
        )
    parts = layout.axis_size(BATCH)
    if options.batch % parts:
        near = max(parts, options.batch - options.batch % parts)
        raise StepError(
            f"batch={options.batch} can't be split over data x fsdp = {parts} devices; "
            f"give a multiple of {parts}, like batch={near}."
        )
    tensor = layout.axis_size(TENSOR)
    for what, count in (("key/value heads", config.num_kv_heads), ("MLP width", config.d_ff)):
        if count % tensor:
            raise StepError(
                f"mesh={options.mesh!r}: tensor:{tensor} does not divide the model's {what}, {count}; give a divisor."
            )


def _abstract_batch(layout: Layout, options: StepOptions) -> Batch:
    sharding = layout.sharding(BATCH)

    def of(dtype: str) -> Any:
        return jax.ShapeDtypeStruct((options.batch, options.seq), dtype, sharding=sharding)

    return {"tokens": of("int32"), "labels": of("int32"), "weights": of("float32")}


def _random_batch(key: jax.Array, model: Decoder, options: StepOptions) -> Batch:
    shape = (options.batch, options.seq)
    tokens = jax.random.randint(key, (shape[0], shape[1] + 1), 0, model.config.vocab_size, jnp.int32)
    made: Batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "weights": jnp.ones(shape, jnp.float32)}
    return jax.device_put(made, model.runtime.layout.sharding(BATCH))


def _factory(name: str, config: DecoderConfig, default_batch: int, default_seq: int) -> Callable[..., Step]:
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
    ) -> Step:
        options = StepOptions(batch=batch, seq=seq, layers=layers, attention=attention, mesh=mesh, dtype=dtype, chunk=chunk)
        return make_step(config, policies, devices, options)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"A training step of {name}: AdamW, donated state, FSDP. Options: see `StepOptions`."
    return factory


gpt2_tiny = _factory("gpt2_tiny", configs.GPT2_TINY, 4, 32)
gpt2_small = _factory("gpt2_small", configs.GPT2_SMALL, 8, 1024)
gpt2_medium = _factory("gpt2_medium", configs.GPT2_MEDIUM, 8, 1024)
gpt2_large = _factory("gpt2_large", configs.GPT2_LARGE, 8, 1024)
gpt2_xl = _factory("gpt2_xl", configs.GPT2_XL, 8, 1024)
llama3_tiny = _factory("llama3_tiny", configs.LLAMA3_TINY, 4, 32)
llama3_8b = _factory("llama3_8b", configs.LLAMA3_8B, 32, 2048)
llama3_70b = _factory("llama3_70b", configs.LLAMA3_70B, 128, 4096)
