"""The chunked cross-entropy against optax on whole logits: value, gradients, masks, and what never exists."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models.loss import chunked_cross_entropy
from models.sharding import make_layout
from remat_kit import _jax

B, T, D, V = 4, 24, 16, 50
ONE = make_layout(jax.devices("cpu")[:1], "")


def inputs(seed=0, masked=0.3):
    keys = jax.random.split(jax.random.key(seed), 4)
    hidden_BTD = jax.random.normal(keys[0], (B, T, D))
    head_VD = jax.random.normal(keys[1], (V, D))
    labels_BT = jax.random.randint(keys[2], (B, T), 0, V)
    weights_BT = (jax.random.uniform(keys[3], (B, T)) > masked).astype(jnp.float32)
    return hidden_BTD, head_VD, labels_BT, weights_BT


def whole(hidden_BTD, head_VD, labels_BT, weights_BT):
    losses = optax.softmax_cross_entropy_with_integer_labels(hidden_BTD @ head_VD.T, labels_BT)
    return (losses * weights_BT).sum() / weights_BT.sum()


def chunked(*args, chunk=8, layout=ONE):
    return chunked_cross_entropy(*args, chunk=chunk, layout=layout)


@pytest.mark.parametrize("chunk", [1, 7, 8, 24, 100])
def test_equals_optax(chunk):
    args = inputs()
    expected = jax.value_and_grad(whole, (0, 1))(*args)
    found = jax.jit(jax.value_and_grad(lambda h, w: 3.0 * chunked(h, w, *args[2:], chunk=chunk), (0, 1)))(*args[:2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3.0 * b, rtol=1e-5, atol=1e-6), found, expected)


def test_a_batch_without_tokens_is_zero_not_nan():
    hidden_BTD, head_VD, labels_BT, weights_BT = inputs()
    loss, grad = jax.value_and_grad(chunked)(hidden_BTD, head_VD, labels_BT, 0 * weights_BT)
    assert float(loss) == 0.0
    assert float(abs(grad).max()) == 0.0


def test_three_matmuls_and_never_whole_logits():
    args = inputs()
    jaxpr = jax.make_jaxpr(jax.grad(chunked, (0, 1)))(*args)
    eqns = list(walk(jaxpr))
    assert sum(eqn.primitive.name == "dot_general" for eqn in eqns) == 3
    assert max(var.aval.size for eqn in eqns for var in eqn.outvars) < B * T * V


def walk(program):
    for eqn in _jax.open_jaxpr(program)[0].eqns:
        yield eqn
        for inner in _jax.inner_programs(eqn):
            yield from walk(inner)


@pytest.mark.parametrize("mesh", ["fsdp:8", "data:2,fsdp:2,tensor:2"])
def test_the_same_on_a_mesh_that_does_not_divide_the_vocabulary(mesh):
    layout = make_layout(jax.devices("cpu")[:8], mesh)
    args = inputs(masked=0.0)
    args = [jnp.concatenate([arg, arg]) if arg.shape[0] == B else arg for arg in args]
    expected = jax.value_and_grad(whole, (0, 1))(*args)
    found = jax.jit(jax.value_and_grad(lambda *a: chunked(*a, layout=layout), (0, 1)))(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
