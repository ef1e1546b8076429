"""A jaxpr into a `StepGraph`: one recursive visitor that inlines every program inside a program.

In: the closed jaxpr of a step. Out: the flat graph, with dead code marked by reachability from the outputs and effects, through
loops too, as XLA's own dead-code elimination does. What differs between JAX versions is in `_jax`. The body of a `while` without
a known trip count counts once, with a note; of a conditional the most expensive branch counts, the others get 0 calls.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from remat_kit import _jax
from remat_kit.graph import Crossing, Origin, Phase, StepGraph
from remat_kit.operations import matmul_flops
from remat_kit.scopes import scoped_rules
from remat_kit.trace.builder import (
    Builder,
    Ids,
    Place,
    add_crossing,
    add_op,
    add_region,
    add_value,
    constrain,
    into_loop,
    keep_constant,
    mark_live,
    new_values,
    rules_of,
)
from remat_kit.trace.kernels import is_kernel_call, price_kernel
from remat_kit.trace.source import source_line


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
        input_names=_jax.argument_names(program),
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
        keep_constant(builder, env[var], constant)
    last: tuple[int, Phase] | None = None
    for eqn in jaxpr.eqns:
        here = dataclasses.replace(place, scope=_join(place.scope, str(eqn.source_info.name_stack)))
        if here.region is None and here.after is None:
            here, last = _among_regions(builder, eqn, here, last)
        results = _visit_eqn(builder, eqn, tuple(_read(env, atom) for atom in eqn.invars), here)
        env.update(zip(eqn.outvars, results, strict=True))
    return tuple(_read(env, atom) for atom in jaxpr.outvars)


def _among_regions(
    builder: Builder, eqn: Any, place: Place, last: tuple[int, Phase] | None
) -> tuple[Place, tuple[int, Phase] | None]:
    """Where an equation stands among regions that no checkpoint equation delimits (jax_remat3, hand-made loops).

    Args:
        builder: The graph so far.
        eqn: An equation.
        place: Where it stands.
        last: The last such region of the program so far, and whether its recomputation or its layer's backward pass came last.
    """
    if place.phase is Phase.FORWARD:
        return place, last
    rules = scoped_rules(place.scope)
    if place.phase is Phase.BACKWARD and rules is None:
        return place, None
    is_other = last is not None and (builder.regions[last[0]].rules != rules or (last[1], place.phase) == _NEXT)
    region = add_region(builder, eqn, place, rules) if last is None or is_other else last[0]
    name = "region" if place.phase is Phase.RECOMPUTE else "after"
    return dataclasses.replace(place, **{name: region}), (region, place.phase)


_NEXT = (Phase.BACKWARD, Phase.RECOMPUTE)
"""One layer's backward pass is over, and recomputation of the next one begins."""


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
    """A checkpoint equation of the backward pass opens a region; any other one is only a bracket around its program."""
    if not eqn.params.get("differentiated", False) or "prevent_cse" not in eqn.params or place.phase is not Phase.BACKWARD:
        return place
    return dataclasses.replace(place, region=add_region(builder, eqn, place, rules_of(eqn)))


def _scan(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    num_consts, num_carry = _jax.scan_counts(eqn.params)
    program = eqn.params["jaxpr"]
    jaxpr, _ = _jax.open_jaxpr(program)
    inner = into_loop(builder, place, calls=eqn.params["length"])
    carried = new_values(builder, jaxpr.invars[num_consts : num_consts + num_carry], inner)
    stacks = inputs[num_consts + num_carry :]
    sliced = new_values(builder, jaxpr.invars[num_consts + num_carry :], inner)
    for stack, element in zip(stacks, sliced, strict=True):
        add_crossing(builder, Crossing.LOOP_SLICE, eqn, (stack,), element, inner)
    results = visit(builder, program, (*inputs[:num_consts], *carried, *sliced), inner)
    _close_loop(builder, eqn, inputs[num_consts : num_consts + num_carry], carried, results[:num_carry], inner)
    outputs = new_values(builder, eqn.outvars, place)
    for index, (result, output) in enumerate(zip(results, outputs, strict=True)):
        kind = Crossing.LOOP_RESULT if index < num_carry else Crossing.LOOP_STACK
        add_crossing(builder, kind, eqn, (result,), output, place if index < num_carry else inner)
    return outputs


def _while(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    body, _ = _jax.open_jaxpr(params["body_jaxpr"])
    carried = new_values(builder, body.invars[params["body_nconsts"] :], place)
    start, inner = len(builder.ops), into_loop(builder, place)
    visit(builder, params["cond_jaxpr"], (*inputs[:first], *carried), inner)
    results = visit(builder, params["body_jaxpr"], (*inputs[first:second], *carried), inner)
    if any(op.flops != 0 for op in builder.ops[start:]):
        note = f"The while loop at {source_line(eqn) or 'an unknown line'} has no known trip count: its body counts once."
        builder.notes[note] = None
    _close_loop(builder, eqn, inputs[second:], carried, results, place)
    outputs = new_values(builder, eqn.outvars, place)
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
    outputs = new_values(builder, eqn.outvars, place)
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
    shards = new_values(builder, jaxpr.invars, inner)
    for whole, shard in zip(inputs, shards, strict=True):
        add_crossing(builder, Crossing.SHARD_IN, eqn, (whole,), shard, place)
        if builder.values[shard].shape == (None if whole is None else builder.values[whole].shape):
            keep_constant(builder, shard, builder.constants.get(whole))
    results = visit(builder, eqn.params["jaxpr"], shards, inner)
    outputs = new_values(builder, eqn.outvars, place)
    for shard, whole in zip(results, outputs, strict=True):
        add_crossing(builder, Crossing.SHARD_OUT, eqn, (shard,), whole, place)
    return outputs


def add_eqn(builder: Builder, eqn: Any, inputs: Ids, place: Place) -> Ids:
    """Adds an equation that holds no program, or a kernel, and gives its results."""
    outputs = new_values(builder, eqn.outvars, place)
    kernel = price_kernel(eqn, [builder.constants.get(value) for value in inputs]) if is_kernel_call(eqn) else None
    flops = (_matmul_flops(eqn) or 0) if kernel is None else kernel.flops
    name = _jax.checkpoint_name_of(eqn) if kernel is None else kernel.name
    kind = eqn.primitive.name if kernel is not None or name is None else "name"
    if kind == "sharding_constraint":
        constrain(builder, outputs[0], eqn.params["sharding"])
    if kind == "optimization_barrier":
        for source, output in zip(inputs, outputs, strict=True):
            add_op(builder, kind, eqn, (source,), (output,), place, flops=0, name=None)
            keep_constant(builder, output, builder.constants.get(source))
        return outputs
    add_op(builder, kind, eqn, inputs, outputs, place, flops=flops, name=name)
    return outputs


def _matmul_flops(eqn: Any) -> int | None:
    operands = [_shape(atom) for atom in eqn.invars]
    return matmul_flops(eqn.primitive.name, operands, _shape(eqn.outvars[0]) if eqn.outvars else (), eqn.params)


def _shape(atom: Any) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def _read(env: dict[Any, int | None], atom: Any) -> int | None:
    return None if isinstance(atom, Literal) else env[atom]


def _join(outer: str, inner: str) -> str:
    return f"{outer}/{inner}" if outer and inner else outer or inner
