"""`NnxStack` against `nnx.scan`: state tree, outputs, gradients, masks, statistics."""

import functools

import jax
import jax.numpy as jnp
import pytest
from apply_oracles import assert_close, assert_equal
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit.apply.nnx_stack import NnxStack
from remat_kit.errors import ApplyError, PolicyError, StepError
from tests.decoders import QUICK

L, B, D = 4, 16, 6  # statistics of few rows have no gradient but rounding
X = jax.random.normal(jax.random.key(1), (B, D))
BIAS = jnp.linspace(0, 1, D)
PLANS = ("none", "full", "full*1 | save(h)*2 | none*1")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 10, rngs=rngs), nnx.Linear(10, D, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, bias, *, train):
        h = checkpoint_name(self.up(self.norm(x, use_running_average=not train)), "h")
        return x + self.down(self.drop(jnp.tanh(h), deterministic=not train)) + bias


def scanned(layers, x, train):
    run = nnx.scan(lambda x, layer: layer(x, BIAS, train=train), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return run(x, layers)


def make(plan, block=Block):
    return NnxStack(block, num_layers=L, plan=plan, rngs=nnx.Rngs(0, dropout=1))


def bits(model):
    """The state, random keys as numbers."""
    keys = jax.dtypes.prng_key
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, keys) else leaf, nnx.state(model))


def two_steps(run, layers, train):
    @functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
    def compiled(graph, state):
        layers = nnx.merge(graph, state)
        result = nnx.value_and_grad(lambda layers: (run(layers) ** 2).sum())(layers)
        return result, nnx.state(layers)

    def step(layers):
        result, state = compiled(*nnx.split(layers))
        nnx.update(layers, state)
        return result

    results = [step(layers), step(layers)]
    assert (float(results[0][0]) != float(results[1][0])) == train  # other masks in each step
    return results, nnx.state(layers, nnx.BatchStat)


def of_stack(plan, train):
    model = make(plan)
    (results, stats) = two_steps(lambda model: model(X, BIAS, train=train), model, train)
    return [(value, grads["layers"]) for value, grads in results], stats["layers"]


@pytest.mark.parametrize("train", [False, True])
def test_same_as_scan_with_masks_and_statistics(train):
    wanted = two_steps(lambda layers: scanned(layers, X, train), make("none").layers, train)
    for plan in PLANS:
        assert_close(of_stack(plan, train), wanted)


def test_one_state_tree_whatever_the_plan():
    states = [bits(make(plan)) for plan in PLANS]
    assert all(leaf.shape[0] == L for leaf in jax.tree.leaves(states[0]))
    for state in states[1:]:
        assert_equal(state, states[0])
    kernel = states[0]["layers"]["up"]["kernel"][...]
    assert float(jnp.abs(kernel[0] - kernel[1]).max()) > 0.1  # every layer has parameters of its own


def test_second_results_are_stacked():
    class Pair(nnx.Linear):
        def __call__(self, x):
            y = super().__call__(x)
            return y, y.mean()

    found = [make(plan, lambda rngs: Pair(D, D, rngs=rngs))(X) for plan in ("none", "full*2 | none*2")]
    assert found[0][1].shape == (L,)
    assert_close(found[1], found[0])


def test_a_model_that_a_trace_closes_over():
    model = make("full*2 | none*2")
    grad = jax.grad(lambda x: (model(x, BIAS, train=False) ** 2).sum())(X)
    assert_close(grad, jax.grad(lambda x: (make("none")(x, BIAS, train=False) ** 2).sum())(X))


def test_variables_that_a_call_adds_are_refused():
    class Sows(nnx.Linear):
        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return super().__call__(x)

    with pytest.raises(ApplyError, match=r"Sows adds the variable 'seen' when it is called.*return the value as a second"):
        make("full", lambda rngs: Sows(D, D, rngs=rngs))(X)


def test_what_does_not_fit():
    with pytest.raises(PolicyError, match="3 layers, the stack has 4"):
        make("full*3")
    with pytest.raises(StepError, match="at least 1 layer"):
        NnxStack(Block, num_layers=0, plan="full", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("plan", ["none", "full*2 | none"])
def test_the_number_of_layers_is_the_stack_s_own(plan):
    deep, layers = (NnxStack(lambda rngs: nnx.Linear(D, D, rngs=rngs), num_layers=n, plan=plan, rngs=nnx.Rngs(0)) for n in (6, 4))
    nnx.update(layers, nnx.state(deep))
    with pytest.raises(StepError, match="num_layers=4, and its variables are those of 6 layers"):
        layers(X)

    class Halved(nnx.Module):
        def __call__(self, x):
            return x / 2

    assert_equal(NnxStack(lambda rngs: Halved(), num_layers=3, plan=plan, rngs=nnx.Rngs(0))(X), X / 8)
