"""Attention, causal and full: XLA and splash (interpreted) against the textbook, and fused kernels that run once when saved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from remat_kit import attention, remat
from remat_kit.attention import Kernel, Mask, Partition, attend
from tests.decoders import count_primitive

B, T, H, G, K = 2, 128, 4, 2, 16


def inputs(dtype="float32", width=K):
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = ((B, T, H, width), (B, T, G, width), (B, T, G, width), (B, T, H, width))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def textbook(q_BTHK, k_BTGK, v_BTGK, *, mask):
    k_BTHK, v_BTHK = (jnp.repeat(x, H // G, axis=2) for x in (k_BTGK, v_BTGK))
    logits_BHTS = jnp.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK) / q_BTHK.shape[-1] ** 0.5
    if mask is Mask.CAUSAL:
        logits_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits_BHTS, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(logits_BHTS), v_BTHK)


def value_and_gradients(run, q, k, v, weight):
    return jax.value_and_grad(lambda *qkv: (run(*qkv) * weight).sum(), (0, 1, 2))(q, k, v)


@pytest.mark.parametrize("mask", Mask)
def test_xla_is_the_textbook(mask):
    args = inputs()
    found = value_and_gradients(functools.partial(attend, kernel=Kernel.XLA, mask=mask), *args)
    expected = value_and_gradients(functools.partial(textbook, mask=mask), *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)


@pytest.mark.parametrize("mask", Mask)
def test_splash_is_the_textbook(monkeypatch, mask):
    make_kernel = attention._splash_kernel

    def make_interpreted(*args):
        kernel = make_kernel(*args)
        kernel.kwargs["interpret"] = True
        return kernel

    monkeypatch.setattr(attention, "_splash_kernel", make_interpreted)
    args = inputs(width=128)
    found = value_and_gradients(functools.partial(attend, kernel=Kernel.SPLASH, mask=mask), *args)
    expected = value_and_gradients(functools.partial(textbook, mask=mask), *args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected)


KERNELS = {Kernel.CUDNN: ("dot_product_attention_fwd", 1), Kernel.SPLASH: ("pallas_call", 3)}


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize(
    ("policy", "num_reruns"), [("none", 0), ("full", 1), ("save(q,k,v)", 1), ("save(attn)", 0), ("kernels", 0)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_saved_kernel_is_not_run_again(kernel, policy, num_reruns, is_sharded):
    """Counted where policies are decided, in the jaxpr. Splash has two backward kernels."""
    partition = None
    if is_sharded:
        mesh = Mesh(np.asarray(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "tensor"))
        partition = Partition(mesh=mesh, batch=("data",), heads="tensor")
    run = functools.partial(attend, kernel=kernel, partition=partition)
    block = remat(lambda q, k, v: jnp.sin(run(jnp.sin(q), k, v)), policy)
    jaxpr = jax.make_jaxpr(jax.grad(lambda *qkv: block(*qkv).sum(), (0, 1, 2)))(*inputs("bfloat16")[:3])
    name, expected = KERNELS[kernel]
    assert count_primitive(jaxpr, name) == expected + num_reruns
