"""What the visitor of `build` writes into: the growing graph, and where the visitor stands.

In: avals, equations and the numbers of the values they read. Out: numbers of values; operations and regions go into a `Builder`.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from remat_kit import _jax
from remat_kit.graph import Crossing, Origin, Phase, TracedOp, TracedRegion, TracedValue
from remat_kit.trace.phase import phase_of
from remat_kit.trace.source import call_site, source_line

_MAX_CONSTANT_SIZE = 2**22

Ids: TypeAlias = tuple[int | None, ...]  # None = a literal


@runtime_checkable
class HasRules(Protocol):
    """A checkpoint policy that says by which rules it decides, as ours do."""

    rules: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the visitor stands.

    Attributes:
        scope: Named scopes and transformations around the program, joined by `/`.
        region: Recomputed region around it.
        after: Hand-made region whose layer's backward pass it is part of.
        loop: Innermost loop around it.
        calls: How often the program runs.
        num_shards: Shards that run it side by side, each on arrays of the shapes as written.
        is_manual: Whether a device holds exactly one shard, so that bytes per device are known.
    """

    scope: str = ""
    region: int | None = None
    after: int | None = None
    loop: int | None = None
    calls: int = 1
    num_shards: int = 1
    is_manual: bool = False

    @property
    def phase(self) -> Phase:
        """Phase of an operation right here."""
        return phase_of(self.scope)


@dataclass(slots=True)
class Builder:
    """The graph so far: fields as in `StepGraph`, notes once each, small constants by value, numbers of call sites."""

    values: list[TracedValue] = field(default_factory=list)
    ops: list[TracedOp] = field(default_factory=list)
    regions: list[TracedRegion] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    constants: dict[int | None, np.ndarray] = field(default_factory=dict)
    codes: dict[tuple[Hashable, ...], int] = field(default_factory=dict)
    num_devices: int = 1
    num_loops: int = 0


def add_value(builder: Builder, aval: Any, place: Place, *, origin: Origin = Origin.OPERATION) -> int:
    """Adds the value of an abstract value and gives its number."""
    shape = tuple(getattr(aval, "shape", ()))
    dtype = getattr(aval, "dtype", None)
    local_bytes = math.prod(shape) * dtype.itemsize if dtype is not None else 0
    sharding = getattr(aval, "sharding", None)
    device_bytes = local_bytes if place.is_manual else _device_bytes(sharding, shape, local_bytes)
    value = TracedValue(
        shape=shape,
        dtype=dtype.name if dtype is not None else str(aval),
        num_bytes=local_bytes * place.num_shards,
        device_bytes=device_bytes,
        is_on_host="host" in str(getattr(aval, "memory_space", "")).lower(),
        origin=origin,
    )
    builder.values.append(value)
    return len(builder.values) - 1


def constrain(builder: Builder, value: int, sharding: Any) -> None:
    """Notes the bytes on one device of a value whose sharding the program asks for."""
    found = builder.values[value]
    shard_bytes = found.num_bytes * math.prod(_shard_shape(sharding, found.shape)) // max(1, math.prod(found.shape))
    builder.num_devices = max(builder.num_devices, sharding.num_devices)
    if found.device_bytes is None:
        builder.values[value] = dataclasses.replace(found, device_bytes=shard_bytes)


def _shard_shape(sharding: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the largest shard: a constraint, unlike an argument, may split a dimension unevenly."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding.shard_shape(shape)
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    named = [(axes,) if isinstance(axes, str) else axes if isinstance(axes, tuple) else () for axes in spec]
    parts = [math.prod(sharding.mesh.shape[axis] for axis in axes) for axes in named]
    return tuple(-(-size // count) for size, count in zip(shape, parts, strict=True))


def keep_constant(builder: Builder, value: int | None, constant: Any) -> None:
    """Keeps what kernels are priced by: tables of blocks, which are small integers."""
    if isinstance(constant, jax.Array | np.ndarray) and constant.dtype.kind == "i" and constant.size <= _MAX_CONSTANT_SIZE:
        builder.constants[value] = np.asarray(constant)


def _device_bytes(sharding: Any, shape: tuple[int, ...], local_bytes: int) -> int | None:
    """Bytes on one device where the type says the sharding, as it does on explicit mesh axes."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or not mesh.are_all_axes_explicit:
        return None
    return local_bytes * math.prod(sharding.shard_shape(shape)) // max(1, math.prod(shape))


def add_crossing(builder: Builder, kind: Crossing, eqn: Any, inputs: Ids, output: int, place: Place) -> None:
    """Adds what carries one value across the border of a loop, a branch or a shard."""
    add_op(builder, kind, eqn, inputs, (output,), place, flops=0, name=None)


def add_region(builder: Builder, eqn: Any, place: Place, rules: tuple[str, ...] | None) -> int:
    """Opens a recomputed region, at its checkpoint equation or at the first operation of a hand-made one."""
    builder.regions.append(TracedRegion(rules=rules, source=source_line(eqn), calls=place.calls, parent=place.region))
    return len(builder.regions) - 1


def into_loop(builder: Builder, place: Place, *, calls: int = 1) -> Place:
    """Opens the body of a loop that runs so often; of one without a known trip count it counts once."""
    builder.num_loops += 1
    return dataclasses.replace(place, loop=builder.num_loops, calls=place.calls * calls)


def rules_of(eqn: Any) -> tuple[str, ...] | None:
    """The rules of a checkpoint equation's policy; () without a policy, None for one that is not ours."""
    policy = _jax.parameters(eqn)["policy"]
    if policy is None:
        return ()
    return tuple(str(rule) for rule in policy.rules) if isinstance(policy, HasRules) else None


def add_op(
    builder: Builder,
    kind: str,
    eqn: Any,
    inputs: Ids,
    outputs: Ids,
    place: Place,
    *,
    flops: int | None,
    name: str | None,
) -> None:
    """Adds an operation at a place, priced for one call of one shard."""
    known, made = (tuple(value for value in ids if value is not None) for ids in (inputs, outputs))
    op = TracedOp(
        kind=str(kind),
        name=name,
        inputs=known,
        outputs=made,
        phase=place.phase,
        region=place.region,
        after=place.after,
        loop=place.loop,
        scope=place.scope,
        source=source_line(eqn),
        code=builder.codes.setdefault(call_site(eqn), len(builder.codes)),
        calls=place.calls,
        flops=None if flops is None else flops * place.num_shards,
        num_bytes=sum(builder.values[value].num_bytes for value in (*known, *made)),
        is_live=bool(eqn.effects) and kind not in tuple(Crossing),
    )
    builder.ops.append(op)


def mark_live(ops: Sequence[TracedOp], outputs: Iterable[int]) -> tuple[TracedOp, ...]:
    """Marks the operations that an output or an effect depends on."""
    maker = {value: index for index, op in enumerate(ops) for value in op.outputs}
    live: set[int] = set()
    waiting = [maker[value] for value in outputs if value in maker]
    waiting += [index for index, op in enumerate(ops) if op.is_live]
    while waiting:
        index = waiting.pop()
        if index not in live:
            live.add(index)
            waiting += [maker[value] for value in ops[index].inputs if value in maker]
    return tuple(dataclasses.replace(op, is_live=index in live) for index, op in enumerate(ops))


def new_values(builder: Builder, variables: Iterable[Any], place: Place) -> tuple[int, ...]:
    """Adds a value for each variable."""
    return tuple(add_value(builder, var.aval, place) for var in variables)
