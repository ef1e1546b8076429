"""The values that a differentiated program keeps for its backward pass.

In: a graph and its `Links`. Out: `Kept`, each with its `Residual`. A residual is a value that the forward pass makes and that
recomputation or the backward pass reads; what a loop stacks is followed back to the value in the loop's body, where names and
source lines are. The second level, what is kept while a region is recomputed, matters for nested regions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from remat_kit.grammar import parse_policy
from remat_kit.graph import Crossing, Origin, Phase, Residual, StepGraph, TracedOp, TracedRegion, is_kernel
from remat_kit.policy import Action, ByKind, Cheap, Kind, Named, Remat, Rule, Smaller, matches
from remat_kit.trace.links import Links, same_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A residual and where it stands in the graph.

    Attributes:
        record: What is told about it.
        base: The value in the innermost loop's body, before loops stacked it.
        regions: Recomputed regions that read it.
    """

    record: Residual
    base: int
    regions: tuple[int, ...]


def collect_kept(graph: StepGraph, links: Links) -> list[Kept]:
    """Residuals of both levels, one for each class of equal values, largest first, constants and arguments last."""
    found: dict[tuple[int, int, bool, int | None], Kept] = {}
    for value in range(len(graph.values)):
        made_in = _level(links.maker.get(value))
        readers = [op for op in links.readers.get(value, ()) if _is_later(op, made_in)]
        if not readers:
            continue
        kept = _describe(graph, links, value, readers)
        key = (links.root[kept.base], kept.record.num_layers, kept.record.is_on_host, kept.record.region)
        if key not in found or found[key].record.num_bytes < kept.record.num_bytes:
            found[key] = kept
    order = [Origin.OPERATION, Origin.CONSTANT, Origin.ARGUMENT]
    return sorted(found.values(), key=lambda kept: (order.index(kept.record.origin), -kept.record.num_bytes))


def _level(maker: TracedOp | None) -> tuple[Phase, int | None]:
    """Phase and recomputed region that make a value; arguments count as forward."""
    if maker is None or maker.phase is Phase.FORWARD:
        return Phase.FORWARD, None
    return maker.phase, maker.region if maker.phase is Phase.RECOMPUTE else None


def _is_later(reader: TracedOp, made_in: tuple[Phase, int | None]) -> bool:
    phase, region = made_in
    if phase is Phase.FORWARD:
        return reader.phase is not Phase.FORWARD
    return phase is Phase.RECOMPUTE and (reader.phase is Phase.BACKWARD or reader.region != region)


def unstack(graph: StepGraph, links: Links, value: int) -> tuple[int, int]:
    """Follows what loops stacked, and what they sliced of that, back to the innermost body's value; counts the iterations."""
    num_layers = 1
    while (maker := links.origin_op(value)) is not None and maker.inputs:
        if maker.kind == Crossing.LOOP_SLICE:  # undoes the stack that it slices
            maker = links.origin_op(maker.inputs[0])
            if maker is None or maker.kind != Crossing.LOOP_STACK or not maker.inputs:
                break
        elif maker.kind == Crossing.LOOP_STACK:
            num_layers *= graph.values[maker.outputs[0]].shape[0]
        else:
            break
        value = maker.inputs[0]
    return value, num_layers


def _describe(graph: StepGraph, links: Links, value: int, readers: Iterable[TracedOp]) -> Kept:
    base, num_layers = unstack(graph, links, value)
    root, kept = links.root[base], graph.values[value]
    maker = links.maker.get(root)
    origin = graph.values[root].origin
    if maker is not None:
        origin = Origin.OPERATION if value in links.reached else Origin.CONSTANT
    names = links.names.get(root, ())
    input_names = dict(zip(graph.inputs, graph.input_names, strict=True))
    regions = _reading_regions(graph, links, readers)
    _, region = _level(links.maker.get(value))
    record = Residual(
        names=names,
        kind=origin.value if maker is None else maker.kind,
        source=maker.source if maker is not None else input_names.get(root, ""),
        origin=origin,
        shape=_shown_shape(graph, links, value),
        dtype=kept.dtype,
        num_layers=num_layers,
        num_bytes=kept.num_bytes,
        device_bytes=_device_bytes(graph, links, value),
        is_on_host=kept.is_on_host,
        rule=_rule([graph.regions[found] for found in regions], names, maker, graph.values[base].num_bytes),
        region=region,
    )
    return Kept(record=record, base=base, regions=regions)


def _shown_shape(graph: StepGraph, links: Links, value: int) -> tuple[int, ...]:
    """The stacked shape; of one shard where it leaves shard_map, since JAX lays such shards end to end along the first axis."""
    stack: list[int] = []
    while (maker := links.maker.get(value)) is not None and maker.inputs:
        if maker.kind == Crossing.LOOP_STACK:
            stack.append(graph.values[value].shape[0])
        elif maker.kind != Crossing.SHARD_OUT:
            break
        value = maker.inputs[0]
    return (*stack, *graph.values[value].shape)


def _device_bytes(graph: StepGraph, links: Links, value: int) -> int | None:
    """Bytes on one device, if any of the equal values says so, also inside the loops that stacked it."""
    if graph.num_devices == 1:
        return graph.values[value].num_bytes
    num_layers = 1
    while True:
        same = [graph.values[member] for member in links.members[links.root[value]]]
        known = [member.device_bytes for member in same if member.device_bytes is not None]
        if known:
            return num_layers * min(known)
        maker = links.origin_op(value)
        if maker is None or maker.kind != Crossing.LOOP_STACK or not maker.inputs:
            return None
        num_layers *= graph.values[maker.outputs[0]].shape[0]
        value = maker.inputs[0]


def _reading_regions(graph: StepGraph, links: Links, readers: Iterable[TracedOp]) -> tuple[int, ...]:
    """Regions that read a value, or whose layers' backward pass does, seen through loops and shards that hand it to them."""
    found: dict[int, None] = {}
    waiting, seen = list(readers), set()
    while waiting:
        op = waiting.pop()
        region = op.after if op.region is None else op.region
        if region is not None:
            found[region] = None
        elif op.outputs[0] not in seen and (op.kind == Crossing.LOOP_SLICE or same_value(graph, op)):
            seen.add(op.outputs[0])
            waiting += links.readers.get(op.outputs[0], ())
    return tuple(found)


def _rule(regions: list[TracedRegion], names: tuple[str, ...], maker: TracedOp | None, num_bytes: int) -> str | None:
    """The rule that keeps a value; the later one wins, as in the policy."""
    if not regions or any(region.rules is None for region in regions):
        return None
    for region in regions:
        for rule in reversed(parsed_rules(region)):
            if _keeps(rule, names, maker, num_bytes):
                return str(rule)
    return "input"


def parsed_rules(region: TracedRegion) -> tuple[Rule, ...]:
    """The rules of a region's policy as records; () when it has none or is not ours."""
    policy = parse_policy("+".join(region.rules)) if region.rules else Remat()
    return policy.rules if isinstance(policy, Remat) else ()


def _keeps(rule: Rule, names: tuple[str, ...], maker: TracedOp | None, num_bytes: int) -> bool:
    match rule:
        case Named(action, patterns):
            hit = any(matches(pattern, name) for pattern in patterns for name in names)
            return hit and action is not Action.RECOMPUTE
        case ByKind(Kind.KERNELS):
            return maker is not None and is_kernel(maker)
        case ByKind():
            return maker is not None and not is_kernel(maker) and maker.flops != 0
        case Smaller(max_bytes):
            return maker is not None and maker.kind not in tuple(Crossing) and num_bytes <= max_bytes
        case Cheap():
            return False
        case _:
            assert_never(rule)
