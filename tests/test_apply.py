"""`remat` on everything it takes: every way applies the policy (what it means is in `test_policy_table.py`); functions alone."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from apply_oracles import assert_close, assert_equal, num_barriers, num_matmuls, num_regions, residual_names
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import remat_kit
from remat_kit.apply.function import remat
from remat_kit.apply.paths import rematerialize
from remat_kit.errors import ApplyError, PolicyError, RematWarning

X = jax.random.normal(jax.random.key(0), (4, 8))
PARAMS = {
    "up": jax.random.normal(jax.random.key(1), (8, 16)) / 3,
    "down": jax.random.normal(jax.random.key(2), (16, 8)) / 4,
}

# (policy, names that are saved, matmuls that are run again); by hand: the block is x + tanh(name(x @ up)) @ down.
TABLE = [
    ("full", [], 1),
    ("save(up)", ["up"], 0),
]


def block(params, x):
    up = checkpoint_name(x @ params["up"], "up")
    return x + jnp.tanh(up) @ params["down"]


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = checkpoint_name(nn.Dense(16, use_bias=False, name="up")(x), "up")
        return x + nn.Dense(8, use_bias=False, name="down")(jnp.tanh(up))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(16, 8, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(checkpoint_name(self.up(x), "up")))


def in_linen(make: Callable[[], Any]) -> Callable[..., Any]:
    """A function of parameters and x that runs what `make` gives inside a Linen module."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return make()(x)

    def run(params, x):
        tree = {"params": {"block": {name: {"kernel": kernel} for name, kernel in params.items()}}}
        return Model().apply(tree, x)

    return run


def in_nnx(wrap: Callable[[NnxBlock], Any]) -> Callable[..., Any]:
    def run(params, x):
        module = NnxBlock(nnx.Rngs(0))
        module.up.kernel[...], module.down.kernel[...] = params["up"], params["down"]
        return wrap(module)(x)

    return run


def linen_method(policy: str) -> type[nn.Module]:
    class Block(LinenBlock):
        __call__ = remat(LinenBlock.__call__, policy)

    return Block


def nnx_class(module: NnxBlock, policy: str) -> Any:
    wrapped = remat(NnxBlock, policy)(nnx.Rngs(0))
    nnx.update(wrapped, nnx.state(module))
    return wrapped


def nnx_by_path(module: NnxBlock, policy: str) -> Callable[..., Any]:
    holder = nnx.Dict(block=module)
    model = NnxModel(holder)

    def run(x):
        with rematerialize({"holder/block": policy}, model):
            return model(x)

    return run


class NnxModel(nnx.Module):
    def __init__(self, holder):
        self.holder = holder

    def __call__(self, x):
        return self.holder["block"](x)


@dataclass(frozen=True)
class Way:
    name: str
    apply: Callable[[str], Callable[..., Any]]

    def __str__(self) -> str:
        return self.name


WAYS = [
    Way("function", lambda policy: remat(block, policy)),
    Way("linen class", lambda policy: in_linen(lambda: remat(LinenBlock, policy)(name="block"))),
    Way("linen instance in a parent", lambda policy: in_linen(lambda: remat(LinenBlock(name="block"), policy))),
    Way("linen method", lambda policy: in_linen(lambda: linen_method(policy)(name="block"))),
    Way("linen bound method", lambda policy: in_linen(lambda: remat(LinenBlock(name="block").__call__, policy))),
    Way("linen partial", lambda policy: in_linen(remat(functools.partial(LinenBlock, name="block"), policy))),
    Way("linen by path", lambda policy: rematerialize({"block": policy})(in_linen(lambda: LinenBlock(name="block")))),
    Way("nnx instance", lambda policy: in_nnx(lambda module: remat(module, policy))),
    Way("nnx class", lambda policy: in_nnx(lambda module: nnx_class(module, policy))),
    Way("nnx bound method", lambda policy: in_nnx(lambda module: remat(module.__call__, policy))),
    Way("nnx function", lambda policy: in_nnx(lambda module: lambda x: remat(lambda m, x: m(x), policy)(module, x))),
    Way("nnx by path", lambda policy: in_nnx(lambda module: nnx_by_path(module, policy))),
]


def loss(run):
    return lambda params, x: (run(params, x) ** 2).sum()


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("policy", "names", "extra_matmuls"), TABLE, ids=[row[0] for row in TABLE])
def test_saved_names_and_recomputed_matmuls_are_those_of_the_table(way, policy, names, extra_matmuls):
    run = loss(way.apply(policy))
    grad = jax.grad(run)
    by_path = "by path" in way.name  # names modules by their path as well
    assert [name for name in residual_names(run, PARAMS, X) if not (by_path and "/" in name)] == names
    assert num_matmuls(grad, PARAMS, X) == num_matmuls(jax.grad(loss(block)), PARAMS, X) + extra_matmuls
    assert num_regions(grad, PARAMS, X) == 1


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_results_and_gradients_are_those_without_remat(way):
    wanted = jax.jit(jax.value_and_grad(loss(block)))(PARAMS, X)
    full, saving = (jax.jit(jax.value_and_grad(loss(way.apply(policy))))(PARAMS, X) for policy in ("full", "save(up)"))
    assert_close(full, wanted)
    assert_equal(saving, full)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_evaluation_has_no_barrier_and_training_has(way):
    # jax#6098, #7100: evaluation paid for barriers.
    run = loss(way.apply("full"))
    assert num_barriers(run, PARAMS, X) == 0
    assert num_barriers(jax.grad(run), PARAMS, X) > 0


def test_full_is_a_region_that_keeps_nothing_and_none_is_no_region():
    # maxtext#4288: "full" was told apart from "none" by None, and got lost.
    assert remat(block, "none") is block
    assert num_regions(remat(block, remat_kit.parse_policy("full")), PARAMS, X) == 1


@pytest.mark.parametrize("static", [{}, {"static_argnames": "double"}, {"static_argnums": 2}], ids=str)
def test_flags_stay_python_values_by_position_and_by_keyword(static):
    @functools.partial(remat, policy="full", **static)
    def scaled(x, w, double=False, *, act="tanh"):
        y = getattr(jnp, act)(x @ w)
        return y * 2 if double else y

    want = jnp.sin(X @ PARAMS["up"]) * 2
    assert_equal(scaled(X, PARAMS["up"], True, act="sin"), want)
    assert_equal(scaled(X, PARAMS["up"], double=True, act="sin"), want)
    assert num_barriers(jax.grad(lambda x: scaled(x, PARAMS["up"], True, act="sin").sum()), X) > 0


def test_named_arguments_stay_as_they_are_though_they_are_arrays():
    def take(x, table):
        return x * sum(table.tolist())

    table = jax.numpy.arange(4)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        remat(take, "full")(X, table)
    ways: tuple[dict[str, Any], ...] = ({"static_argnames": ("table",)}, {"static_argnums": (1,)}, {"static_argnums": -1})
    for static in ways:
        assert_equal(remat(take, "full", **static)(X, table), X * 6)
        assert_equal(remat(take, "full", **static)(X, table=table), X * 6)


def test_one_and_true_are_told_apart():
    @functools.partial(remat, policy="full")
    def tell(x, flag):
        return x * 2 if flag is True else x * 3

    assert_equal((tell(X, True), tell(X, 1)), (X * 2, X * 3))


def test_a_function_is_traced_once_for_equal_arguments():
    traces = []

    def counted(x, flag):
        traces.append(flag)
        return jnp.sin(x)

    run = remat(counted, "full")
    for flag in (True, True, False, True):
        run(X, flag)
    assert traces == [True, False]


def test_objects_with_a_state_of_their_own_are_looked_at_each_time():
    class Scale:
        factor = 2.0

    scale = Scale()
    run = remat(lambda x, scale: x * scale.factor, "full")
    assert_equal(run(X, scale), X * 2)
    scale.factor = 3.0
    assert_equal(run(X, scale), X * 3)


@pytest.mark.parametrize(
    ("static", "text"),
    [
        ({"static_argnums": 5}, "static_argnums has 5; 'block' takes 2 positional arguments: \\['params', 'x'\\]"),
        ({"static_argnames": "parms"}, "static_argnames has 'parms'; 'block' takes .*Did you mean 'params'?"),
    ],
)
def test_static_arguments_that_are_not_there_are_errors(static, text):
    with pytest.raises(ApplyError, match=text):
        remat(block, "full", **static)


@pytest.mark.parametrize(
    ("policy", "text"),
    [("save_qkv_proj", "names roles, not values"), ("full*2 | none*2", "plan for a stack"), ("ful", "Did you mean 'full'")],
)
def test_what_is_no_single_policy_is_an_error(policy, text):
    with pytest.raises(PolicyError, match=text):
        remat(block, policy)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(remat(block, "full"), id="remat"),
        pytest.param(jax.checkpoint(block), id="jax.checkpoint"),
        pytest.param(nn.remat(LinenBlock), id="nn.remat"),
        pytest.param(remat(LinenBlock, "full"), id="linen class"),
        pytest.param(remat(LinenBlock(), "full"), id="linen instance"),
        pytest.param(remat(NnxBlock, "full"), id="nnx class"),
        pytest.param(remat(NnxBlock(nnx.Rngs(0)), "full"), id="nnx instance"),
    ],
)
def test_wrapping_twice_warns(target):
    with pytest.warns(RematWarning, match="rematerialized already.*saves nothing more"):
        remat(target, "full")


def test_wrapping_a_whole_loss_warns_and_a_chunk_of_one_does_not():
    def scanned(params, x):
        layers = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params)
        return (jax.lax.scan(lambda x, params: (block(params, x), None), x, layers)[0] ** 2).sum()

    with pytest.warns(RematWarning, match="'scanned' returns a scalar.*Wrap the layers instead"):
        jax.grad(remat(scanned, "full"))(PARAMS, X)
    with pytest.warns(RematWarning, match="whole loss"):
        jax.grad(remat(loss(remat(block, "full")), "full"))(PARAMS, X)
    jax.grad(remat(lambda w, x: jax.nn.logsumexp(x @ w, axis=-1).sum(), "full"))(PARAMS["up"], X)


def test_an_outer_region_decides_alone_what_crosses_from_forward_to_backward():
    # jax#18817: inner decisions vanish from the residuals.
    inner = remat(block, "save(up)")
    twice = lambda params, x: inner(params, inner(params, x))  # noqa: E731
    assert residual_names(loss(twice), PARAMS, X) == ["up", "up"]
    assert residual_names(loss(remat(twice, "full")), PARAMS, X) == []


def test_bfloat16_gradients_agree_to_its_precision_not_bitwise():
    # jax#8702: fusion keeps excess precision in one program and not in the other.
    def run(x):
        return jax.nn.softmax((x + 1).astype(jnp.float32), axis=-1).astype(jnp.bfloat16)

    x = jax.random.normal(jax.random.key(3), (32, 32), jnp.bfloat16)
    plain, wrapped = (
        jax.jit(jax.grad(lambda x, run=run: (run(x) ** 2).sum().astype(jnp.float32)))(x) for run in (run, remat(run, "full"))
    )
    assert_close(wrapped.astype(jnp.float32), plain.astype(jnp.float32), bound=1e-2)


@jax.custom_vjp
def scaled(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]


# The rule for its gradient calls the function itself, so the call stays one operation of the traced block.
scaled.defvjp(lambda w, x: (scaled(w, x), (w, x)), lambda saved, g: jax.vjp(scaled.fun, *saved)[1](g))


@pytest.mark.parametrize(("policy", "keeps"), [("smaller(128B)", True), ("smaller(127B)", False), ("dots", False)])
@pytest.mark.parametrize("cheap", ["", "+cheap(8)", "+cheap(24)"])  # it takes 3 * (2 * 4 * 8 * 8 + 4 * 8) FLOPs for 128 bytes
def test_size_and_cheapness_of_a_call_with_a_gradient_of_its_own(policy, cheap, keeps):
    w = PARAMS["up"][:, :8]

    def loss(w, run):
        return (run(w, jnp.sin(X)) ** 2).sum()

    run = remat(lambda w, x: jnp.sin(scaled(w, x)) @ w, policy + cheap)
    assert_close(jax.grad(loss)(w, run), jax.grad(loss)(w, lambda w, x: jnp.sin(scaled(w, x)) @ w))
    calls = str(jax.make_jaxpr(jax.grad(functools.partial(loss, run=run)))(w)).count("custom_vjp_call[")
    assert calls == (1 if keeps and cheap != "+cheap(24)" else 2)
