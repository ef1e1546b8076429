"""The stack that the tests of reported faults run: a block with all its values named, looped by `stack` and unrolled."""

import contextlib

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remat_kit import remat, residual_report, stack
from remat_kit.graph import Origin

L, B, D, F = 12, 4, 6, 10
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"up": jax.random.normal(KEYS[0], (L, D, F)) / 3, "down": jax.random.normal(KEYS[1], (L, F, D)) / 3}
ONE = jax.tree.map(lambda leaf: leaf[0], PARAMS)
X = jax.random.normal(KEYS[2], (B, D))


def block(params, x):
    x = checkpoint_name(x, "in")
    h = checkpoint_name(x @ params["up"], "h")
    return checkpoint_name(x + jnp.tanh(h) @ params["down"], "out")


def loss(plan, params=PARAMS, x=X, **options):
    return (stack(block, params, x, plan, **options) ** 2).sum()


def unrolled(policy, params, x):
    wrapped = remat(block, policy)
    for layer in range(L):
        x = wrapped(jax.tree.map(lambda leaf, layer=layer: leaf[layer], params), x)
    return (x**2).sum()


def saved(f, *args):
    """What needs memory of its own: name or kind -> bytes and whether on the host."""
    kept = [each for each in residual_report(f, *args).residuals if each.origin is Origin.OPERATION and each.num_layers > 1]
    return {"=".join(each.names) or each.kind: (each.num_bytes, each.is_on_host) for each in kept}


@contextlib.contextmanager
def remat3():
    jax.config.update("jax_remat3", True)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", False)
