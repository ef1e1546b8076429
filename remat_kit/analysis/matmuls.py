"""FLOPs of one instruction that multiplies matrices, from its HLO: dots, convolutions and the libraries' custom calls.

TPU programs have no dots: matmuls are convolutions, often padded or dilated, so only window positions that meet an element count
(XLA's own rule). Bytes and elementwise work are elsewhere (`work`).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from remat_kit.analysis.hlo import Computation, Instruction, attribute
from remat_kit.analysis.shapes import ArrayShape, arrays_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A convolution's window, one entry per spatial dimension.

    Attributes:
        size: Of the kernel.
        stride: Of the window.
        pad_low: Padding before.
        lhs_dilate: Base dilation.
        rhs_dilate: Window dilation.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    pad_low: tuple[int, ...]
    lhs_dilate: tuple[int, ...]
    rhs_dilate: tuple[int, ...]


def matmul_flops(instruction: Instruction, computation: Computation) -> int:
    """FLOPs of one run of a matmul, convolution or library call; 0 for everything else.

    Args:
        instruction: Any instruction.
        computation: The one that it stands in, which has its operands.

    Returns:
        FLOPs, two for a multiply-add.
    """
    rule = _RULES.get(instruction.opcode)
    return rule(instruction, computation) if rule else 0


def library_call(instruction: Instruction) -> str:
    """The target of a custom call; empty for other instructions."""
    if instruction.opcode != "custom-call":
        return ""
    return (attribute(instruction, "custom_call_target") or "").strip('"')


def is_known_matmul(target: str) -> bool:
    """Whether a custom call's FLOPs follow from its text."""
    return target.startswith((*_GEMMS, "__cudnn$conv", _ATTENTION))


_GEMMS = ("__cublas$", "__onednn$matmul", "__triton_gemm")
_ATTENTION = "__cudnn$fmha"


def _operand_shape(instruction: Instruction, computation: Computation, number: int) -> ArrayShape:
    return arrays_of(computation.by_name[instruction.operands[number]].shape)[0]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def _dot(instruction: Instruction, computation: Computation) -> int:
    lhs = _operand_shape(instruction, computation, 0)
    contracted = _numbers(attribute(instruction, "lhs_contracting_dims") or "")
    return 2 * arrays_of(instruction.shape)[0].num_elements * math.prod(lhs.dims[dim] for dim in contracted)


def _custom_call(instruction: Instruction, computation: Computation) -> int:
    target = library_call(instruction)
    if target.startswith("__cudnn$conv"):
        return _convolution(instruction, computation)
    if target.startswith(_ATTENTION):
        return _attention(instruction, computation)
    if not target.startswith(_GEMMS):
        return 0
    lhs = _operand_shape(instruction, computation, 0)
    match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    contracted = _numbers(match[1]) if match else (len(lhs.dims) - 1,)
    return 2 * arrays_of(instruction.shape)[0].num_elements * math.prod(lhs.dims[dim] for dim in contracted)


def _attention(instruction: Instruction, computation: Computation) -> int:
    """cuDNN's attention: two matmuls forward, five backward, over the pairs of query and key that its mask leaves."""
    match = re.search(r'"intermediate_tensor_shape": ?\{[^\[]*"dimensions": ?\[([^\]]*)\]', instruction.attributes)
    if match is None:
        return 0
    batch, heads, num_queries, num_keys = _numbers(match[1])
    query, value = (_operand_shape(instruction, computation, number).dims[-1] for number in (0, 2))
    window = re.search(r'"sliding_window_length": ?"?(\d+)', instruction.attributes)
    is_causal = re.search(r'"mask_type": ?"[A-Z_]*CAUSAL', instruction.attributes) is not None
    pairs = _pairs(num_queries, num_keys, is_causal=is_causal, window=int(window[1]) if window else 0)
    over_query, over_value = (3, 2) if "Backward" in library_call(instruction) else (1, 1)
    return 2 * batch * heads * pairs * (over_query * query + over_value * value)


def _pairs(num_queries: int, num_keys: int, *, is_causal: bool, window: int) -> int:
    """Pairs of query and key; a causal mask is counted as half of the square."""
    if 0 < window < num_keys:
        short = min(window, num_queries)
        return short * (short + 1) // 2 + (num_queries - short) * window
    return num_queries * num_keys // (2 if is_causal else 1)


def _convolution(instruction: Instruction, computation: Computation) -> int:
    labels = attribute(instruction, "dim_labels") or ""
    lhs_labels, rhs_labels, out_labels = re.split(r"_|->", labels)
    lhs, rhs = (_operand_shape(instruction, computation, number) for number in (0, 1))
    out = arrays_of(instruction.shape)[0]
    window = read_window(attribute(instruction, "window") or "{}", num_dims=len(lhs_labels) - 2)
    positions = 1
    for dim in range(len(lhs_labels) - 2):
        positions *= valid_positions(
            lhs.dims[lhs_labels.index(str(dim))], out.dims[out_labels.index(str(dim))], window=window, dim=dim
        )
    batch_groups = int(attribute(instruction, "batch_group_count") or 1)
    batch = lhs.dims[lhs_labels.index("b")] // batch_groups
    # The kernel's input features are already those of one feature group.
    return 2 * positions * batch * rhs.dims[rhs_labels.index("i")] * rhs.dims[rhs_labels.index("o")]


def read_window(text: str, *, num_dims: int) -> Window:
    """Reads a window attribute such as `{size=1x8 pad=0_0x7_7 rhs_reversal=0x1}`."""
    fields = dict(re.findall(r"(\w+)=([^\s}]+)", text))

    def numbers(key: str, default: int) -> tuple[int, ...]:
        if key not in fields:
            return (default,) * num_dims
        return tuple(int(part.split("_")[0]) for part in fields[key].split("x"))

    return Window(
        size=numbers("size", 1),
        stride=numbers("stride", 1),
        pad_low=numbers("pad", 0),
        lhs_dilate=numbers("lhs_dilate", 1),
        rhs_dilate=numbers("rhs_dilate", 1),
    )


def valid_positions(lhs_size: int, out_size: int, *, window: Window, dim: int) -> int:
    """Pairs of output position and kernel tap along one dimension that meet an element of the input.

    Args:
        lhs_size: Elements of the input.
        out_size: Elements of the output.
        window: The window.
        dim: Which of its dimensions.

    Returns:
        Number of pairs; the others meet padding or the holes of a dilation.

    Example:
        >>> padded = read_window("{size=3 pad=1_1}", num_dims=1)
        >>> valid_positions(4, 4, window=padded, dim=0)
        10
    """
    return _count_positions(
        lhs_size,
        out_size,
        window.size[dim],
        window.stride[dim],
        window.pad_low[dim],
        window.lhs_dilate[dim],
        window.rhs_dilate[dim],
    )


@lru_cache(maxsize=4096)
def _count_positions(lhs: int, out: int, size: int, stride: int, pad_low: int, lhs_dilate: int, rhs_dilate: int) -> int:
    if (size, stride, pad_low, lhs_dilate, lhs) == (1, 1, 0, 1, out):
        return out
    last = (lhs - 1) * lhs_dilate
    taps, outputs = range(size), range(out)
    if size > out:  # count over the shorter of the two
        taps, outputs = outputs, taps
        stride, rhs_dilate = rhs_dilate, stride
    return sum(_hits(tap * rhs_dilate - pad_low, stride, len(outputs), lhs_dilate, last) for tap in taps)


def _hits(start: int, stride: int, num_steps: int, divisor: int, last: int) -> int:
    """How many of start, start + stride, … (num_steps of them) lie in [0, last] and are multiples of the divisor."""
    if divisor == 1:
        low = max(0, -(start // stride))
        return max(0, min(num_steps - 1, (last - start) // stride) - low + 1)
    return sum(1 for at in range(start, start + stride * num_steps, stride) if 0 <= at <= last and at % divisor == 0)


_RULES: dict[str, Callable[[Instruction, Computation], int]] = {
    "dot": _dot,
    "ragged-dot": _dot,
    "convolution": _convolution,
    "custom-call": _custom_call,
}
