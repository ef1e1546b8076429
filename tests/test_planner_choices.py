"""Policies of a layer: against an independent closure and brute force over random graphs, and the traps of per-value planning."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_kit.errors import PolicyError
from remat_kit.planner.blocks import BlockGraph, BlockOp, BlockValue, ValueRow, block_of
from remat_kit.planner.choices import all_choices, layer_choices
from remat_kit.planner.choices_milp import solved_choices
from remat_kit.planner.closure import HostLink, LayerChoice
from remat_kit.planning import Objective

MiB = 2**20
FLOPS = Objective.FLOPS


@st.composite
def blocks(draw, max_names=6, max_ops=7):
    """Random layers: operations with one or two outputs, some named (names may repeat), read, fixed or without a price."""
    num_ops = draw(st.integers(1, max_ops))
    names = [f"n{number}" for number in range(max_names)]
    values, ops = [], []
    for _ in range(num_ops):
        made = len(values)
        inputs = draw(st.lists(st.integers(0, made - 1), max_size=3, unique=True)) if made else []
        for _ in range(draw(st.integers(1, 2))):
            name = draw(st.one_of(st.none(), st.sampled_from(names)))
            values.append(BlockValue(num_bytes=draw(st.integers(1, 9)), name=name, is_read=draw(st.booleans())))
        ops.append(
            BlockOp(
                kind="op",
                inputs=tuple(inputs),
                outputs=tuple(range(made, len(values))),
                flops=draw(st.one_of(st.integers(0, 20), st.integers(0, 20), st.none())),
                seconds=1.0,
                is_replayable=draw(st.sampled_from([True, True, True, True, False])),
            )
        )
    return BlockGraph(values=tuple(values), ops=tuple(ops), input_bytes=3)


def oracle_replays(block, kept):
    """Operations that run again, by walking back from each value that is read: nothing shared with the planner's code."""
    maker = {value: number for number, op in enumerate(block.ops) for value in op.outputs}
    again, waiting = set(), [number for number, value in enumerate(block.values) if value.is_read]
    while waiting:
        value = waiting.pop()
        if value in maker and block.values[value].name not in kept and maker[value] not in again:
            again.add(maker[value])
            waiting.extend(block.ops[maker[value]].inputs)
    return again


def oracle_table(block, objective=FLOPS):
    """Subset of names -> (bytes, cost), for the subsets that are allowed."""
    known = sum(op.flops for op in block.ops if op.flops is not None)
    names = sorted({value.name for value in block.values} - {None})
    table = {}
    for count in range(len(names) + 1):
        for kept in itertools.combinations(names, count):
            again = oracle_replays(block, kept)
            if all(block.ops[number].is_replayable for number in again):
                prices = [block.ops[number].flops for number in again]
                cost = sum(1 + 2 * known if price is None else price for price in prices)
                size = 3 + sum(value.num_bytes for value in block.values if value.name in kept)
                table[frozenset(kept)] = (size, cost)
    return table


def best(pairs, limit):
    return min((cost for size, cost in pairs if size <= limit), default=None)


@settings(max_examples=250, deadline=None)
@given(blocks())
def test_choices_equal_brute_force_at_every_budget(block):
    table = oracle_table(block)
    if not table:
        with pytest.raises(PolicyError, match="must not run again"):
            layer_choices(block, objective=FLOPS)
        return
    choices = layer_choices(block, objective=FLOPS)
    for choice in choices:
        assert table[frozenset(choice.saved)] == (choice.saved_bytes, choice.flops)
    found = [(choice.saved_bytes, choice.flops) for choice in choices]
    for limit in {size for size, _ in table.values()}:
        assert best(found, limit) == best(table.values(), limit)
        # Of equal costs, the fewest names, then the fewest bytes.
        cost = best(table.values(), limit)
        keys = [(len(kept), size) for kept, (size, c) in table.items() if size <= limit and c == cost]
        assert min((c.num_names, c.saved_bytes) for c in choices if c.saved_bytes <= limit and c.flops == cost) == min(keys)


@settings(max_examples=30, deadline=None)
@given(blocks())
def test_the_solver_finds_what_enumeration_finds(block):
    solved = solved_choices(block, objective=FLOPS, host=None, num_points=6)
    every = all_choices(block)
    assert bool(solved) == bool(every)
    if every:
        assert min(c.flops for c in solved) == min(c.flops for c in every)
        assert min(c.saved_bytes for c in solved) == min(c.saved_bytes for c in every)
        for choice in solved:  # each is optimal for its bytes
            assert choice.flops == best([(c.saved_bytes, c.flops) for c in every], choice.saved_bytes)


@settings(max_examples=20, deadline=None)
@given(blocks(max_names=3, max_ops=5), st.integers(0, 12))
def test_offload_stays_in_its_window_and_is_worth_what_saving_is(block, window):
    host = HostLink(window_bytes=window, min_bytes=2)
    table = oracle_table(block)
    for choice in all_choices(block, host=host):
        sizes = {name: block.name_bytes(name) for name in choice.offloaded}
        assert choice.host_bytes == sum(sizes.values()) <= window
        assert all(size >= 2 for size in sizes.values())
        kept = frozenset((*choice.saved, *choice.offloaded))
        assert (choice.saved_bytes + choice.host_bytes, choice.flops) == table[kept]
    solved = solved_choices(block, objective=FLOPS, host=host, num_points=4)
    every = [(c.saved_bytes, c.flops) for c in all_choices(block, host=host)]
    for choice in solved:
        assert choice.flops == best(every, choice.saved_bytes)


def block_llama():
    """Names of a Llama block in units of one token's width; one matmul of d x d is 1 FLOP."""
    return block_of(
        [
            ValueRow(name="norm", num_bytes=8, is_saveable=False),
            ValueRow(name="q", num_bytes=8, flops=8, seconds=8.0, needs=("norm",)),
            ValueRow(name="k", num_bytes=2, flops=2, seconds=2.0, needs=("norm",)),
            ValueRow(name="v", num_bytes=2, flops=2, seconds=2.0, needs=("norm",)),
            ValueRow(name="attn", num_bytes=8, flops=6, seconds=6.0, needs=("q", "k", "v")),
            ValueRow(name="attn_out", num_bytes=8, flops=8, seconds=8.0, needs=("attn",), is_read=False),
            ValueRow(name="mid", num_bytes=8, needs=("attn_out",), is_saveable=False),
            ValueRow(name="gate", num_bytes=32, flops=32, seconds=32.0, needs=("mid",)),
            ValueRow(name="up", num_bytes=32, flops=32, seconds=32.0, needs=("mid",)),
            ValueRow(name="act", num_bytes=32, needs=("gate", "up"), is_saveable=False),
            ValueRow(name="down", num_bytes=8, flops=32, seconds=32.0, needs=("act",), is_read=False),
        ],
        input_bytes=8,
    )


def choose(block, names) -> LayerChoice:
    return next(choice for choice in all_choices(block) if set(choice.saved) == set(names))


def test_policies_have_their_text():
    block = block_llama()
    assert str(choose(block, ()).policy) == "full"
    assert str(choose(block, ("q", "gate")).policy) == "save(q,gate)"
    host = HostLink(window_bytes=8, min_bytes=1)
    texts = {str(choice.policy) for choice in all_choices(block, host=host)}
    assert "save(k)+offload(q)" in texts


def test_dead_recompute_is_free():
    """The output of the block's last matmul is read by nobody in the backward pass, and so is all that only it needs."""
    block = block_llama()
    assert choose(block, ()).flops == 8 + 2 + 2 + 6 + 8 + 64
    assert choose(block, ("down",)).flops == choose(block, ()).flops
    assert not any("down" in choice.saved for choice in layer_choices(block, objective=FLOPS))


def test_a_large_block_is_solved():
    rows = [
        ValueRow(name=f"v{i}", num_bytes=3 + i % 5, flops=7 * (i % 4), needs=(f"v{i - 1}",) if i % 3 else ()) for i in range(24)
    ]
    choices = layer_choices(block_of(rows), objective=FLOPS)
    assert choices[0].saved == ()
    assert choices[-1].flops == 0
    assert [c.flops for c in choices] == sorted((c.flops for c in choices), reverse=True)


def test_kernels_that_nobody_named_are_kept_by_their_rule():
    values = (BlockValue(num_bytes=8, name="q", is_read=True), BlockValue(num_bytes=8, name="kernels", is_read=True))
    ops = (
        BlockOp(kind="dot", inputs=(), outputs=(0,), flops=10, seconds=1.0),
        BlockOp(kind="attention", inputs=(0,), outputs=(1,), flops=100, seconds=10.0),
    )
    block = BlockGraph(values=values, ops=ops, rule_names=("kernels",))
    host = HostLink(window_bytes=100, min_bytes=1)
    texts = {str(choice.policy) for choice in all_choices(block, host=host)}
    assert texts == {"full", "kernels", "save(q)", "offload(q)", "kernels+save(q)", "kernels+offload(q)"}
