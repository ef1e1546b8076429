"""A jaxpr into a `StepGraph`: one recursive visitor that inlines every program inside a program.

In: the closed jaxpr of a step. Out: the flat graph, with dead code marked by reachability from the outputs and effects, through
loops too, as XLA's own dead-code elimination does. What differs between JAX versions is in `_jax`. The body of a `while` without
a known trip count counts once, with a note; of a conditional the most expensive branch counts, the others get 0 calls.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jax.extend.core import Literal

from remat_kit import _jax
from remat_kit.graph import Crossing, Origin, Phase, StepGraph, TracedOp, TracedRegion, TracedValue
from remat_kit.trace.flops import matmul_flops
from remat_kit.trace.kernels import is_kernel_call, price_kernel
from remat_kit.trace.phase import phase_of
from remat_kit.trace.source import source_line

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
        calls: How often the program runs.
        num_shards: Shards that run it side by side, each on arrays of the shapes as written.
        is_manual: Whether a device holds exactly one shard, so that bytes per device are known.
    """

    scope: str = ""
    region: int | None = None
    calls: int = 1
    num_shards: int = 1
    is_manual: bool = False

    @property
    def phase(self) -> Phase:
        """Phase of an operation right here."""
        return phase_of(self.scope, in_region=self.region is not None)


@dataclass(slots=True)
class Builder:
    """The graph so far: fields as in `StepGraph`, notes once each, and the small constants by value number."""

    values: list[TracedValue] = field(default_factory=list)
    ops: list[TracedOp] = field(default_factory=list)
    regions: list[TracedRegion] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    constants: dict[int | None, np.ndarray] = field(default_factory=dict)
    num_devices: int = 1


def build_graph(program: Any, *, num_devices: int) -> StepGraph:
    """Builds the graph of a traced program.

    Args:
        program: A closed jaxpr.
        num_devices: Devices that its arguments live on; meshes inside the program may raise it.

    Returns:
        The graph, dead code marked.
    """
    builder = Builder(num_devices=num_devices)
    jaxpr, _ = _jax.open_jaxpr(program)
    place = Place()
    inputs = [add_value(builder, var.aval, place, origin=Origin.ARGUMENT) for var in jaxpr.invars]
    results = visit(builder, program, inputs, place)
    outputs = tuple(result for result in results if result is not None)
    return StepGraph(
        values=tuple(builder.values),
        ops=mark_live(builder.ops, outputs),
        regions=tuple(builder.regions),
        inputs=tuple(inputs),
        outputs=outputs,
        num_devices=builder.num_devices,
        notes=tuple(builder.notes),
    )


def visit(builder: Builder, program: Any, inputs: Sequence[int | None], place: Place) -> Ids:
    """Adds the operations of a program.

    Args:
        builder: The graph so far.
        program: A jaxpr, closed or open.
        inputs: The value that each of its parameters stands for.
        place: Where it stands.

    Returns:
        The value of each of its results.
    """
    jaxpr, constants = _jax.open_jaxpr(program)
    env: dict[Any, int | None] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, constant in zip(jaxpr.constvars, constants, strict=True):
        env[var] = add_value(builder, var.aval, place, origin=Origin.CONSTANT)
        _keep_constant(builder, env[var], constant)
    run: int | None = None  # recomputation that no checkpoint equation delimits (jax_remat3, hand-made loops)
    for eqn in jaxpr.eqns:
        here = dataclasses.replace(place, scope=_join(place.scope, str(eqn.source_info.name_stack)))
        if here.region is None and here.phase is Phase.RECOMPUTE:
            run = add_region(builder, eqn, here) if run is None else run
            here = dataclasses.replace(here, region=run)
        elif here.phase is Phase.BACKWARD:
            run = None
        results = _visit_eqn(builder, eqn, tuple(_read(env, atom) for atom in eqn.invars), here)
        env.update(zip(eqn.outvars, results, strict=True))
    return tuple(_read(env, atom) for atom in jaxpr.outvars)


def _visit_eqn(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    kind = eqn.primitive.name
    if is_kernel_call(eqn):
        return add_eqn(builder, eqn, inputs, place)
    match kind:
        case "scan":
            return _scan(builder, eqn, inputs, place)
        case "while":
            return _while(builder, eqn, inputs, place)
        case "cond":
            return _cond(builder, eqn, inputs, place)
        case "shard_map":
            return _shard_map(builder, eqn, inputs, place)
    programs = _jax.inner_programs(eqn)
    if programs and _is_call(eqn, programs[0]):
        return visit(builder, programs[0], inputs, _into_region(builder, eqn, place))
    return add_eqn(builder, eqn, inputs, place)


def _is_call(eqn: Any, program: Any) -> bool:
    """Whether an equation runs a program on its operands as they are; not so for the reducer inside a `reduce`."""
    jaxpr, _ = _jax.open_jaxpr(program)
    inside = [atom.aval.shape for atom in (*jaxpr.invars, *jaxpr.outvars) if hasattr(atom.aval, "shape")]
    outside = [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars) if hasattr(atom.aval, "shape")]
    return inside == outside


def _into_region(builder: Builder, eqn: Any, place: Place) -> Place:
    """A checkpoint equation of the backward pass opens a region; one that nothing differentiated recomputes nothing."""
    if not eqn.params.get("differentiated", False) or "prevent_cse" not in eqn.params:
        return place
    return dataclasses.replace(place, region=add_region(builder, eqn, place))


def _scan(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    num_consts, num_carry = _jax.scan_counts(eqn.params)
    program = eqn.params["jaxpr"]
    jaxpr, _ = _jax.open_jaxpr(program)
    inner = dataclasses.replace(place, calls=place.calls * eqn.params["length"])
    carried = _new_values(builder, jaxpr.invars[num_consts : num_consts + num_carry], inner)
    stacks = inputs[num_consts + num_carry :]
    sliced = _new_values(builder, jaxpr.invars[num_consts + num_carry :], inner)
    for stack, element in zip(stacks, sliced, strict=True):
        add_crossing(builder, Crossing.LOOP_SLICE, eqn, (stack,), element, inner)
    results = visit(builder, program, (*inputs[:num_consts], *carried, *sliced), inner)
    _close_loop(builder, eqn, inputs[num_consts : num_consts + num_carry], carried, results[:num_carry], inner)
    outputs = _new_values(builder, eqn.outvars, place)
    for index, (result, output) in enumerate(zip(results, outputs, strict=True)):
        kind = Crossing.LOOP_RESULT if index < num_carry else Crossing.LOOP_STACK
        add_crossing(builder, kind, eqn, (result,), output, place if index < num_carry else inner)
    return outputs


def _while(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    body, _ = _jax.open_jaxpr(params["body_jaxpr"])
    carried = _new_values(builder, body.invars[params["body_nconsts"] :], place)
    start = len(builder.ops)
    visit(builder, params["cond_jaxpr"], (*inputs[:first], *carried), place)
    results = visit(builder, params["body_jaxpr"], (*inputs[first:second], *carried), place)
    if any(op.flops != 0 for op in builder.ops[start:]):
        note = f"The while loop at {source_line(eqn) or 'an unknown line'} has no known trip count: its body counts once."
        builder.notes[note] = None
    _close_loop(builder, eqn, inputs[second:], carried, results, place)
    outputs = _new_values(builder, eqn.outvars, place)
    for result, output in zip(results, outputs, strict=True):
        add_crossing(builder, Crossing.LOOP_RESULT, eqn, (result,), output, place)
    return outputs


def _close_loop(builder: Builder, eqn: Any, initial: Ids, carried: tuple[int, ...], results: Ids, place: Place) -> None:
    for start, inside, end in zip(initial, carried, results, strict=True):
        add_crossing(builder, Crossing.LOOP_CARRY, eqn, (start, end), inside, place)


def _cond(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    """Visits all branches; those that cost less than the most expensive one get 0 calls."""
    spans, results = [], []
    for branch in eqn.params["branches"]:
        start = len(builder.ops)
        results.append(visit(builder, branch, inputs[1:], place))
        spans.append((start, len(builder.ops)))
    costs = [sum((op.flops or 0) * op.calls for op in builder.ops[start:end]) for start, end in spans]
    for index, (start, end) in enumerate(spans):
        if index != costs.index(max(costs)):
            builder.ops[start:end] = [dataclasses.replace(op, calls=0) for op in builder.ops[start:end]]
    outputs = _new_values(builder, eqn.outvars, place)
    for position, output in enumerate(outputs):
        sources = (inputs[0], *(result[position] for result in results))
        add_crossing(builder, Crossing.BRANCH_RESULT, eqn, sources, output, place)
    return outputs


def _shard_map(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    mesh, axes = eqn.params["mesh"], eqn.params["newly_manual_axes"]
    builder.num_devices = max(builder.num_devices, mesh.size)
    num_shards = place.num_shards * math.prod(mesh.shape[axis] for axis in axes)
    inner = dataclasses.replace(place, num_shards=num_shards, is_manual=num_shards == mesh.size)
    jaxpr, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
    shards = _new_values(builder, jaxpr.invars, inner)
    for whole, shard in zip(inputs, shards, strict=True):
        add_crossing(builder, Crossing.SHARD_IN, eqn, (whole,), shard, place)
        if whole in builder.constants and builder.constants[whole].shape == builder.values[shard].shape:
            builder.constants[shard] = builder.constants[whole]
    results = visit(builder, eqn.params["jaxpr"], shards, inner)
    outputs = _new_values(builder, eqn.outvars, place)
    for shard, whole in zip(results, outputs, strict=True):
        add_crossing(builder, Crossing.SHARD_OUT, eqn, (shard,), whole, place)
    return outputs


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


def _keep_constant(builder: Builder, value: int | None, constant: Any) -> None:
    """Keeps what kernels are priced by: tables of blocks, which are small integers."""
    if isinstance(constant, jax.Array | np.ndarray) and constant.dtype.kind == "i" and constant.size <= _MAX_CONSTANT_SIZE:
        builder.constants[value] = np.asarray(constant)


def _device_bytes(sharding: Any, shape: tuple[int, ...], local_bytes: int) -> int | None:
    """Bytes on one device where the type says the sharding, as it does on explicit mesh axes."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or not mesh.are_all_axes_explicit:
        return None
    return local_bytes * math.prod(sharding.shard_shape(shape)) // max(1, math.prod(shape))


def add_eqn(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    """Adds an equation that holds no program, or a kernel, and gives its results."""
    outputs = _new_values(builder, eqn.outvars, place)
    kernel = price_kernel(eqn, [builder.constants.get(value) for value in inputs]) if is_kernel_call(eqn) else None
    flops = (matmul_flops(eqn) or 0) if kernel is None else kernel.flops
    name = _jax.checkpoint_name_of(eqn) if kernel is None else kernel.name
    kind = eqn.primitive.name if kernel is not None or name is None else "name"
    if kind == "optimization_barrier":
        for source, output in zip(inputs, outputs, strict=True):
            _add_op(builder, kind, eqn, (source,), (output,), place, flops=0, name=None)
        return outputs
    _add_op(builder, kind, eqn, inputs, outputs, place, flops=flops, name=name)
    return outputs


def add_crossing(builder: Builder, kind: Crossing, eqn: Any, inputs: Ids, output: int, place: Place) -> None:
    """Adds what carries one value across the border of a loop, a branch or a shard."""
    _add_op(builder, kind, eqn, inputs, (output,), place, flops=0, name=None)


def add_region(builder: Builder, eqn: Any, place: Place) -> int:
    """Opens a recomputed region."""
    policy = eqn.params.get("policy")
    if policy is None:
        rules: tuple[str, ...] | None = ()
    else:
        rules = tuple(str(rule) for rule in policy.rules) if isinstance(policy, HasRules) else None
    builder.regions.append(TracedRegion(rules=rules, source=source_line(eqn), calls=place.calls))
    return len(builder.regions) - 1


def _add_op(
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
    known, made = (tuple(value for value in ids if value is not None) for ids in (inputs, outputs))
    op = TracedOp(
        kind=str(kind),
        name=name,
        inputs=known,
        outputs=made,
        phase=place.phase,
        region=place.region,
        scope=place.scope,
        source=source_line(eqn),
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


def _new_values(builder: Builder, variables: Iterable[Any], place: Place) -> tuple[int, ...]:
    return tuple(add_value(builder, var.aval, place) for var in variables)


def _read(env: dict[Any, int | None], atom: Any) -> int | None:
    return None if isinstance(atom, Literal) else env[atom]


def _join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner
