"""Which operation of the forward pass a recomputed one repeats.

In: a graph and its `Links`. Out: `Originals`. In a loop's body, where code stands once, the code tells. Layers that are unrolled
run the same code in one body, so there an operation is told by what it reads, back to values that stand before both.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TypeAlias

from remat_kit.graph import Phase, StepGraph, TracedOp
from remat_kit.trace.links import Links

Code: TypeAlias = tuple[str, int, tuple[int, ...]]
"""Primitive, call site and shape of the first result, which JAX keeps when it splits a region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Originals:
    """Index of a graph.

    Attributes:
        num_forward: Code and loop -> how many operations of the forward pass have that code in the loop's body.
        value: First result of a recomputed operation -> that of the one that it repeats, where what they read tells.
    """

    num_forward: Counter[tuple[Code, int | None]]
    value: dict[int, int]

    def repeats(self, op: TracedOp, original: TracedOp, *, code: Code) -> bool:
        """Whether an operation with the code of another repeats it, in a region that reads what was made of that one."""
        return self.num_forward[code, original.loop] == 1 or self.value.get(op.outputs[0]) == original.outputs[0]


def originals_of(graph: StepGraph, links: Links) -> Originals:
    """Indexes a graph; operations stand after the makers of what they read, so one pass suffices."""
    num_forward: Counter[tuple[Code, int | None]] = Counter()
    same: dict[int, int] = {}
    made: dict[object, tuple[int, ...]] = {}
    for op in graph.ops:
        if op.phase is Phase.BACKWARD or not op.outputs:
            continue
        code = code_of(graph, op)
        key = (*code, op.name, tuple(same.get(links.root[value], links.root[value]) for value in op.inputs))
        if op.phase is Phase.FORWARD:
            num_forward[code, op.loop] += op.is_live
            made.setdefault(key, op.outputs)
        elif key in made:
            same.update(zip(op.outputs, made[key], strict=True))
    return Originals(num_forward=num_forward, value=same)


def code_of(graph: StepGraph, op: TracedOp) -> Code:
    """The code of an operation."""
    return op.kind, op.code, graph.values[op.outputs[0]].shape if op.outputs else ()
