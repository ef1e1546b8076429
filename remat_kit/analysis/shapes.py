"""Shapes as XLA writes them: `bf16[8,1024]{1,0:T(8,128)(2,1)S(1)}`, or tuples of such.

In: the text of a shape. Out: its arrays with element type, dimensions and memory space. Bytes are logical: without the padding
that tiled layouts add, which only the compiler's buffer assignment knows (see `assignment`).
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayShape:
    """One array.

    Attributes:
        dtype: Element type as XLA spells it: `bf16`, `f32`, `pred`, `s32` ….
        dims: Dimensions, outermost first.
        memory_space: Number behind `S` in the layout; 0 = the default memory of the device.
    """

    dtype: str
    dims: tuple[int, ...]
    memory_space: int = 0

    @property
    def num_elements(self) -> int:
        """Product of the dimensions."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Logical bytes."""
        return -(-self.num_elements * bits_of(self.dtype) // 8)


_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")


def bits_of(dtype: str) -> int:
    """Bits of one element.

    Example:
        >>> bits_of("f8e4m3fn"), bits_of("s4"), bits_of("bf16")
        (8, 4, 16)
    """
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z](\d+)", dtype)
    return int(match[1]) if match else 0


@lru_cache(maxsize=65536)
def arrays_of(shape: str) -> tuple[ArrayShape, ...]:
    """All arrays of a shape, tuples flattened.

    Args:
        shape: Text of an array's or a tuple's shape.

    Returns:
        Its arrays in order.

    Example:
        >>> [array.dims for array in arrays_of("(s32[], bf16[8,128]{1,0:T(8,128)(2,1)S(1)})")]
        [(), (8, 128)]
    """
    return tuple(_array(match) for match in _ARRAY.finditer(shape))


def element_of(shape: str, index: int) -> str:
    """The text of one element of a tuple shape.

    Args:
        shape: Text of a tuple shape.
        index: Which element.

    Returns:
        Its text; the shape itself when it is no tuple.

    Example:
        >>> element_of("(s32[]{:T(128)}, (f32[2], f32[3,4]{1,0}))", 1)
        '(f32[2], f32[3,4]{1,0})'
    """
    elements = _elements(shape)
    return elements[index] if index < len(elements) else shape


@lru_cache(maxsize=4096)
def _elements(shape: str) -> tuple[str, ...]:
    if not shape.startswith("("):
        return (shape,)
    elements, depth, start = [], 0, 1
    for position, char in enumerate(shape):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if (char == "," and depth == 1) or (depth == 0 and char == ")"):
            elements.append(re.sub(r"/\*.*?\*/", "", shape[start:position]).strip())
            start = position + 1
    return tuple(element for element in elements if element)


def _array(match: re.Match[str]) -> ArrayShape:
    dims = tuple(int(dim.lstrip("<=")) for dim in match[2].split(",") if dim)
    space = _SPACE.search(match[3]) if match[3] else None
    return ArrayShape(dtype=match[1], dims=dims, memory_space=int(space[1]) if space else 0)
