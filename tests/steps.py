"""Step factories that the tests compile: a scanned stack of MLP blocks, small, and ways to get it wrong."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remat_kit import Knobs, Stack, Step, remat
from remat_kit.plans import NO_REMAT
from remat_kit.policy import NONE

ROLES = {"mlp_in": ("up",), "mlp_out": ("down",), "query": (), "key": (), "value": (), "attention_out": ()}


def block(x_BD, weights):
    """Two matmuls, both named; the second one is dead in a rematerialized backward pass."""
    up_BF = checkpoint_name(x_BD @ weights["up"], "up")
    return x_BD + checkpoint_name(jnp.sin(up_BF) @ weights["down"], "down")


def abstract_weights(depth, width, dtype):
    return {
        "up": jax.ShapeDtypeStruct((depth, width, 4 * width), dtype),
        "down": jax.ShapeDtypeStruct((depth, 4 * width, width), dtype),
    }


def mlp(policies, devices, *, batch: int = 64, depth: int = 4, width: int = 32, dtype: str = "float32") -> Step:
    """A training step with plain gradient descent and donated weights."""
    layer = remat(block, policies["layers"], prevent_cse=False)

    def train_step(weights, x_BD):
        def loss(weights):
            return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x_BD, weights)[0].astype(jnp.float32) ** 2)

        return jax.tree.map(lambda w, g: w - 1e-3 * g.astype(w.dtype), weights, jax.grad(loss)(weights))

    return Step(
        fn=train_step,
        args=(abstract_weights(depth, width, dtype), jax.ShapeDtypeStruct((batch, width), dtype)),
        donate=(0,),
        roles=("parameters", "batch"),
        stacks=(Stack(name="layers", num_layers=depth, roles=ROLES),),
        knobs=Knobs(batch="batch", depth="depth"),
    )


def matmul_flops(*, batch=64, width=32):
    """FLOPs of one of the block's matmuls."""
    return 2 * batch * width * 4 * width


def forgetful(policies, devices, *, batch: int = 64) -> Step:
    """Never applies the policy it is handed."""
    del policies
    return mlp(NO_REMAT, devices, batch=batch)


def raising(policies, devices, *, when: str = "always") -> Step:
    """Raises an error of its own: always, or only for rematerialization."""
    if when == "always" or policies["layers"].policy != NONE:
        raise ZeroDivisionError("no layers to divide")
    return mlp(policies, devices)


def not_a_step(policies, devices):
    """Returns something else."""
    return policies
