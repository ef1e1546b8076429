"""`stack_module` against `nn.scan`: parameter tree, outputs, gradients, masks."""

import jax
import jax.numpy as jnp
import pytest
from apply_oracles import assert_close, assert_equal
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remat_kit.apply.linen_stack import stack_module
from remat_kit.errors import StepError
from tests.decoders import QUICK

L, B, D = 4, 2, 6
X = jax.random.normal(jax.random.key(1), (B, D))
BIAS = jnp.linspace(0, 1, D)
PLANS = ("none", "full", "full*1 | save(h)*2 | none*1")


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, bias, *, train):
        h = checkpoint_name(nn.Dense(self.width, name="up")(nn.LayerNorm()(x)), "h")
        h = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(h))
        return x + nn.Dense(x.shape[-1], name="down")(h) + bias


class Model(nn.Module):
    plan: str

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(D)(x)
        return stack_module(Block, num_layers=L, plan=self.plan)(10, name="layers")(x, BIAS, train=train)


class ScanModel(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(D)(x)
        scan = nn.scan(
            lambda block, x, _: (block(x, BIAS, train=train), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=L,
        )
        return scan(Block(10, name="layers"), x, None)[0]


@pytest.fixture(scope="module")
def params():
    return ScanModel().init(jax.random.key(0), X, False)["params"]


def gradients(model, params, *, train, seed=5):
    def loss(params):
        return (model.apply({"params": params}, X, train, rngs={"dropout": jax.random.key(seed)}) ** 2).sum()

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(params)


@pytest.mark.parametrize("plan", PLANS)
def test_same_as_scan(plan, params):
    assert_equal(Model(plan).init(jax.random.key(0), X, False)["params"], params)
    assert_close(gradients(Model(plan), params, train=False), gradients(ScanModel(), params, train=False))


def test_masks_are_the_same_whatever_the_plan(params):
    plain, *others = (gradients(Model(plan), params, train=True) for plan in PLANS)
    for other in others:
        assert_close(other, plain)
    assert float(plain[0]) != float(gradients(Model("none"), params, train=True, seed=6)[0])
    assert float(plain[0]) != float(gradients(Model("none"), params, train=False)[0])


def test_second_results_are_stacked():
    class Pair(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(D)(x)
            return y, y.mean()

    model = stack_module(Pair, num_layers=L, plan="full*2 | none*2")()
    y, variables = model.init_with_output(jax.random.key(0), X)
    assert y[1].shape == (L,)
    assert_close(model.apply(variables, X), y)


MANY = jax.random.normal(jax.random.key(1), (16, D))  # rows: statistics of two have no gradient but rounding


class Normed(nn.Module):
    """With batch statistics, and a sown value and a loss in each layer."""

    @nn.compact
    def __call__(self, x, *, train):
        y = nn.BatchNorm(use_running_average=not train)(nn.Dense(D)(x))
        self.sow("intermediates", "normed", y)
        self.sow("losses", "aux", (y**2).mean(), init_fn=lambda: 0.0, reduce_fn=lambda total, new: total + new)
        return x + jnp.tanh(checkpoint_name(y, "h"))


class ScannedNormed(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        axes = {"params": 0, "batch_stats": 0, "intermediates": 0, "losses": 0}
        scan = nn.scan(
            lambda block, x, _: (block(x, train=train), None), variable_axes=axes, split_rngs={"params": True}, length=L
        )
        return scan(nn.share_scope(self, block := Normed()) or block, x, None)[0]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_statistics_sown_values_and_losses(plan, train):
    def step(model, variables):
        def loss(params):
            mutable = ["batch_stats", "intermediates", "losses"] if train else ["losses"]
            y, kept = model.apply({**variables, "params": params}, MANY, train=train, mutable=mutable)
            return (y**2).sum() + kept["losses"]["aux"].sum(), kept

        return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)(variables["params"])

    model, scanned = stack_module(Normed, num_layers=L, plan=plan)(), ScannedNormed()
    variables = scanned.init(jax.random.key(0), MANY, train=True)
    assert_equal(model.init(jax.random.key(0), MANY, train=True), variables)
    kept = {name: variables[name] for name in ("params", "batch_stats")}
    (value, written), grads = step(model, kept)
    (plain_value, plain_written), plain_grads = step(scanned, kept)
    assert set(written) == ({"batch_stats", "intermediates", "losses"} if train else {"losses"})
    assert_close((value, grads), (plain_value, plain_grads))
    assert_close(written, plain_written)


@pytest.mark.parametrize("plan", ["none", "full*2 | none"])
def test_the_number_of_layers_is_the_stack_s_own(plan):
    layers = stack_module(nn.Dense, num_layers=4, plan=plan)(D)
    variables = stack_module(nn.Dense, num_layers=6, plan=plan)(D).init(jax.random.key(0), MANY)
    with pytest.raises(StepError, match="num_layers=4, and its variables are those of 6 layers"):
        layers.apply(variables, MANY)

    class Halved(nn.Module):
        def __call__(self, x):
            return x / 2

    assert_equal(stack_module(Halved, num_layers=3, plan=plan)().apply({}, MANY), MANY / 8)
