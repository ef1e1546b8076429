"""Rules by kind: what counts as a weight, a matmul or a kernel. What each rule keeps is in `test_policy_table.py`."""

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


def matmuls(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("dot_general[")


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
