"""JAX's operations that a policy speaks of by kind: matmuls with their FLOPs, and custom kernels.

The one list of each: the rules `dots`, `weights`, `kernels` and `cheap` keep by it, the traced step counts by it. Names are those
of primitives. FLOPs are of one call, a multiplication and an addition counted as 2, for the shapes as written (global, or of one
shard inside shard_map). Elementwise work counts nothing. What kernels cost is in `trace/kernels.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Shape: TypeAlias = tuple[int, ...]
FlopsRule: TypeAlias = Callable[[Sequence[Shape], Shape, Mapping[str, Any]], int]

CUDNN_KERNELS = (
    "dot_product_attention_fwd",  # what remat_kit.attention binds, on one device's part
    "dot_product_attention_bwd",
    "dot_product_attention_fwd_wrapper",
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_fwd",
    "dot_product_attention_fp8_bwd",
    "dot_product_attention_fp8_fwd_wrapper",
    "dot_product_attention_fp8_bwd_wrapper",
)
PALLAS_KERNELS = ("pallas_call", "mpmd_map", "core_map")
OPAQUE_KERNELS = ("ffi_call", "custom_call", "tpu_custom_call", "triton_kernel_call", "bass_call", "pure_callback", "io_callback")
KERNELS = frozenset((*CUDNN_KERNELS, *PALLAS_KERNELS, *OPAQUE_KERNELS))
"""Attention and other custom kernels, opaque to the compiler."""


def matmul_flops(name: str, operands: Sequence[Shape], result: Shape, params: Mapping[str, Any]) -> int | None:
    """FLOPs of one matmul or convolution.

    Args:
        name: Of the primitive.
        operands: Shapes of its operands.
        result: Shape of its first result.
        params: Parameters of the equation.

    Returns:
        FLOPs of one call, None for any other primitive.
    """
    rule = _RULES.get(name)
    return None if rule is None else rule(operands, result, params)


def _dot_general(operands: Sequence[Shape], result: Shape, params: Mapping[str, Any]) -> int:
    (contract, _), _ = params["dimension_numbers"]
    return 2 * math.prod(result) * math.prod(operands[0][axis] for axis in contract)


def _ragged_dot_general(operands: Sequence[Shape], _result: Shape, params: Mapping[str, Any]) -> int:
    """Every token meets one group's matrix, so the groups multiply nothing."""
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    shared = {*contract, *batch, *numbers.rhs_group_dimensions}
    return 2 * math.prod(operands[0]) * math.prod(size for axis, size in enumerate(operands[1]) if axis not in shared)


def _scaled_matmul(operands: Sequence[Shape], _result: Shape, _params: Mapping[str, Any]) -> int:
    return 2 * math.prod(operands[0]) * operands[1][1]  # [batch, m, k] and [batch, n, k]


def _conv_general_dilated(operands: Sequence[Shape], result: Shape, params: Mapping[str, Any]) -> int:
    lhs, rhs = operands[:2]
    numbers = params["dimension_numbers"]
    positions = 1
    for index, (lhs_axis, rhs_axis, out_axis) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        positions *= valid_positions(
            lhs[lhs_axis],
            rhs[rhs_axis],
            result[out_axis],
            stride=params["window_strides"][index],
            pad_low=params["padding"][index][0],
            lhs_dilation=params["lhs_dilation"][index],
            rhs_dilation=params["rhs_dilation"][index],
        )
    return 2 * positions * result[numbers.out_spec[0]] * result[numbers.out_spec[1]] * rhs[numbers.rhs_spec[1]]


def valid_positions(
    lhs_size: int, rhs_size: int, out_size: int, *, stride: int, pad_low: int, lhs_dilation: int, rhs_dilation: int
) -> int:
    """Pairs of output position and kernel tap, along one dimension, that read an element rather than padding or a dilation zero.

    Example:
        >>> valid_positions(4, 3, 4, stride=1, pad_low=1, lhs_dilation=1, rhs_dilation=1)  # 4 outputs x 3 taps, 2 of them padding
        10
    """
    if rhs_size > out_size:
        rhs_size, out_size, stride, rhs_dilation = out_size, rhs_size, rhs_dilation, stride
    last = (lhs_size - 1) * lhs_dilation
    return sum(_count_multiples(tap * rhs_dilation - pad_low, stride, out_size, lhs_dilation, last) for tap in range(rhs_size))


def _count_multiples(start: int, stride: int, num_steps: int, divisor: int, last: int) -> int:
    """How many of start, start + stride, … (num_steps of them) lie in [0, last] and are multiples of divisor."""
    period = divisor // math.gcd(stride, divisor)
    first = next((step for step in range(period) if (start + step * stride) % divisor == 0), None)
    if first is None:
        return 0
    low = max(first, -(start // stride))  # ceil(-start / stride)
    low += (first - low) % period
    high = min(num_steps - 1, (last - start) // stride)
    return max(0, (high - low) // period + 1)


_RULES: dict[str, FlopsRule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "ragged_dot_general": _ragged_dot_general,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
    "scaled_dot": _dot_general,
}

MATMULS = frozenset(_RULES)
"""Matrix multiplications and convolutions."""
