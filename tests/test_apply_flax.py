"""`remat` on Flax modules that hold more than parameters: names, batch statistics, dropout, sown values, setup, other methods."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from apply_oracles import assert_close, assert_equal, num_regions, residual_names
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit.apply.function import remat
from remat_kit.errors import ApplyError

X = jax.random.normal(jax.random.key(0), (4, 8))
KEYS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
KEEP = ["batch_stats", "intermediates", "losses"]


class Blk(nn.Module):
    @nn.compact
    def __call__(self, x, *, train=False):
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
        self.sow("intermediates", "normed", y)
        self.sow("losses", "aux", (y**2).mean())
        y = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(y))
        return x + nn.Dense(8)(y)


class WithSetup(nn.Module):
    wrap: Callable[..., Any]

    def setup(self):
        self.first = self.wrap(Blk())
        self.then = nn.Dense(8)

    def __call__(self, x, train):
        return self.then(self.first(x, train=train))


class Net(nn.Module):
    """Auto-named blocks, one in a loop of the model's own and one behind `setup`."""

    wrap: Callable[..., Any]

    @nn.compact
    def __call__(self, x, train):
        for _ in range(2):
            x = self.wrap(Blk)()(x, train=train)
        return WithSetup(self.wrap)(x, train)


def as_is(target):
    return target


def wrapped(target):
    return remat(target, "full", static_argnames="train")


def linen_step(net, variables, keys):
    def loss(params):
        y, kept = net.apply({**variables, "params": params}, X, True, rngs=keys, mutable=KEEP)
        return (y**2).mean() + sum(jax.tree.leaves(kept["losses"])), kept

    (value, kept), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables["params"])
    return (value, kept), grads


@pytest.fixture(scope="module")
def variables():
    made = Net(as_is).init(KEYS, X, True)
    return {"params": made["params"], "batch_stats": made["batch_stats"]}


def test_linen_parameters_have_the_same_names_and_values(variables):
    # maxtext#4504: Blk_0 became CheckpointBlk_0, and a checkpoint could not be restored.
    again = Net(wrapped).init(KEYS, X, True)
    assert sorted(again["params"]) == ["Blk_0", "Blk_1", "WithSetup_0"]
    assert_equal({name: again[name] for name in variables}, variables)


def test_linen_statistics_dropout_and_sown_values_are_those_without_remat(variables):
    keys = {"dropout": jax.random.key(3)}
    (value, kept), grads = linen_step(Net(as_is), variables, keys)
    (got_value, got_kept), got_grads = linen_step(Net(wrapped), variables, keys)
    assert_close({"value": got_value, "kept": got_kept}, {"value": value, "kept": kept})
    assert_close(got_grads, grads)
    (other, _), _ = linen_step(Net(wrapped), variables, {"dropout": jax.random.key(4)})
    assert abs(float(other - value)) > 1e-3  # other masks show


def test_a_wrapped_linen_instance_is_a_copy_with_the_same_variables(variables):
    net = Net(as_is)
    whole = remat(net, "full")
    assert (type(net), type(whole).__name__) == (Net, "Net")
    run = lambda net: net.apply(variables, X, False)  # noqa: E731
    assert_equal(run(whole), run(net))
    assert (num_regions(lambda: run(whole)), num_regions(lambda: run(net))) == (1, 0)


def test_linen_batch_norm_takes_a_keyword_flag():
    # flax#1455: nn.remat(BatchNorm)()(x, use_running_average=False) turned the flag into a tracer.
    norm = remat(nn.BatchNorm, "full")()
    made = norm.init(KEYS, X, use_running_average=False)
    y, kept = norm.apply(made, X, use_running_average=False, mutable=["batch_stats"])
    plain, plain_kept = nn.BatchNorm().apply(made, X, use_running_average=False, mutable=["batch_stats"])
    assert_equal((y, kept), (plain, plain_kept))


def test_a_linen_function_may_make_submodules():
    class Model(nn.Module):
        wrap: Callable[..., Any]

        @nn.compact
        def __call__(self, x):
            return self.wrap(lambda module, x, *, width: nn.Dense(width, parent=module)(jnp.tanh(x)))(self, x, width=3)

    plain, lifted = Model(as_is), Model(functools.partial(remat, policy="full"))
    variables = plain.init(KEYS, X)
    assert_equal(lifted.init(KEYS, X), variables)
    assert_equal(lifted.apply(variables, X), plain.apply(variables, X))
    assert num_regions(lambda: lifted.apply(variables, X)) == 1


def test_a_linen_module_may_come_as_any_argument():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            first, second = nn.Dense(16, name="first"), nn.Dense(8, name="second")
            return remat(lambda x, modules: modules["second"](jnp.tanh(modules["first"](x))), "full")(
                x, {"first": first, "second": second}
            )

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="second")(jnp.tanh(nn.Dense(16, name="first")(x)))

    variables = Plain().init(KEYS, X)
    assert_equal(Model().init(KEYS, X), variables)
    assert_equal(Model().apply(variables, X), Plain().apply(variables, X))


def test_static_arguments_of_a_linen_class_are_checked():
    with pytest.raises(ApplyError, match=r"takes .*'train'.*Did you mean 'train'"):
        remat(Blk, "full", static_argnames="trian")


@pytest.mark.parametrize("unroll", [1, 3])
def test_linen_scan_over_a_wrapped_block(unroll):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8)(jnp.tanh(checkpoint_name(nn.Dense(16)(x), "up"))), None

    def stack(layer):
        return nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3, unroll=unroll)(name="layers")

    plain, saving = stack(Layer), stack(remat(Layer, "save(up)", prevent_cse=unroll > 1))
    variables = plain.init(KEYS, X, None)
    assert_equal(saving.init(KEYS, X, None), variables)
    loss = lambda net: lambda variables: (net.apply(variables, X, None)[0] ** 2).mean()  # noqa: E731
    assert_close(jax.jit(jax.grad(loss(saving)))(variables), jax.jit(jax.grad(loss(plain)))(variables))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x, *, train=False):
        y = self.norm(self.up(x), use_running_average=not train)
        if hasattr(self, "__captures__"):
            self.sow(nnx.Intermediate, "normed", y)
        return x + self.down(self.drop(jnp.tanh(y), deterministic=not train))


class Stack(nnx.Module):
    def __init__(self, wrap):
        rngs = nnx.Rngs(0, dropout=1)
        self.blocks = nnx.List([wrap(Block(rngs)) for _ in range(2)])

    def __call__(self, x, train):
        for block in self.blocks:
            x = block(x, train=train)
        return x


def bits(tree):
    """Random keys as numbers."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, tree)


def nnx_steps(wrap):
    model = Stack(wrap)

    @nnx.jit
    def step(model, x):
        return nnx.value_and_grad(lambda model: (model(x, True) ** 2).mean())(model)

    results = [step(model, X), step(model, X)]
    assert float(results[0][0]) != float(results[1][0])  # another mask each time
    return results, bits(nnx.state(model))


def test_nnx_statistics_dropout_and_counters_are_those_without_remat():
    call = Block.__call__
    wanted, state = nnx_steps(as_is)
    got, got_state = nnx_steps(lambda block: remat(block, "full"))
    assert jax.tree.structure(got_state) == jax.tree.structure(state)
    assert_close(got, wanted)
    for one, other in zip(jax.tree.leaves(got_state), jax.tree.leaves(state), strict=True):
        assert_close(one.astype(jnp.float32), other.astype(jnp.float32))
    assert Block.__call__ is call


def test_nnx_wrapping_leaves_other_instances_alone():
    # flax#4626: a model built with nnx.remat spoiled a second one of the same class.
    first, second = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    before = second(X)
    wrapped_first = remat(first, "full")
    assert_equal(second(X), before)
    assert (type(first), type(second), type(wrapped_first).__name__) == (Block, Block, "Block")
    assert wrapped_first.up.kernel is first.up.kernel
    assert num_regions(lambda x: wrapped_first(x), X) == 1
    assert num_regions(lambda x: first(x), X) == num_regions(lambda x: second(x), X) == 0


def test_nnx_sown_values_are_captured():
    def captured(wrap):
        return nnx.capture(Stack(wrap), nnx.Intermediate)(X, False)

    (y, sown), (got, got_sown) = captured(as_is), captured(lambda block: remat(block, "full"))
    assert_close(got, y)
    assert len(jax.tree.leaves(sown)) == 2
    assert_close(jax.tree.leaves(got_sown), jax.tree.leaves(sown))


def test_nnx_variables_that_a_call_adds_stay():
    class Counts(nnx.Module):
        def __call__(self, x):
            if not hasattr(self, "calls"):
                self.calls = nnx.Cache(jnp.zeros(()))
            self.calls[...] += 1
            return jnp.sin(x)

    module = remat(Counts(), "full")
    for _ in range(2):
        module(X)
    assert float(module.calls[...]) == 2


def test_nnx_methods_take_keyword_only_arguments_and_random_streams():
    # flax 0.12.8: nnx.remat of a method with a keyword-only argument raises TypeError.
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(8, 8, rngs=rngs)

        @functools.partial(remat, policy="full")
        def noisy(self, x, *, rngs, double):
            y = self.up(x) + jax.random.normal(rngs.dropout(), x.shape)
            return y * 2 if double else y

    module, rngs = Noisy(nnx.Rngs(0)), nnx.Rngs(dropout=1)
    first, second = (module.noisy(X, rngs=rngs, double=True) for _ in range(2))
    assert_equal(rngs.dropout.count[...], jnp.uint32(2))
    stream = nnx.Rngs(dropout=1)
    for got in (first, second):
        assert_close(got, (module.up(X) + jax.random.normal(stream.dropout(), X.shape)) * 2)


def test_a_closed_over_nnx_model_can_be_differentiated_by_its_input():
    module = remat(Block(nnx.Rngs(0)), "full")
    plain = Block(nnx.Rngs(0))
    grad = jax.grad(lambda x: (module(x) ** 2).sum())(X)
    assert_close(grad, jax.grad(lambda x: (plain(x) ** 2).sum())(X))


def test_nnx_scan_over_a_wrapped_block():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(checkpoint_name(self.up(x), "up")))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Layer(rngs)

    layers = make(nnx.Rngs(0))
    scanned = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    loss = lambda layers: (scanned(X, layers) ** 2).mean()  # noqa: E731
    grads = [nnx.jit(nnx.grad(loss))(module) for module in (layers, remat(layers, "full"), remat(layers, "save(up)"))]
    assert_close(grads[1], grads[0])
    assert_equal(grads[2], grads[1])


def test_the_names_a_linen_method_saves_are_in_the_residuals():
    class Model(nn.Module):
        def setup(self):
            self.up, self.down = nn.Dense(16), nn.Dense(8)

        @functools.partial(remat, policy="save(up)")
        def mlp(self, x):
            return self.down(jnp.tanh(checkpoint_name(self.up(x), "up")))

        def __call__(self, x):
            return x + self.mlp(x)

    model: Any = Model()
    variables = model.init(KEYS, X)
    assert sorted(variables["params"]) == ["down", "up"]
    assert residual_names(lambda variables: jnp.square(model.apply(variables, X)).sum(), variables) == ["up"]


@pytest.mark.parametrize(
    "decorate",
    [lambda fn: remat(nn.compact(fn), "save(up)"), lambda fn: nn.compact(remat(fn, "save(up)"))],
    ids=["remat above nn.compact", "nn.compact above remat"],
)
def test_compact_linen_methods_are_decorated_in_either_order(decorate):
    class Model(nn.Module):
        @decorate
        def __call__(self, x):
            return jnp.tanh(checkpoint_name(nn.Dense(16)(x), "up"))

    model: Any = Model()
    variables = model.init(KEYS, X)
    assert sorted(variables["params"]) == ["Dense_0"]
    assert residual_names(lambda variables: jnp.square(model.apply(variables, X)).sum(), variables) == ["up"]
