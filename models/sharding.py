"""Where arrays live: the mesh from its text, and a sharding for each parameter and activation by rule.

Axes are `data` (replicas of the weights), `fsdp` (weights and optimizer state split, gathered layer by layer where used) and
`tensor` (heads and the MLP's inner width split). The batch is split over data and fsdp. The mesh has Auto axes (`Mesh`, not
`jax.make_mesh`): the compiler propagates what is not said here. One device = no mesh at all.

Legend: B batch, T tokens of a sequence, D model width, V vocabulary; the stacked layer dimension L is never split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from remat_kit.errors import StepError, nearest

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
AXES = (DATA, FSDP, TENSOR)
BATCH = (DATA, FSDP)

Axis = str | tuple[str, ...] | None

# Which dimension of a weight, stack dimension aside, holds heads or the MLP's inner width.
_TENSOR_DIM: Mapping[str, int] = {"q": -1, "k": -1, "v": -1, "gate": -1, "up": -1, "attn_out": -2, "down": -2, "head": -2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The devices of a step.

    Attributes:
        devices: All of them.
        mesh: Over `AXES`; None = one device.
    """

    devices: tuple[Any, ...]
    mesh: Mesh | None = None

    def axis_size(self, axes: Axis) -> int:
        """Devices along the axes."""
        if self.mesh is None or axes is None:
            return 1
        return math.prod(self.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))

    def sharding(self, *axes: Axis) -> Sharding:
        """The sharding with these axes on the leading dimensions."""
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def make_layout(devices: Sequence[Any], mesh: str) -> Layout:
    """Reads a mesh text.

    Args:
        devices: The target's devices.
        mesh: Like `data:2,fsdp:4`; the empty text puts all devices on fsdp. Axes that are left out have size 1.

    Returns:
        The layout of these devices.

    Raises:
        StepError: The text is malformed, names another axis, or does not multiply to the number of devices.
    """
    sizes = dict.fromkeys(AXES, 1) | (_read_mesh(mesh) if mesh else {FSDP: len(devices)})
    product = math.prod(sizes.values())
    if product != len(devices):
        raise StepError(
            f"mesh={mesh!r} is {product} devices, the target has {len(devices)}. The sizes must multiply to {len(devices)}, "
            f"like mesh=fsdp:{len(devices)}."
        )
    if len(devices) == 1:
        return Layout(devices=tuple(devices))
    grid = np.asarray(devices, dtype=object).reshape(tuple(sizes.values()))
    return Layout(devices=tuple(devices), mesh=Mesh(grid, AXES))


def _read_mesh(mesh: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        axis, _, size = (word.strip() for word in part.partition(":"))
        if axis not in AXES or axis in sizes:
            raise StepError(
                f"mesh={mesh!r}: {axis!r} is no axis, or stands twice; axes are {', '.join(AXES)}.{nearest(axis, AXES)}"
            )
        if not size.isdecimal() or int(size) < 1:
            raise StepError(f"mesh={mesh!r}: {axis} needs a size of at least 1, like {axis}:2; not {size!r}.")
        sizes[axis] = int(size)
    return sizes


def constrain(x: jax.Array, layout: Layout, *axes: Axis) -> jax.Array:
    """Tells the compiler how an activation is split."""
    if layout.mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, layout.sharding(*axes))


def parameter_axes(path: Sequence[str], shape: Sequence[int], layout: Layout) -> tuple[Axis, ...]:
    """How a parameter and its optimizer state are split.

    Tensor goes on heads and the MLP's inner width. Fsdp goes on the first dimension left that it divides, as shards of a leading
    dimension are gathered without a transposition; the embedding is split along D, so that looking up a row needs no reduction.
    Vectors stay whole except biases of tensor-split outputs.

    Args:
        path: Names from the root of the parameter tree, such as `("layers", "q", "kernel")`.
        shape: Of the parameter.
        layout: The devices.

    Returns:
        Mesh axes, one per dimension.
    """
    axes: list[Axis] = [None] * len(shape)
    first = 1 if path[0] == "layers" else 0
    tensor_dim = _tensor_dim(path, len(shape))
    if tensor_dim is not None and layout.axis_size(TENSOR) > 1 and shape[tensor_dim] % layout.axis_size(TENSOR) == 0:
        axes[tensor_dim] = TENSOR
    if len(shape) - first >= 2:
        free = [len(shape) - 1] if path[-1] == "embedding" else [dim for dim in range(first, len(shape)) if axes[dim] is None]
        fitting = [dim for dim in free if shape[dim] % layout.axis_size(FSDP) == 0]
        if fitting:
            axes[fitting[0]] = FSDP
    return tuple(axes)


def _tensor_dim(path: Sequence[str], rank: int) -> int | None:
    dim = next((_TENSOR_DIM[name] for name in path if name in _TENSOR_DIM), None)
    # Of a low-rank pair only the factor with the split dimension is split.
    if dim is None or (path[-1], dim) in {("bias", -2), ("lora_a", -1), ("lora_b", -2)}:
        return None
    return rank + dim


def names_of(path: Sequence[Any]) -> tuple[str, ...]:
    """The names in a JAX key path that come from dicts, as those of parameters do."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def shard_like_parameters(tree: Any, layout: Layout) -> Any:
    """Shardings for a pytree whose leaves are parameters or mirror them, as optimizer states do.

    Args:
        tree: Leaves with a shape; those whose path ends like a parameter's are split as it is, scalars are replicated.
        layout: The devices.

    Returns:
        The same tree with a sharding per leaf.
    """

    def shard(path: tuple[Any, ...], leaf: Any) -> Sharding:
        names = names_of(path)
        return layout.sharding(*(parameter_axes(names, leaf.shape, layout) if names else ()))

    return jax.tree_util.tree_map_with_path(shard, tree)


def abstract(tree: Any, shardings: Any) -> Any:
    """The tree as `jax.ShapeDtypeStruct`s on these devices."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, shardings)
