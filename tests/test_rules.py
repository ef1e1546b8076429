"""What each rule keeps, counted in matmuls; and with jax_remat3 the same, or a refusal: never less in silence."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit import PolicyError, parse_policy, remat, rematerialize
from remat_kit.operations import KERNELS, MATMULS

WIDTH = 8


def block(weights, x_BD):
    """Four matmuls: two by weights, one of them batched over experts, two of activations, as in attention."""
    query_BD = checkpoint_name(x_BD @ weights["query"], "query")
    expert_BED = jnp.einsum("bd,edf->bef", jnp.sin(query_BD), weights["expert"])
    scores_BEE = jnp.einsum("bed,bfd->bef", jnp.sin(expert_BED), jnp.cos(expert_BED))
    context_BED = checkpoint_name(jnp.einsum("bef,bfd->bed", jnp.sin(scores_BEE), jnp.cos(expert_BED)), "context")
    return x_BD + jnp.sin(context_BED).sum(1)


WEIGHTS = {"query": jnp.ones((WIDTH, WIDTH)) / WIDTH, "expert": jnp.ones((3, WIDTH, WIDTH)) / WIDTH}
X = jnp.linspace(-1.0, 1.0, 4 * WIDTH).reshape(4, WIDTH)
ALL = 4

# policy -> matmuls that run again. The forward pass of the block has four.
EXTRA = {
    "none": 0,
    "full": 4,
    "dots": 0,
    "dots_no_batch": 2,  # both matmuls by weights: unlike in the test of vmap below, they have no batch dimensions here
    "weights": 2,
    "weights+save(context)": 1,
    "save(query)": 3,
    "save(query,context)": 2,
    "save(*)": 2,
    "save(*)+recompute(context)": 3,
    "recompute(context)+save(*)": 2,
    "smaller(1MiB)": 0,
    "smaller(1)": 4,
    "dots+cheap(1000)": 4,
}


def matmuls(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("dot_general[")


def gradient(policy, fn=block, **options):
    wrapped = remat(fn, policy, params_argnums=0, **options)
    return jax.grad(lambda weights, x: jnp.sum(wrapped(weights, x)))


@pytest.mark.parametrize("policy", EXTRA)
def test_matmuls_that_run_again(policy):
    extra = matmuls(gradient(policy), WEIGHTS, X) - matmuls(gradient("none"), WEIGHTS, X)
    assert extra == EXTRA[policy]


@pytest.mark.parametrize("policy", [policy for policy in EXTRA if policy != "none"])
def test_gradients_do_not_depend_on_the_policy(policy):
    found, expected = (jax.jit(gradient(each))(WEIGHTS, X) for each in (policy, "none"))
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for name, leaf in found.items():
        assert float(jnp.abs(leaf - expected[name]).max()) <= 2e-6 * largest


@pytest.mark.parametrize("order", ["vmap of remat", "remat of vmap"])
def test_weights_are_weights_under_vmap(order):
    stages = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), WEIGHTS)
    xs = jnp.stack([X, X])

    def grad(policy):
        if order == "vmap of remat":
            run = jax.vmap(remat(block, policy, params_argnums=0))
        else:
            run = remat(jax.vmap(block), policy, params_argnums=0)
        return jax.grad(lambda weights, xs: jnp.sum(run(weights, xs)))

    extra = {
        policy: matmuls(grad(policy), stages, xs) - matmuls(grad("none"), stages, xs) for policy in ("full", "weights", "dots")
    }
    assert extra == {"full": 4, "weights": 2, "dots": 0}
    # The rule of JAX by batch dimensions keeps nothing here, or only what happens to have none.
    assert matmuls(grad("dots_no_batch"), stages, xs) - matmuls(grad("none"), stages, xs) == 4


def test_weights_of_linen_modules():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x_BD):
            hidden_BF = jnp.sin(nn.Dense(WIDTH, name="up")(x_BD))
            return jnp.sin(jnp.sin(nn.Dense(WIDTH, name="down")(hidden_BF)) @ jnp.cos(hidden_BF).T)

    def grad(policy):
        module = remat(Block, policy)()
        return jax.grad(lambda params, x: jnp.sum(jnp.sin(module.apply(params, x))))

    params = Block().init(jax.random.key(0), X)
    extra = {policy: matmuls(grad(policy), params, X) - matmuls(grad("none"), params, X) for policy in ("full", "weights")}
    assert extra == {"full": 3, "weights": 1}


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x_BD):
        hidden_BF = jnp.sin(self.up(x_BD))
        return jnp.sin(jnp.sin(self.down(hidden_BF)) @ jnp.cos(hidden_BF).T)


@pytest.mark.parametrize("by_path", [False, True])
def test_weights_of_nnx_modules(by_path):
    def again(policy):
        module = NnxBlock(nnx.Rngs(0))
        model = nnx.Dict(block=module if by_path else remat(module, policy))
        graphdef, params = nnx.split(model)

        def loss(params):
            model = nnx.merge(graphdef, params)
            with rematerialize({"block": policy}, model) if by_path else contextlib.nullcontext():
                return jnp.sum(jnp.sin(model["block"](X)))

        return matmuls(jax.grad(loss), params)

    assert {policy: again(policy) - again("none") for policy in ("full", "weights")} == {"full": 3, "weights": 1}


def test_weights_of_nnx_modules_that_a_trace_closes_over():
    def again(policy):
        module = remat(NnxBlock(nnx.Rngs(0)), policy)
        return matmuls(jax.grad(lambda x: jnp.sum(jnp.sin(module(x)))), X)

    assert {policy: again(policy) - again("none") for policy in ("full", "weights")} == {"full": 3, "weights": 1}


def test_weights_must_know_the_parameters():
    with pytest.raises(PolicyError, match="params_argnums"):
        jax.grad(lambda x: jnp.sum(remat(lambda x: x @ x, "weights")(x)))(X[:, :4])


def test_operations_by_kind():
    assert {"pallas_call", "dot_product_attention_fwd_wrapper", "ffi_call"} <= KERNELS
    assert {"dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_matmul", "scaled_dot"} <= MATMULS
    assert not KERNELS & MATMULS


@contextlib.contextmanager
def remat3():
    jax.config.update("jax_remat3", True)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", False)


@pytest.mark.parametrize("policy", ["full", "weights", "save(query)", "save(query,context)", "save(*)+recompute(context)"])
def test_remat3_keeps_the_same(policy):
    classic = matmuls(gradient(policy), WEIGHTS, X)
    with remat3():
        assert matmuls(gradient(policy), WEIGHTS, X) == classic


@pytest.mark.parametrize("policy", ["dots", "dots_no_batch", "kernels", "smaller(1MiB)", "save(query)+cheap(8)"])
def test_remat3_refuses_rules_by_operation(policy):
    with remat3(), pytest.raises(PolicyError, match="can't be expressed with jax_remat3"):
        gradient(policy)(WEIGHTS, X)


def test_remat3_offloads_or_refuses():
    with remat3():
        if jax.__version_info__ < (0, 12):
            with pytest.raises(PolicyError, match="ignores offloading"):
                gradient("offload(query)")(WEIGHTS, X)
        else:
            assert "<host>" in str(jax.make_jaxpr(gradient("offload(query)"))(WEIGHTS, X))


def test_remat3_refuses_names_inside_a_custom_vjp():
    @jax.custom_vjp
    def kernel(x):
        return jnp.sin(x)

    def forward(x):
        out = checkpoint_name(jnp.sin(x), "inside")
        return out, (x, out)

    kernel.defvjp(forward, lambda kept, d_out: (d_out * jnp.cos(kept[0]) + 0 * kept[1],))
    loss = lambda x: jnp.sum(remat(lambda x: kernel(jnp.sin(x)), "save(inside)")(x))  # noqa: E731
    assert jnp.isfinite(jax.grad(loss)(X)).all()
    with remat3(), pytest.raises(PolicyError, match="names inside a custom_vjp are lost"):
        jax.grad(loss)(X)


def test_equal_policies_are_traced_once():
    traces = []

    def noted(x):
        traces.append(x)
        return jnp.sin(checkpoint_name(jnp.sin(x), "a"))

    @jax.jit
    def step(x):
        return jax.grad(lambda x: jnp.sum(remat(noted, parse_policy("save(a)"))(x)))(x)

    step(X)
    step(X + 1)
    assert len(traces) == 1
