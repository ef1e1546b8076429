"""The only file that touches `jax._src`, and what differs between JAX versions.

Everything here exists because no public name does. Tested on jax 0.10.2 and 0.12.
"""

import inspect
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib.version
from jax._src import ad_util as _ad_util
from jax._src import source_info_util as _source_info_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax._src.interpreters import partial_eval as _pe
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxlib import _jax as _jaxlib  # type: ignore[attr-defined]  # compiled, without stubs

_PROGRAMS = (Jaxpr, ClosedJaxpr)

SAVEABLE = _pe.Saveable
RECOMPUTE = _pe.Recompute


def offloadable(source: str, destination: str) -> object:
    """The verdict of a checkpoint policy that moves a value from one memory kind to another."""
    return _pe.Offloadable(src=source, dst=destination)


def open_jaxpr(program: Any) -> tuple[Any, list[Any]]:
    """A (closed) jaxpr as what has `constvars`, `invars`, `eqns` and `outvars`, and the constants' values.

    0.10 keeps constants in a ClosedJaxpr around the Jaxpr, 0.12 in the Jaxpr itself.
    """
    inner = getattr(program, "jaxpr", program)
    return inner, list(getattr(program, "consts", ()))


def zeros(aval: Any) -> jax.Array:
    """Zeros of an abstract type, with its sharding (explicit axes) and its varying axes (inside shard_map)."""
    return _ad_util.zeros_like_aval(aval)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Constants and carried values of a `scan` equation; its other operands are sliced, its other results stacked."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since 0.12
    return len(consts), len(carry)


def checkpoint_name_of(eqn: Any) -> str | None:
    """The name that `checkpoint_name` gave, None for any other equation (with jax_remat3 it is a `call_hi_primitive`)."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    prim = eqn.params.get("_prim")
    return prim.name if type(prim).__name__ in ("CheckpointName", "CheckpointNameFwd") else None


def parameters(eqn: Any) -> Mapping[str, Any]:
    """An equation's parameters; of a `call_hi_primitive` (jax_remat3) those of what it calls."""
    prim = eqn.params.get("_prim")
    return eqn.params if prim is None else prim.params


def inner_programs(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters, in order; also those that a `call_hi_primitive` (jax_remat3) holds."""
    found = []
    for value in parameters(eqn).values():
        found += [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, _PROGRAMS)]
    return found


def argument_names(program: Any) -> tuple[str, ...]:
    """What a program's parameters are called in the user's code, such as `params['up']`."""
    jaxpr, _ = open_jaxpr(program)
    return tuple(str(name) for name in jaxpr.debug_info.safe_arg_names(len(jaxpr.invars)))


def call_stack(eqn: Any) -> list[tuple[types.CodeType, int]]:
    """The Python code that ran when an equation was made, with its instruction, innermost first."""
    traceback = eqn.source_info.traceback
    return [] if traceback is None else list(zip(*traceback.raw_frames(), strict=True))


def user_frames(eqn: Any) -> Iterator[tuple[str, int]]:
    """File and line of the code that made an equation, innermost first, without JAX's own."""
    for frame in _source_info_util.user_frames(eqn.source_info.traceback):
        yield frame.file_name, frame.start_line


def cudnn_attention_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float, is_causal: bool
) -> tuple[jax.Array, jax.Array]:
    """cuDNN's flash attention for training, on (batch, tokens, heads, width) of one device.

    The public function hides the softmax statistics in its own derivative rule, where no policy can name them.

    Returns:
        The context, shaped like `query`, and the statistics, (batch, heads, tokens) in f32.
    """
    params = {**_cudnn_params(scale, is_causal=is_causal), "is_training": True}
    return tuple(_cudnn._dot_product_attention_fwd_p.bind(query, key, value, *_cudnn_absent(query.dtype, 7), **params))


def cudnn_attention_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    out: jax.Array,
    stats: jax.Array,
    gradient: jax.Array,
    *,
    scale: float,
    is_causal: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of `cudnn_attention_forward` with respect to query, key and value, from its two results."""
    operands = (query, key, value, *_cudnn_absent(query.dtype, 7), stats, out, gradient)
    return tuple(_cudnn._dot_product_attention_bwd_p.bind(*operands, **_cudnn_params(scale, is_causal=is_causal)))


def _cudnn_absent(dtype: Any, count: int) -> list[jax.Array]:
    # Bias, lengths, offsets and page tables: an empty array stands for none.
    return [jnp.zeros(0, dtype)] * count


def _cudnn_params(scale: float, *, is_causal: bool) -> dict[str, Any]:
    params = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": _cudnn.MaskType.CAUSAL if is_causal else _cudnn.MaskType.NO_MASK,
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
    }
    if "score_mod" in inspect.signature(_cudnn._dot_product_attention_fwd_impl).parameters:  # since 0.12
        params |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return params


def splash_attention_forward(kernel: Any, query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A splash kernel for training, on one sequence: (heads, tokens, width).

    Calling the kernel itself goes through its own derivative rule, into which policies do not look.

    Args:
        kernel: What `make_splash_mha` made.
        query: Scaled queries.
        key: Keys.
        value: Values.

    Returns:
        The context and its log-sum-exp, (heads, tokens).
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash  # slow to import

    params = {**_splash_params(kernel, splash._splash_attention_forward), "save_residuals": True}
    out, (logsumexp,) = splash._splash_attention_forward(kernel.fwd_mask_info, query, key, value, None, None, **params)
    return out, logsumexp


def splash_attention_backward(
    kernel: Any, residuals: tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of `splash_attention_forward` with respect to query, key and value.

    Args:
        kernel: What `make_splash_mha` made.
        residuals: Query, key, value, context and log-sum-exp.
        gradient: With respect to the context.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash  # slow to import

    query, key, value, out, logsumexp = residuals
    saved = (query, key, value, None, None, out, logsumexp, kernel.dq_mask_info, kernel.dkv_mask_info)
    return splash._splash_attention_bwd(**_splash_params(kernel, splash._splash_attention_bwd), res=saved, do=gradient)[3:6]


def _splash_params(kernel: Any, function: Any) -> dict[str, Any]:
    return {name: kernel.kwargs[name] for name in inspect.signature(function).parameters if name in kernel.kwargs}


def backends_are_initialized() -> bool:
    """Whether JAX has opened its devices in this process; from then on `jax_platforms` and XLA_FLAGS change nothing."""
    return _xla_bridge.backends_are_initialized()


def lowered_device_ids(lowered: Any) -> tuple[int, ...]:
    """The devices that a `jax.stages.Lowered` is for, in the order of its partitions; its text does not say."""
    return tuple(device.id for device in lowered._lowering._device_list or ())


def lowered_compiler_options(lowered: Any) -> tuple[tuple[str, Any], ...]:
    """What `jax.jit(compiler_options=…)` gave to a `jax.stages.Lowered`; every compile of it gets them."""
    return tuple(lowered._lowering._compiler_options_kvs)


def lowered_argument_bytes(lowered: Any) -> int:
    """Bytes of a `jax.stages.Lowered`'s arguments on one device, without the target's padding."""
    known = lowered._lowering.compile_args
    total_bytes = 0
    for aval, sharding in zip(known["global_in_avals"], known["in_shardings"], strict=True):
        shape = sharding.shard_shape(aval.shape) if hasattr(sharding, "shard_shape") else aval.shape
        total_bytes += math.prod(shape) * aval.dtype.itemsize
    return total_bytes


def compiler_option_names() -> tuple[str, ...]:
    """Compiler options that jaxlib can name: a small part of what XLA knows."""
    options = _jaxlib.CompileOptions().executable_build_options.debug_options
    return tuple(name for name in dir(options) if name.startswith("xla_"))


REMAT3_ASKS_POLICIES = jax.__version_info__ >= (0, 12)
"""Whether jax_remat3 asks a policy callable about names; before, it takes every callable for "save nothing"."""


GPU_OFFLOAD_PASS = "dynamic-slice-annotator"
"""The compiler's pass that makes the fault below; without it there is none."""

GPU_OFFLOAD_FAULT = (
    None
    if jaxlib.version.__version_info__ >= (0, 11, 2)
    else f"jaxlib {jaxlib.__version__} reads values offloaded inside a loop back in the wrong order on GPUs, so that gradients "  # pyright: ignore[reportPrivateImportUsage]
    "are silently wrong (openxla/xla#46231, put right in 0.11.2): update jaxlib, or set "
    f"XLA_FLAGS=--xla_disable_hlo_passes={GPU_OFFLOAD_PASS}."
)
"""What is wrong with offloading on GPUs in this version; None = nothing known.

Seen in programs compiled for an H100: 0.10.2 and 0.11.0 have the fault, and not with that pass off; 0.11.2 and 0.12.0.1 have not.
"""


def remat3_is_on() -> bool:
    """Whether the coming implementation of rematerialization is switched on (JAX_REMAT3)."""
    return bool(jax.config.values["jax_remat3"])
