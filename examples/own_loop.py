"""How does a Flax loop of mine take a policy, or a plan that was made for it?

    python -m examples.own_loop --policy 'full*2 | save(hidden)*2'

prints the loss as it falls, and what the backward pass keeps under that policy. `--policy @plan.toml` takes what
`remat-kit plan … --out plan.toml` wrote.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import remat_kit
from remat_kit.apply.linen_stack import stack_module
from remat_kit.units import format_bytes

LAYERS, WIDTH = 4, 64


class Block(nn.Module):
    """A residual MLP. What its backward pass needs has a name: the input of the nonlinearity."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The next x."""
        hidden = checkpoint_name(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm(name="norm")(x)), "hidden")
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(hidden))


class Model(nn.Module):
    """A stack of blocks under a plan: the one line that remat-kit adds."""

    plan: remat_kit.StackPlan | str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """A number for each row."""
        x = nn.Dense(WIDTH, name="first")(x)
        x = stack_module(Block, num_layers=LAYERS, plan=self.plan)(name="layers")(x)
        return nn.Dense(1, name="last")(x)[:, 0]


def main(argv: list[str] | None = None) -> None:
    """Trains on a sine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="full*2 | save(hidden)*2")
    policy = parser.parse_args(argv).policy
    model = Model(remat_kit.load_plan(policy[1:]).stack_plan if policy.startswith("@") else policy)
    x = jax.random.uniform(jax.random.key(0), (256, 1), minval=-3, maxval=3)
    params = model.init(jax.random.key(1), x)["params"]
    optimizer = optax.adam(3e-3)

    def loss_fn(params: optax.Params) -> jax.Array:
        return jnp.mean((model.apply({"params": params}, x) - jnp.sin(2 * x[:, 0])) ** 2)

    @jax.jit
    def step(params: optax.Params, state: optax.OptState) -> tuple[optax.Params, optax.OptState, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    for number in range(31):
        params, state, loss = step(params, state)
        if number % 10 == 0:
            print(f"step {number:3}  loss {loss:.4f}")
    for kept in remat_kit.residuals(loss_fn, params):
        if kept.num_layers > 1 and kept.origin == "operation":
            print(f"keeps {format_bytes(kept.num_bytes):>10}  {kept.num_layers} layers  {', '.join(kept.names) or kept.kind}")


if __name__ == "__main__":
    main()
