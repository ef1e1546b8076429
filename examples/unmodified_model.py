"""How do I rematerialize a model that I may not edit?

    python -m examples.unmodified_model

names modules by their path, wraps them from outside, and prints what the backward pass keeps: as the model is, and under two
policies that `remat_kit.rematerialize` takes. Gradients stay the same, and so does the parameter tree.
"""

import contextlib

import jax
import jax.numpy as jnp
from flax import linen as nn

import remat_kit
from remat_kit.units import format_bytes

POLICIES = {
    "as it is": None,
    "every block recomputed": {"block_*": "full"},
    "but for its first matmul": {"block_*": "save(*/widen)"},
}


class Block(nn.Module):
    """Somebody else's block: no names, no remat."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The next x."""
        x = x + nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(nn.LayerNorm()(x))
        return x + nn.Dense(64, name="narrow")(nn.gelu(nn.Dense(256, name="widen")(nn.LayerNorm()(x))))


class Encoder(nn.Module):
    """Somebody else's model."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Encodes x."""
        for number in range(3):
            x = Block(name=f"block_{number}")(x)
        return nn.LayerNorm()(x)


def main() -> None:
    """Compares the policies."""
    model = Encoder()
    x = jax.random.normal(jax.random.key(0), (8, 32, 64))
    params = jax.jit(model.init)(jax.random.key(1), x)

    def loss(params: dict[str, object]) -> jax.Array:
        return jnp.mean(model.apply(params, x) ** 2)

    plain = jax.jit(jax.grad(loss))(params)
    for title, policies in POLICIES.items():

        def wrapped(params: dict[str, object], policies: dict[str, str] | None = policies) -> jax.Array:
            with remat_kit.rematerialize(policies) if policies else contextlib.nullcontext():
                return loss(params)

        kept = sum(each.num_bytes for each in remat_kit.residuals(wrapped, params) if each.origin == "operation")
        grads = jax.jit(jax.grad(wrapped))(params)
        off = max(float(abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (plain, grads)), strict=True))
        print(f"{title:25} keeps {format_bytes(kept):>10}, gradients off by at most {off:.0e}")


if __name__ == "__main__":
    main()
