"""The loops that a plan becomes: every layer once, in order, whatever the plan and the grouping."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_kit.apply.segments import Groups, Loop, build_nodes, group_length, num_layers_of
from remat_kit.apply.stack import as_stack_plan
from remat_kit.errors import PolicyError


def layers(nodes, start=0):
    """First to last, as the loops run them."""
    for node in nodes:
        match node:
            case Loop():
                yield from range(start + node.start, start + node.start + node.num_layers)
            case Groups():
                for number in range(node.num_groups):
                    yield from layers(node.nodes, start + node.start + number * group_length(node))


def depth(nodes):
    return max((1 + depth(node.nodes) if isinstance(node, Groups) else 0) for node in nodes)


@given(num_layers=st.integers(1, 70), num_saved=st.integers(0, 9), data=st.data())
def test_every_layer_once(num_layers, num_saved, data):
    groups = st.sampled_from(["sqrt", "recursive"]) | st.integers(2, num_layers) if num_layers > 1 else st.none()
    group = data.draw(groups)
    text = f"full*{num_layers}" + f" | save(q)*{num_saved}" * (num_saved > 0)
    nodes = build_nodes(as_stack_plan(text).fit(num_layers + num_saved), group=group)
    assert list(layers(nodes)) == list(range(num_layers + num_saved))
    assert sum(num_layers_of(node) for node in nodes) == num_layers + num_saved


def test_groups():
    eight = as_stack_plan("full").fit(8)
    (groups,) = build_nodes(eight, group=4)
    assert isinstance(groups, Groups)
    assert (groups.num_groups, group_length(groups)) == (2, 4)
    assert [type(node) for node in build_nodes(eight, group=3)] == [Groups, Groups]
    assert [type(node) for node in build_nodes(as_stack_plan("full").fit(9), group=4)] == [Groups, Loop]
    assert [num_layers_of(node) for node in build_nodes(as_stack_plan("full").fit(23), group="sqrt")] == [20, 3]


@pytest.mark.parametrize(("num_layers", "levels"), [(2, 0), (4, 1), (16, 3), (100, 6), (1000, 9)])
def test_recursive_nesting_is_logarithmic(num_layers, levels):
    assert depth(build_nodes(as_stack_plan("full").fit(num_layers), group="recursive")) <= levels


def test_equal_neighbours_are_one_loop():
    (loop,) = build_nodes(as_stack_plan("full*2 | full*3").fit(5), group=None)
    assert num_layers_of(loop) == 5


def test_group_needs_full_layers():
    with pytest.raises(PolicyError, match="no two such layers"):
        build_nodes(as_stack_plan("save(q)*3 | full").fit(4), group=2)
