"""One block of five matmuls in every form that a policy can be applied to: the columns of `test_policy_table.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from remat_kit import remat, rematerialize, stack
from remat_kit.apply.linen_stack import stack_module
from remat_kit.apply.nnx_stack import NnxStack

L, B, D, E, F, H = 4, 4, 6, 5, 10, 7
"""Layers, batch, width, experts, hidden width, width of an expert."""


def compute(params, x_BD, key):
    """Five matmuls: by weights, by weights batched over experts, two of activations (batched and not), by weights."""
    up_BF = checkpoint_name(x_BD @ params["up"], "up")
    mask_BF = jax.random.bernoulli(key, 0.7, up_BF.shape)
    hidden_EBF = jnp.where(mask_BF, jnp.sin(up_BF), 0) * jnp.arange(1.0, E + 1)[:, None, None]
    expert_EBH = checkpoint_name(jnp.einsum("ebf,efh->ebh", hidden_EBF, params["expert"]), "expert")
    scores_EBB = checkpoint_name(jnp.einsum("ebh,ech->ebc", jnp.sin(expert_EBH), jnp.cos(expert_EBH)), "scores")
    context_BH = checkpoint_name(jnp.einsum("ebc,ech->bh", jnp.sin(scores_EBB), jnp.cos(expert_EBH)), "context")
    num_kept = (mask_BF * jnp.arange(B * F).reshape(B, F)).sum()
    return x_BD + jnp.sin(context_BH) @ params["down"], num_kept


def block(params, x, *, key):
    return compute(params, x, key)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        shapes = {"up": (D, F), "expert": (E, F, H), "down": (H, D)}
        params = {name: self.param(name, nn.initializers.normal(), shape) for name, shape in shapes.items()}
        return compute(params, x, self.make_rng("dropout"))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.expert = nnx.Param(jnp.zeros((D, F))), nnx.Param(jnp.zeros((E, F, H)))
        self.down = nnx.Param(jnp.zeros((H, D)))
        self.rngs = rngs.fork()

    def __call__(self, x):
        params = {"up": self.up[...], "expert": self.expert[...], "down": self.down[...]}
        return compute(params, x, self.rngs.dropout())


def fill(module, params):
    for name, value in params.items():
        getattr(module, name)[...] = value
    return module


def one_layer(params):
    return jax.tree.map(lambda leaf: leaf[0], params)


def in_function(policy):
    run = remat(block, policy, params_argnums=0)
    return lambda params, x, key: run(one_layer(params), x, key=key)


def in_linen(policy):
    module = remat(LinenBlock, policy)()
    return lambda params, x, key: module.apply({"params": one_layer(params)}, x, rngs={"dropout": key})


def in_nnx(policy):
    def run(params, x, key):
        return remat(fill(NnxBlock(nnx.Rngs(dropout=key)), one_layer(params)), policy)(x)

    return run


def by_path(policy):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return LinenBlock(name="block")(x)

    run = lambda params, x, key: Model().apply({"params": {"block": params}}, x, rngs={"dropout": key})  # noqa: E731
    return lambda params, x, key: rematerialize({"block": policy})(run)(one_layer(params), x, key)


def in_stack(plan, **options):
    return lambda policy: lambda params, x, key: stack(block, params, x, plan.format(policy), key=key, **options)


def in_linen_stack(plan):
    def apply(policy):
        module = stack_module(LinenBlock, num_layers=L, plan=plan.format(policy))()
        return lambda params, x, key: module.apply({"params": params}, x, rngs={"dropout": key})

    return apply


def in_nnx_stack(plan):
    def apply(policy):
        def run(params, x, key):
            model = NnxStack(NnxBlock, num_layers=L, plan=plan.format(policy), rngs=nnx.Rngs(dropout=key))
            fill(model.layers, params)
            return model(x)

        return run

    return apply


@dataclass(frozen=True, kw_only=True)
class Column:
    """A way to apply a policy.

    Attributes:
        name: What it is called.
        apply: From a policy to a function of all layers' parameters, x and a key.
        lengths: How many layers with this policy stand behind one another, by which their values are stacked; 0 = not stacked.
        num_again: Matmuls that run again, from a row (`policy`, `again`: those of one layer).
    """

    name: str
    apply: Callable[[str], Callable[..., Any]]
    lengths: Callable[[str], int] = lambda _: 0
    num_again: Callable[[Any], int] = lambda row: row.again

    def __str__(self) -> str:
        return self.name


MIXED = "full*1 | {}*2 | none*1"
SEGMENTED = "full*2 | {}*2"
OF_MIXED = {"lengths": lambda policy: 3 if policy == "none" else 2, "num_again": lambda row: 4 + 2 * row.again}

# Of a group of two, the first layer runs once more, all its five matmuls, to make the input of the second one.
COLUMNS = [
    Column(name="function", apply=in_function),
    Column(name="linen", apply=in_linen),
    Column(name="nnx", apply=in_nnx),
    Column(name="linen by path", apply=by_path),
    Column(name="stack", apply=in_stack("{}"), lengths=lambda _: L, num_again=lambda row: L * row.again),
    Column(
        name="segmented stack",
        apply=in_stack(SEGMENTED, group=2),
        lengths=lambda _: 2,
        num_again=lambda row: 2 * 4 + 5 + (2 * 4 + 5 if row.policy == "full" else 2 * row.again),
    ),
    Column(name="mixed stack", apply=in_stack(MIXED), **OF_MIXED),
    Column(name="mixed linen stack", apply=in_linen_stack(MIXED), **OF_MIXED),
    Column(name="mixed nnx stack", apply=in_nnx_stack(MIXED), **OF_MIXED),
]

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "up": jax.random.normal(KEYS[0], (L, D, F)) / 3,
    "expert": jax.random.normal(KEYS[1], (L, E, F, H)) / 9,
    "down": jax.random.normal(KEYS[2], (L, H, D)) / 3,
}
X = jax.random.normal(KEYS[3], (B, D))
KEY = jax.random.key(7)
