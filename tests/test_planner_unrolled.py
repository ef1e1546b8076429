"""Layers that are modules one after the other: blocks by path against what JAX traces, kinds of layers, plans as patterns."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from remat_kit.apply.paths import PathRule, rematerialize
from remat_kit.errors import PolicyError, StepError
from remat_kit.grammar import parse_plan
from remat_kit.planner.body import Rates
from remat_kit.planner.choices import all_choices
from remat_kit.planner.unrolled import layer_paths, unrolled_stacks, wraps_of
from remat_kit.trace import graph_of, summarise

D, F, L = 16, 32, 4
RATES = Rates(flops_per_s=1e12, bytes_per_s=1e12)


class Layer(nn.Module):
    """A residual MLP without a single name; `wide` makes another kind of it."""

    wide: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(name="norm")(x)
        y = nn.Dense(F * self.wide, name="up")(y)
        return x + nn.Dense(D, name="down")(jnp.sin(y) * jax.nn.sigmoid(y))


class Model(nn.Module):
    """An embedding, layers one after the other, an output."""

    wides: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(D, name="embed")(x)
        for number, wide in enumerate(self.wides):
            x = Layer(wide, name=f"h{number}")(x)
        return nn.Dense(3, name="out")(x)


def traced(policies, wides=(1,) * L, transform=jax.grad):
    model, x = Model(wides), jax.ShapeDtypeStruct((8, D), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    run = rematerialize(policies)(transform(lambda params, x: (model.apply(params, x) ** 2).mean()))
    return graph_of(jax.jit(run).trace(params, x), (params, x))


def stacks_of(graph, pattern="h*"):
    return unrolled_stacks(graph, pattern=pattern, is_match=PathRule(pattern=pattern, policy=None).matches, rates=RATES)


@functools.cache
def plain():
    return traced({"h*": "none"})


def test_layers_are_found_and_their_values_go_by_the_paths_of_their_modules():
    (stack,) = stacks_of(plain())
    assert (stack.name, stack.paths, stack.layer.calls) == ("h*", ("h0", "h1", "h2", "h3"), L)
    assert stack.layer.block.names == ("*/norm", "*/up")  # the backward pass does not need the last matmul
    assert stack.layer.block.input_bytes == 4 * 8 * D
    assert stack.layer.block.name_bytes("*/up") == 4 * 8 * F


@pytest.mark.parametrize("kept", [(), ("*/norm",), ("*/up",), ("*/norm", "*/up")])
def test_recompute_flops_are_those_that_jax_traces(kept):
    (stack,) = stacks_of(plain())
    found = {frozenset(choice.saved): choice.flops for choice in all_choices(stack.layer.block)}[frozenset(kept)]
    policy = f"save({','.join(kept)})" if kept else "full"
    assert found * L == summarise(traced({"h*": policy})).remat_flops
    if "*/up" not in kept:
        assert found == 2 * 8 * D * F


def test_layers_of_two_kinds_are_two_stacks():
    first, second = stacks_of(traced({"h*": "none"}, wides=(1, 2, 1, 2)))
    assert (first.paths, second.paths) == (("h0", "h2"), ("h1", "h3"))
    assert first.name != second.name
    assert second.layer.block.name_bytes("*/up") == 2 * first.layer.block.name_bytes("*/up")
    assert max(c.flops for c in all_choices(second.layer.block)) == 2 * max(c.flops for c in all_choices(first.layer.block))


def test_the_outermost_of_nested_modules_is_the_layer():
    assert layer_paths(plain(), lambda path: path in ("h1", "h1/up", "out")) == ("h1", "out")


def test_nnx_layers_are_found_by_their_paths():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.sin(self.up(x)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Block(rngs) for _ in range(3)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    graphdef, state = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def loss(state, x):
        model = nnx.merge(graphdef, state)
        with rematerialize({"layers/*": "none"}, model):
            return (model(x) ** 2).mean()

    x = jax.ShapeDtypeStruct((8, D), jnp.float32)
    graph = graph_of(jax.jit(jax.grad(loss)).trace(state, x), (x,))
    (stack,) = stacks_of(graph, "layers/*")
    assert stack.paths == ("layers/0", "layers/1", "layers/2")
    assert stack.layer.block.names == ("*/up",)


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(StepError, match=r"module pattern 'layer\*' matches no module of the step"):
        stacks_of(plain(), "layer*")
    with pytest.raises(StepError, match="keep nothing for the backward pass"):
        stacks_of(traced({"h*": "none"}, transform=lambda loss: loss))


LAYERS = {"h*": ("h0", "h1", "h2", "h3")}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("full", (("h*", "full"),)),
        ("save(*/up)*4", (("h*", "save(*/up)"),)),
        ("full*3 | save(*/up)*1", (("h*", "full"), ("h3", "save(*/up)"))),
        ("full*1 | save(*/up)", (("h*", "full"), ("h1", "save(*/up)"), ("h2", "save(*/up)"), ("h3", "save(*/up)"))),
    ],
)
def test_plans_become_patterns_and_single_layers_where_they_differ(plan, expected):
    assert wraps_of(parse_plan(plan), LAYERS) == expected


def test_a_plan_as_patterns_keeps_what_it_says():
    plan = parse_plan("full*3 | save(*/up)*1")
    mixed, uniform = (summarise(traced(policies)) for policies in (dict(wraps_of(plan, LAYERS)), {"h*": "full"}))
    assert mixed.remat_flops == uniform.remat_flops * 3 // L
    assert mixed.num_remat_regions == L


def test_kinds_of_layers_are_spelled_by_their_own_paths():
    layers = {"h* 1": ("h0", "h2"), "h* 2": ("h1", "h3")}
    plan = parse_plan('"h* 1"=full; "h* 2"=full*1 | save(*/up)*1')
    assert wraps_of(plan, layers) == (("h0", "full"), ("h2", "full"), ("h1", "full"), ("h3", "save(*/up)"))
    with pytest.raises(PolicyError, match="speaks of 3 layers"):
        wraps_of(parse_plan("full*3"), layers)
