"""FLOPs of matmuls and convolutions, from the shapes and parameters of one jaxpr equation.

In: an equation. Out: FLOPs of one call, a multiplication and an addition counted as 2, for the shapes as written (global, or of
one shard inside shard_map). Elementwise work counts nothing. Kernels are priced in `kernels`.
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

FlopsRule: TypeAlias = Callable[[Any], int]


def matmul_flops(eqn: Any) -> int | None:
    """FLOPs of one call of a matmul or convolution, None for any other equation."""
    rule = _RULES.get(eqn.primitive.name)
    return None if rule is None else rule(eqn)


def _dot_general(eqn: Any) -> int:
    lhs, _ = _shapes(eqn)
    (contract, _), _ = eqn.params["dimension_numbers"]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contract)


def _ragged_dot_general(eqn: Any) -> int:
    """Every token meets one group's matrix, so the groups multiply nothing."""
    lhs, rhs = _shapes(eqn)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contract), (_, batch) = numbers.dot_dimension_numbers
    shared = {*contract, *batch, *numbers.rhs_group_dimensions}
    return 2 * math.prod(lhs) * math.prod(size for axis, size in enumerate(rhs) if axis not in shared)


def _scaled_matmul(eqn: Any) -> int:
    lhs, rhs = _shapes(eqn)  # [batch, m, k] and [batch, n, k]
    return 2 * math.prod(lhs) * rhs[1]


def _conv_general_dilated(eqn: Any) -> int:
    lhs, rhs = _shapes(eqn)
    params = eqn.params
    numbers = params["dimension_numbers"]
    out = eqn.outvars[0].aval.shape
    positions = 1
    for index, (lhs_axis, rhs_axis, out_axis) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        positions *= valid_positions(
            lhs[lhs_axis],
            rhs[rhs_axis],
            out[out_axis],
            stride=params["window_strides"][index],
            pad_low=params["padding"][index][0],
            lhs_dilation=params["lhs_dilation"][index],
            rhs_dilation=params["rhs_dilation"][index],
        )
    return 2 * positions * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * rhs[numbers.rhs_spec[1]]


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


def _shapes(eqn: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return eqn.invars[0].aval.shape, eqn.invars[1].aval.shape


_RULES: dict[str, FlopsRule] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _conv_general_dilated,
    "ragged_dot_general": _ragged_dot_general,
    "scaled_matmul": _scaled_matmul,
    "scaled_matmul_wrapper": _scaled_matmul,
}
