"""Layer counts against brute force: one stack and several, two and three segments, ties, exactness in bytes."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remat_kit.planner.mixture import Room, fill, smallest
from remat_kit.planner.mixture_milp import solve_counts
from remat_kit.planner.options import StackOptions, filled

GiB = 2**30


def stack(num_layers, rows, *, max_segments=2, min_layers=1):
    """Rows of (bytes, working bytes, cost, names)."""
    size, working, cost, names = zip(*rows, strict=True)
    return StackOptions(
        num_layers=num_layers,
        layer_bytes=size,
        working_bytes=working,
        costs=tuple(float(item) for item in cost),
        num_names=names,
        max_segments=max_segments,
        min_layers=min_layers,
    )


def every_count(options):
    """All ways to spread the layers of one stack, written without the planner's code."""
    numbers = range(len(options.costs))
    for used in range(1, options.max_segments + 1):
        for chosen in itertools.combinations(numbers, used):
            for cuts in itertools.combinations(range(1, options.num_layers), used - 1):
                edges = (0, *cuts, options.num_layers)
                layers = [end - start for start, end in itertools.pairwise(edges)]
                if used == 1 or min(layers) >= options.min_layers:
                    yield tuple(zip(chosen, layers, strict=True))


def brute_force(stacks, room):
    """(cost, names, bytes) of the best, None when nothing fits."""
    found = []
    for counts in itertools.product(*(every_count(options) for options in stacks)):
        pairs = [(options, option, layers) for options, part in zip(stacks, counts, strict=True) for option, layers in part]
        kept = sum(options.layer_bytes[option] * layers for options, option, layers in pairs)
        working = max(room.working_floor_bytes, *(options.working_bytes[option] for options, option, _ in pairs))
        if room.fixed_bytes + kept + working <= room.budget_bytes:
            cost = sum(options.costs[option] * layers for options, option, layers in pairs)
            found.append((cost, sum(options.num_names[option] for options, option, _ in pairs), kept))
    return min(found, default=None)


def key_of(stacks, answer):
    if answer is None:
        return None
    pairs = [(options, option) for options, part in zip(stacks, answer.counts, strict=True) for option, _ in part]
    return (answer.cost, sum(options.num_names[option] for options, option in pairs), answer.kept_bytes)


def check(stacks, room):
    answer, expected = fill(stacks, room), brute_force(stacks, room)
    assert (answer is None) == (expected is None)
    if answer is not None and expected is not None:
        assert answer.total_bytes <= room.budget_bytes
        assert key_of(stacks, answer) == pytest.approx(expected)
        for options, part in zip(stacks, answer.counts, strict=True):
            assert sum(layers for _, layers in part) == options.num_layers
            assert [options.layer_bytes[option] for option, _ in part] == sorted(
                options.layer_bytes[option] for option, _ in part
            )


ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 15), st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=5)
ROOMS = st.builds(
    lambda budget, fixed, floor: Room(budget_bytes=budget, fixed_bytes=fixed, working_floor_bytes=floor),
    st.integers(1, 260),
    st.integers(0, 20),
    st.integers(0, 10),
)


@settings(max_examples=250, deadline=None)
@given(ROWS, st.integers(1, 12), st.integers(1, 2), st.integers(1, 3), ROOMS)
def test_one_stack_equals_brute_force(rows, num_layers, max_segments, min_layers, room):
    check([stack(num_layers, rows, max_segments=max_segments, min_layers=min_layers)], room)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(2, 12), st.integers(1, 2), st.integers(0, 20), ROOMS)
def test_a_last_layer_alone_equals_brute_force(rows, num_layers, min_layers, spared, room):
    """The last layer may follow a policy of its own, above two others, and keeps fewer bytes then."""
    plain = stack(num_layers, rows, min_layers=min_layers)
    alone = dataclasses.replace(plain, last_bytes=tuple(max(0, size - spared) for size in plain.layer_bytes))
    found = [] if (best := brute_force([plain], room)) is None else [best[0]]
    for last, left in itertools.product(range(len(rows)), every_count(dataclasses.replace(plain, num_layers=num_layers - 1))):
        if max(plain.layer_bytes[option] for option, _ in left) < plain.layer_bytes[last]:
            kept = sum(plain.layer_bytes[option] * layers for option, layers in left) + alone.last_bytes[last]
            working = max(room.working_floor_bytes, *(plain.working_bytes[option] for option, _ in (*left, (last, 1))))
            if room.fixed_bytes + kept + working <= room.budget_bytes:
                found.append(sum(plain.costs[option] * layers for option, layers in (*left, (last, 1))))
    answer = fill([alone], room)
    assert (None if answer is None else answer.cost) == min(found, default=None)
    assert answer is None or answer.total_bytes <= room.budget_bytes


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 8), st.integers(1, 2), ROOMS)
def test_three_segments_equal_brute_force(rows, num_layers, min_layers, room):
    check([stack(num_layers, rows, max_segments=3, min_layers=min_layers)], room)


@settings(max_examples=40, deadline=None)
@given(ROWS, ROWS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), ROOMS)
def test_two_different_stacks_equal_brute_force(first, second, num_first, num_second, min_layers, room):
    check([stack(num_first, first[:3], min_layers=min_layers), stack(num_second, second[:3])], room)
    check([stack(num_first, first[:3], max_segments=3), stack(num_second, second[:3], max_segments=1)], room)


@settings(max_examples=40, deadline=None)
@given(st.lists(ROWS, min_size=3, max_size=3), ROOMS)
def test_blocks_that_all_differ_equal_brute_force(rows, room):
    check([stack(1 + number % 2, part[:3]) for number, part in enumerate(rows)], room)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 12), ROOMS)
def test_the_smallest_mixture_is_the_smallest(rows, num_layers, room):
    options = stack(num_layers, rows)
    totals = [
        filled([options], (counts,), fixed_bytes=room.fixed_bytes, working_floor_bytes=room.working_floor_bytes).total_bytes
        for counts in every_count(options)
    ]
    assert smallest([options], room).total_bytes == min(totals)


def test_formula_and_solver_agree_at_real_sizes():
    rows = [(GiB // 16 * i + 12345 * i, GiB // 3 - GiB // 60 * i, 3.7e12 * (14 - i) ** 1.5, i) for i in range(15)]
    options = stack(32, rows)
    for budget in (5 * GiB, 11 * GiB + 1, 20 * GiB + 12345, 31 * GiB):
        formula = fill([options], Room(budget_bytes=budget))
        counts = solve_counts([options], budget_bytes=budget, working_floor_bytes=0)
        assert formula is not None
        assert counts is not None
        solved = filled([options], counts, fixed_bytes=0, working_floor_bytes=0)
        assert solved.total_bytes <= budget
        assert solved.cost == pytest.approx(formula.cost, rel=1e-9)


def test_two_segments_come_close_to_unlimited_ones_and_one_does_not():
    rows = [(0, 0, 100, 0), (3, 0, 60, 1), (7, 0, 20, 2), (12, 0, 0, 3)]
    room = Room(budget_bytes=100)
    one, two, many = (fill([stack(12, rows, max_segments=k)], room) for k in (1, 2, 4))
    assert one is not None
    assert two is not None
    assert many is not None
    assert many.cost <= two.cost <= 1.1 * many.cost
    assert one.cost > 1.2 * two.cost


def test_the_working_set_of_a_policy_counts_only_when_it_is_used():
    rows = [(1, 50, 9, 0), (10, 0, 0, 1)]
    answer = fill([stack(4, rows)], Room(budget_bytes=45))
    assert answer is not None
    assert answer.counts == (((1, 4),),)
    assert answer.total_bytes == 40
    assert fill([stack(4, rows)], Room(budget_bytes=39)) is None
