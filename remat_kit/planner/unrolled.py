"""Blocks of layers that are modules one after the other, and plans for them: for models that nobody edits.

In: a step traced under `rematerialize({PATTERN: "none"})`, so that every module's output carries its path; the target's rates.
Out: an `UnrolledStack` for each kind of layer, whose values go by the paths of the modules that made them (`*/mlp/c_fc`, whatever
the layer's number), and `wraps_of`, which turns a plan for such stacks into pairs of module pattern and policy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from remat_kit.errors import StepError
from remat_kit.graph import Crossing, Phase, StepGraph, TracedOp
from remat_kit.planner.body import FREE, Body, LayerLoop, Rates, device_bytes, grouped, layer_of, name_within
from remat_kit.plans import Plan, StackPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrolledStack:
    """Equal layers of a model that are modules of their own.

    Attributes:
        name: The pattern, with a number where layers of several kinds match it.
        paths: Their modules, first layer first.
        layer: One of them.
    """

    name: str
    paths: tuple[str, ...]
    layer: LayerLoop


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """A step's operations, who makes and who reads each value, and the positions where each module's output is named."""

    ops: tuple[TracedOp, ...]
    maker: Mapping[int, int]
    readers: Mapping[int, tuple[int, ...]]
    named: Mapping[str, tuple[int, ...]]


def unrolled_stacks(
    graph: StepGraph, *, pattern: str, is_match: Callable[[str], bool], rates: Rates
) -> tuple[UnrolledStack, ...]:
    """The layers of a model by the pattern of their modules, those of one kind together.

    Args:
        graph: The step, traced with policy `none` for the pattern.
        pattern: What plans call the layers.
        is_match: Whether a module path is one of them; of nested ones the outermost counts.
        rates: Of the target.

    Raises:
        StepError: No module matches, or no layer keeps values for the backward pass.
    """
    forward = _forward(graph)
    paths = layer_paths(graph, is_match)
    if not paths:
        raise StepError(f"module pattern {pattern!r} matches no module of the step: trace it with wraps {{{pattern!r}: 'none'}}.")
    kinds: dict[object, list[str]] = {}
    for path in paths:
        kinds.setdefault(_kind(graph, forward, path), []).append(path)
    stacks = []
    for number, members in enumerate(kinds.values()):
        chosen = next((path for path in members if path != paths[0]), members[0])
        position = paths.index(chosen)
        body = _body(graph, forward, chosen, paths[position - 1] if position else None)
        name = pattern if len(kinds) == 1 else f"{pattern} {number + 1}"
        layer = layer_of(graph, body, rates)
        stacks.append(UnrolledStack(name=name, paths=tuple(members), layer=_times(layer, len(members))))
    if not any(stack.layer.block.read_bytes > stack.layer.block.input_bytes for stack in stacks):
        raise StepError(f"the modules that {pattern!r} matches keep nothing for the backward pass: there is nothing to plan.")
    return tuple(stacks)


def layer_paths(graph: StepGraph, is_match: Callable[[str], bool]) -> tuple[str, ...]:
    """Paths of the modules that match, in forward order, without those within another one that does."""
    named = dict.fromkeys(op.name for op in graph.ops if op.kind == "name" and op.name is not None and op.phase is Phase.FORWARD)
    found = [name for name in named if is_match(name)]
    return tuple(name for name in found if not any(name.startswith(f"{other}/") for other in found))


def wraps_of(plan: Plan, layers: Mapping[str, Sequence[str]]) -> tuple[tuple[str, str], ...]:
    """A plan for unrolled stacks as `rematerialize` takes it.

    Args:
        plan: Parts by the stacks' names, or one part for all.
        layers: Stack name -> the paths of its modules, first layer first. A name that is a pattern stands for all its modules.

    Returns:
        Pairs of module pattern and text of the policy, later ones win: the pattern alone where one policy holds for all of its
        layers; else the pattern with the first segment's policy, and one pair for each layer that follows another.

    Raises:
        PolicyError: Counts do not fit the layers.
    """
    parts = dict(plan.parts)
    pairs: list[tuple[str, str]] = []
    for name, paths in layers.items():
        part = parts.get(name, parts.get(None))
        assert part is not None, f"no part for {name}"
        pairs += _wraps(name, part.fit(len(paths)), paths)
    return tuple(pairs)


def _wraps(name: str, part: StackPlan, paths: Sequence[str]) -> list[tuple[str, str]]:
    policies = [str(segment.policy) for segment in part.segments for _ in range(segment.num_layers or 0)]
    if " " in name:  # one kind of several: its pattern would match the others too
        return list(zip(paths, policies, strict=True))
    rest = [(path, policy) for path, policy in zip(paths, policies, strict=True) if policy != policies[0]]
    return [(name, policies[0]), *rest]


def _forward(graph: StepGraph) -> _Forward:
    readers: dict[int, list[int]] = {}
    named: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            readers.setdefault(value, []).append(index)
        if op.kind == "name" and op.name is not None and op.phase is Phase.FORWARD:
            named.setdefault(op.name, []).append(index)
    return _Forward(
        ops=graph.ops,
        maker={value: index for index, op in enumerate(graph.ops) for value in op.outputs},
        readers={value: tuple(found) for value, found in readers.items()},
        named={name: tuple(found) for name, found in named.items()},
    )


def _kind(graph: StepGraph, forward: _Forward, path: str) -> object:
    """What makes layers equal: the names within them, with their bytes, and what they hand on."""
    inside = [(name, indices) for name, indices in forward.named.items() if name == path or name.startswith(f"{path}/")]
    return tuple(
        (name_within(name, path), tuple(device_bytes(graph, forward.ops[index].outputs[0]) for index in indices))
        for name, indices in inside
        if name != path
    ) + tuple(device_bytes(graph, forward.ops[index].outputs[0]) for index in forward.named[path])


def _body(graph: StepGraph, forward: _Forward, path: str, before: str | None) -> Body:
    """The operations of a layer: between the outputs of the layer before it and its own."""
    ends = forward.named[path]
    calls = forward.ops[ends[0]].calls
    starts = () if before is None else forward.named[before]
    outside = _ancestors(forward, [value for index in starts for value in forward.ops[index].outputs], frozenset(), calls=0)
    core = _ancestors(forward, [value for index in ends for value in forward.ops[index].inputs], outside, calls=calls)
    reach = core | _side_results(forward, core, frozenset(ends))
    kept = sorted(value for index in reach for value in forward.ops[index].outputs if _is_read(forward, value, reach.union(ends)))
    chosen = _ancestors(forward, kept, outside, calls=calls) & reach
    return Body(
        ops=grouped(graph.ops, sorted(chosen), calls=calls),
        kept=tuple(kept),
        inputs=tuple(value for index in starts for value in forward.ops[index].outputs),
        calls=calls,
        source=path,
        path=path,
    )


def _ancestors(forward: _Forward, values: Iterable[int], outside: frozenset[int], *, calls: int) -> frozenset[int]:
    """Operations that values depend on, without those outside and those that run less often than the layer."""
    found: set[int] = set()
    waiting = list(values)
    while waiting:
        index = forward.maker.get(waiting.pop())
        if index is None or index in found or index in outside or forward.ops[index].calls < calls:
            continue
        found.add(index)
        waiting += forward.ops[index].inputs
    return frozenset(found)


def _side_results(forward: _Forward, core: frozenset[int], ends: frozenset[int]) -> frozenset[int]:
    """Operations of the forward pass that the layer's output does not need, but what the backward pass reads does."""
    found: set[int] = set()
    waiting = [value for index in core for value in forward.ops[index].outputs]
    while waiting:
        for index in forward.readers.get(waiting.pop(), ()):
            op = forward.ops[index]
            if op.phase is Phase.FORWARD and op.is_live and index not in core | ends | found:
                found.add(index)
                waiting += op.outputs
    return frozenset(found)


def _is_read(forward: _Forward, value: int, own: frozenset[int]) -> bool:
    """Whether the backward pass reads a value, be it through what only hands it on; the layer's own operations don't count."""
    for index in forward.readers.get(value, ()):
        op = forward.ops[index]
        if op.is_live and op.phase is not Phase.FORWARD:
            return True
        is_handed_on = op.kind in FREE or op.kind in (Crossing.SHARD_IN, Crossing.SHARD_OUT)
        if index not in own and is_handed_on and any(_is_read(forward, output, own) for output in op.outputs):
            return True
    return False


def _times(layer: LayerLoop, num_layers: int) -> LayerLoop:
    return LayerLoop(calls=layer.calls * num_layers, source=layer.source, block=layer.block, forward_s=layer.forward_s)
