"""A Llama block as numbers, and pretended compilers that pad, leave holes, put the peak elsewhere and do not extrapolate."""

import zlib
from dataclasses import dataclass, field

from remat_kit.grammar import parse_plan
from remat_kit.planner.blocks import BlockGraph, ValueRow, block_of
from remat_kit.planner.search import plan_stack
from remat_kit.planning import Measured, Objective, PlanResult
from remat_kit.plans import bind
from remat_kit.policy import Named, NoRemat

MiB, GiB = 2**20, 2**30


def llama(*, tokens=8 * 4096, d=2048, ff=8192, kv=4, heads=16):
    """A Llama block in bytes (bf16) and FLOPs, its roofline at 600 TFLOP/s."""
    wide, narrow, big = 2 * tokens * d, 2 * tokens * d * kv // heads, 2 * tokens * ff
    matmul = 2 * tokens * d

    def row(name, num_bytes, flops=0, **other):
        return ValueRow(name=name, num_bytes=num_bytes, flops=flops, seconds=flops / 6e14 + 3 * num_bytes / 3.3e12, **other)

    return block_of(
        [
            row("norm", wide, is_saveable=False),
            row("q", wide, matmul * d, needs=("norm",)),
            row("k", narrow, matmul * d * kv // heads, needs=("norm",)),
            row("v", narrow, matmul * d * kv // heads, needs=("norm",)),
            row("attn", wide, matmul * 4096, needs=("q", "k", "v")),
            row("attn_out", wide, matmul * d, needs=("attn",), is_read=False),
            row("mid", wide, needs=("attn_out",), is_saveable=False),
            row("gate", big, matmul * ff, needs=("mid",)),
            row("up", big, matmul * ff, needs=("mid",)),
            row("act", big, needs=("gate", "up"), is_saveable=False),
            row("down", wide, matmul * ff, needs=("act",), is_read=False),
        ],
        input_bytes=wide,
    )


def replays(block: BlockGraph, kept: set[str]) -> set[int]:
    """Operations that run again: a walk back from what is read."""
    maker = {value: number for number, op in enumerate(block.ops) for value in op.outputs}
    again, waiting = set(), [number for number, value in enumerate(block.values) if value.is_read]
    while waiting:
        value = waiting.pop()
        if value in maker and block.values[value].name not in kept and maker[value] not in again:
            again.add(maker[value])
            waiting.extend(block.ops[maker[value]].inputs)
    return again


@dataclass
class Compiler:
    """A pretended compiler. Everything here is unknown to the planner.

    fixed, per_layer: bytes. padding: name -> factor. dead: names not alive at the peak. holes: largest part of the arena that is
    wasted, by the text. loss: bytes alive only at the loss, where no working set is. mixed: extra of mixed plans. bend: extra
    part of the arena at full depth. immediate: part of what a last layer keeps that is gone by the peak, when it alone follows
    its policy. shallow: up to so many layers, another program is made, that takes twice the bytes a layer.
    """

    blocks: dict[str, BlockGraph]
    depths: dict[str, int]
    fixed: int = 3 * GiB
    per_layer: int = 300 * MiB
    padding: dict = field(default_factory=dict)
    dead: tuple = ()
    holes: float = 0.0
    loss: int = 0
    mixed: int = 0
    bend: float = 0.0
    immediate: float = 0.0
    shallow: int = 0
    calls: list = field(default_factory=list)

    def __call__(self, plan: str, depth: int | None, /) -> Measured:
        """Compiles."""
        self.calls.append((plan, depth))
        layers = {name: count if depth is None else min(count, depth) for name, count in self.depths.items()}
        kept, working, flops, is_mixed, num_layers = 0.0, 0.0, 0, False, 0
        for name, part in bind(parse_plan(plan), layers).by_stack:
            is_mixed |= part.is_mixed
            for segment in part.segments:
                block, count = self.blocks[name], segment.num_layers or 0
                num_layers += count
                layer_kept, layer_working, layer_flops = self.layer(block, segment.policy)
                kept += count * layer_kept
                flops += count * layer_flops
                working = max(working, layer_working)
            if part.is_mixed and part.segments[-1].num_layers == 1:
                kept -= self.immediate * self.layer(self.blocks[name], part.segments[-1].policy)[0]
        arena = kept + max(self.loss, working)
        arena *= 1 + self.holes * (zlib.crc32(plan.encode()) % 1000) / 1000 + (self.bend if depth is None else 0)
        per_layer = self.per_layer * (2 if num_layers <= self.shallow else 1)
        total = self.fixed + per_layer * num_layers + arena + self.mixed * is_mixed
        return Measured(total_bytes=round(total), flops=10**15 + flops, recompute_flops=flops)

    def layer(self, block, policy):
        """Bytes kept, working set and FLOPs repeated of one layer."""
        if isinstance(policy, NoRemat):
            return block.input_bytes + sum(value.num_bytes for value in block.values if value.is_read), 0, 0
        saved = {name for rule in policy.rules if isinstance(rule, Named) for name in rule.patterns}
        assert saved <= set(block.names)
        again = replays(block, saved)
        sizes = {n: sum(value.num_bytes for value in block.values if value.name == n) for n in saved - set(self.dead)}
        kept = block.input_bytes + sum(size * self.padding.get(name, 1.0) for name, size in sizes.items())
        working = sum(block.values[value].num_bytes for number in again for value in block.ops[number].outputs)
        return kept, 1.2 * working, sum(block.ops[number].flops or 0 for number in again)

    @property
    def whole(self):
        """Plans compiled at full depth."""
        return [plan for plan, depth in self.calls if depth is None]


def one_stack(num_layers=16, *, objective=Objective.FLOPS, block=None, is_unrolled=False, **how):
    block = block or llama()
    stack = plan_stack("layers", block, num_layers=num_layers, objective=objective, is_unrolled=is_unrolled)
    return [stack], Compiler(blocks={"layers": block}, depths={"layers": num_layers}, **how)


def check_proof(result: PlanResult, compiler: Compiler, budget):
    """What must hold of every result, whatever the compiler does."""
    assert result.compiled_total_bytes == compiler(result.plan, None).total_bytes
    del compiler.calls[-1]
    assert result.full_compiles == len(compiler.whole) <= 4
    assert result.compiles == len(compiler.calls) <= 12
    assert len(set(compiler.calls)) == len(compiler.calls)
    assert result.fits == (result.compiled_total_bytes <= budget)
    assert result.missing_bytes == max(0, result.compiled_total_bytes - budget)
