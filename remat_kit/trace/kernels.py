"""Kernels that no matmul of the program shows: which they are and what they cost.

In: an equation. Out: `Kernel` with the FLOPs of one call (None = unknown). Attention is priced by its matmuls: two forward, five
backward (the scores are formed again); splash may split its backward into a dq kernel of three and a dkv kernel of four. A causal
mask is half the square, a window the part of the square that it covers. Other Pallas kernels are priced by their `cost_estimate`.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from remat_kit.operations import CUDNN_KERNELS, KERNELS, PALLAS_KERNELS

CUDNN_ATTENTION = "cudnn_attention"
SPLASH_ATTENTION = "splash_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel call.

    Attributes:
        name: `cudnn_attention`, `splash_attention`, or what the program calls it.
        flops: Of one call, for the shapes as written; None = unknown.
    """

    name: str
    flops: int | None


def is_kernel_call(eqn: Any) -> bool:
    """Whether an equation calls a kernel that no matmul of the program shows."""
    return eqn.primitive.name in KERNELS


def price_kernel(eqn: Any, constants: Sequence[np.ndarray | None]) -> Kernel:
    """Names and prices a kernel call.

    Args:
        eqn: An equation that `is_kernel_call`.
        constants: Of each operand its value, where that is a constant of the program.

    Returns:
        Its name and FLOPs.
    """
    name = eqn.primitive.name
    if name in CUDNN_KERNELS:
        return Kernel(name=CUDNN_ATTENTION, flops=_cudnn_flops(eqn))
    if name in PALLAS_KERNELS:
        return _pallas(eqn, constants)
    called = eqn.params.get("call_target_name") or eqn.params.get("name") or name
    return Kernel(name=str(called), flops=None)


def _cudnn_flops(eqn: Any) -> int:
    query, key, value = (var.aval.shape for var in eqn.invars[:3])
    params = eqn.params
    seq, heads = (2, 1) if params["layout"] == 1 else (1, 2)  # AttentionLayout: 0 = BTNH, 1 = BNTH
    is_causal = params.get("use_causal_mask", False) or "CAUSAL" in str(params.get("mask_type", ""))
    area = attention_area(query[seq], key[seq], is_causal=is_causal, window=params.get("sliding_window_length") or 0)
    # Matmuls over the query-key head size and over the value head size.
    over_qk, over_v = (3, 2) if "_bwd" in eqn.primitive.name else (1, 1)
    return 2 * query[0] * query[heads] * area * (over_qk * query[-1] + over_v * value[-1])


def attention_area(num_queries: int, num_keys: int, *, is_causal: bool, window: int = 0) -> int:
    """Pairs of query and key that attention computes.

    Args:
        num_queries: Length of the query sequence.
        num_keys: Length of the key sequence.
        is_causal: Whether a query sees only the keys up to itself; counted as half of all pairs.
        window: Keys that a query sees at most, itself included; 0 = all.

    Returns:
        Number of pairs.
    """
    if 0 < window < num_keys:
        short = min(window, num_queries)
        return short * (short + 1) // 2 + (num_queries - short) * window
    return num_queries * num_keys // (2 if is_causal else 1)


def _pallas(eqn: Any, constants: Sequence[np.ndarray | None]) -> Kernel:
    name = str(eqn.params.get("name") or getattr(eqn.params.get("debug_info"), "func_name", None) or eqn.primitive.name)
    splash = re.match(r"splash_m[hq]a_(fwd|dq|dkv)_", name)
    if splash and eqn.primitive.name == "pallas_call":
        return Kernel(name=SPLASH_ATTENTION, flops=_splash_flops(eqn, splash[1], constants))
    estimate = eqn.params.get("cost_estimate")
    return Kernel(name=name, flops=None if estimate is None else estimate.flops)


def _splash_flops(eqn: Any, part: str, constants: Sequence[np.ndarray | None]) -> int:
    """Prices a splash attention kernel: its operands are q, k, v, … after the tables that the grid indexes by."""
    metadata = eqn.params.get("metadata") or {}
    options = json.loads(metadata["xprof_metadata"]) if "xprof_metadata" in metadata else {}
    num_tables = eqn.params["grid_mapping"].num_index_operands
    operands = [var.aval for var in eqn.invars[num_tables:]]
    query, key, value = (_minor_last(operands[index].shape, options.get(f"{axis}_layout", 1)) for index, axis in enumerate("qkv"))
    suffix = "" if part == "fwd" else f"_{part}"
    block_area = options.get(f"block_q{suffix}", 0) * options.get(f"block_kv{suffix}", 0)
    blocks = constants[1] if num_tables > 1 else None
    if blocks is not None and block_area:
        area = _blocks_area(blocks, block_area)
    else:  # a mask that is computed, or given by blocks, comes as integers or booleans
        is_masked = any(aval.dtype.kind in "ib" for aval in operands)
        area = query[-2] * key[-2] // (2 if is_masked else 1)
    over_qk, over_v = _splash_matmuls(eqn, part, rank=len(query))
    return 2 * math.prod(query[:-2]) * area * (over_qk * query[-1] + over_v * value[-1])


def _blocks_area(blocks: np.ndarray, block_area: int) -> int:
    """Pairs that one head computes, by a table [heads, …] of blocks: 0 = skipped, 1 = masked, counted as half, 2 = whole."""
    return int(blocks.astype(np.int64).sum()) * block_area // (2 * blocks.shape[0])


def _splash_matmuls(eqn: Any, part: str, *, rank: int) -> tuple[int, int]:
    """Matmuls over the query-key head size and over the value head size."""
    if part != "dkv":
        return (1, 1) if part == "fwd" else (2, 1)
    is_fused = any(len(var.aval.shape) > rank for var in eqn.outvars)  # dq of each block of keys, summed outside
    return (3, 2) if is_fused else (2, 2)


def _minor_last(shape: tuple[int, ...], layout: int) -> tuple[int, ...]:
    """Undoes splash's layout 2, sequence last."""
    return shape if layout == 1 else (*shape[:-2], shape[-1], shape[-2])
