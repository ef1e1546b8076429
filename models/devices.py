"""What a step takes from its devices: the dtype it computes in and the attention kernel, with a note where there was a choice.

The devices may be attached or absent (ahead-of-time topologies): only their platform and compute capability are asked.
cuDNN attention and bf16 matmuls need an NVIDIA GPU of compute capability 8.0 or newer; splash a TPU.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from models.config import DecoderConfig
from remat_kit import StepError
from remat_kit.attention import Kernel
from remat_kit.errors import nearest

AUTO = "auto"
DTYPES = ("bfloat16", "float16", "float32")

# Splash works on blocks of 128 tokens (jax.experimental.pallas.ops.tpu.splash_attention).
SPLASH_BLOCK = 128


def choose_dtype(dtype: str, devices: Sequence[Any]) -> jnp.dtype:
    """The dtype of the computation.

    Args:
        dtype: `auto` or one of `DTYPES`.
        devices: The target's devices.

    Returns:
        What was asked for; for `auto`, bfloat16, or float16 on GPUs without it.

    Raises:
        StepError: There is no such dtype, or these devices lack it.
    """
    if dtype not in (AUTO, *DTYPES):
        raise StepError(f"dtype={dtype!r}: choose from {AUTO}, {', '.join(DTYPES)}.{nearest(dtype, (AUTO, *DTYPES))}")
    is_old = is_gpu(devices) and compute_capability(devices) < 8.0
    if dtype == "bfloat16" and is_old:
        raise StepError(f"dtype=bfloat16: {devices[0].device_kind} computes in float16 or float32; give dtype=float16.")
    if dtype == AUTO:
        return jnp.dtype("float16" if is_old else "bfloat16")
    return jnp.dtype(dtype)


def choose_attention(
    attention: str, devices: Sequence[Any], *, config: DecoderConfig, seq: int, dtype: jnp.dtype
) -> tuple[Kernel, tuple[str, ...]]:
    """The attention kernel.

    Args:
        attention: `auto` or a `Kernel`.
        devices: The target's devices.
        config: The model.
        seq: Tokens of a sequence.
        dtype: Of the computation.

    Returns:
        The kernel and a note for the report. `auto` is the fused kernel of the platform where it can run, else XLA.

    Raises:
        StepError: There is no such kernel, or the one asked for can't run here.
    """
    allowed = (AUTO, *(kernel.value for kernel in Kernel))
    if attention not in allowed:
        raise StepError(f"attention={attention!r}: choose from {', '.join(allowed)}.{nearest(attention, allowed)}")
    wanted = _fused_kernel(devices) if attention == AUTO else Kernel(attention)
    missing = _what_is_missing(wanted, devices, config=config, seq=seq, dtype=dtype)
    if missing is None:
        return wanted, (f"attention: {_LABELS[wanted]}",)
    if attention == AUTO:
        return Kernel.XLA, (f"attention: XLA ({missing})",)
    raise StepError(f"attention={attention}: {missing}. Give attention=xla or attention=auto.")


_LABELS = {Kernel.XLA: "XLA", Kernel.CUDNN: "cuDNN flash", Kernel.SPLASH: "splash"}


def _fused_kernel(devices: Sequence[Any]) -> Kernel:
    if is_gpu(devices):
        return Kernel.CUDNN
    return Kernel.SPLASH if devices[0].platform == "tpu" else Kernel.XLA


def _what_is_missing(kernel: Kernel, devices: Sequence[Any], *, config: DecoderConfig, seq: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel can't run here, None when it can."""
    match kernel:
        case Kernel.XLA:
            return None
        case Kernel.CUDNN:
            return _what_cudnn_misses(devices, config=config, dtype=dtype)
        case Kernel.SPLASH:
            if devices[0].platform != "tpu":
                return f"splash runs on TPUs, not on {devices[0].platform}"
            return None if seq % SPLASH_BLOCK == 0 else f"splash needs seq to be a multiple of {SPLASH_BLOCK}, not {seq}"


def _what_cudnn_misses(devices: Sequence[Any], *, config: DecoderConfig, dtype: jnp.dtype) -> str | None:
    if not is_gpu(devices):
        return f"cuDNN runs on NVIDIA GPUs, not on {devices[0].platform}"
    if compute_capability(devices) < 8.0:
        return f"cuDNN flash attention needs compute capability 8.0, {devices[0].device_kind} has {compute_capability(devices)}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN flash attention computes in bfloat16 or float16, not {dtype}"
    if config.head_dim % 8 or config.head_dim > 128:
        return f"cuDNN flash attention needs heads of a multiple of 8 up to 128, not {config.head_dim}"
    if not is_cudnn_installed():
        return "cuDNN is not installed: pip install remat-kit[gpu-cudnn]"
    return None


def is_gpu(devices: Sequence[Any]) -> bool:
    """Whether these are NVIDIA GPUs."""
    return devices[0].platform in ("gpu", "cuda")


def compute_capability(devices: Sequence[Any]) -> float:
    """Like 8.6; of GPUs only."""
    return float(devices[0].compute_capability)


def is_cudnn_installed() -> bool:
    """Whether the wheel that brings cuDNN is there."""
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:  # no wheel of NVIDIA's at all
        return False
