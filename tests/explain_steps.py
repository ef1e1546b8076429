"""Step factories that the tests of `explain` compile: a sharded stack, scanned or unrolled, and a third party's GPT-2."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name as named
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from remat_kit import Knobs, Stack, Step, remat


def _momentum_step(loss, params, momentum, *batch):
    grads = jax.grad(loss)(params, *batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g.astype(m.dtype), momentum, grads)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum


def stack(
    policies,
    devices,
    *,
    batch: int = 64,
    depth: int = 4,
    width: int = 512,
    seq: int = 64,
    is_unrolled: bool = False,
    replicas: int = 1,
    accumulate: int = 1,
) -> Step:
    """MLP blocks with weights split over the devices and momentum, one `checkpoint_name` a matmul.

    With replicas the weights lie on a part of the devices each, the momentum on all of them (hybrid sharding).
    """
    layer = remat(_block, policies["layers"], prevent_cse=is_unrolled)
    weight_axes, state_axes = ("fsdp",), ("data", "fsdp") if replicas > 1 else ("fsdp",)
    mesh = Mesh(np.array(devices).reshape(replicas, -1), ("data", "fsdp"))

    def over(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes)) if len(devices) > 1 else SingleDeviceSharding(devices[0])

    def loss(weights, x_BTD):
        if len(devices) > 1:
            x_BTD = jax.lax.with_sharding_constraint(x_BTD, over(("data", "fsdp")))
        x_BTD = _run(layer, weights, x_BTD, depth=depth, is_unrolled=is_unrolled)
        return jnp.mean(x_BTD.astype(jnp.float32) ** 2)

    def train_step(weights, momentum, x_BTD):
        parts = x_BTD.reshape(accumulate, -1, *x_BTD.shape[1:])
        mean = lambda weights, parts: jnp.mean(jax.lax.map(lambda part: loss(weights, part), parts))  # noqa: E731
        new = _momentum_step(*((loss, weights, momentum, x_BTD) if accumulate == 1 else (mean, weights, momentum, parts)))
        return jax.lax.with_sharding_constraint(new, (over(None, weight_axes), over(None, state_axes)))

    def tree(axes):
        shapes = {"up": (depth, width, 4 * width), "down": (depth, 4 * width, width)}
        return {name: jax.ShapeDtypeStruct(shape, "float32", sharding=over(None, axes)) for name, shape in shapes.items()}

    x_BTD = jax.ShapeDtypeStruct((batch, seq, width), "bfloat16", sharding=over(("data", "fsdp")))
    return Step(
        fn=train_step,
        args=(tree(weight_axes), tree(state_axes), x_BTD),
        donate=(0, 1),
        roles=("parameters", "optimizer_state", "batch"),
        stacks=(Stack(name="layers", num_layers=depth),),
        knobs=Knobs(batch="batch", seq="seq", depth="depth"),
    )


def _block(x_BTD, weights):
    up_BTF = named(x_BTD @ weights["up"].astype(x_BTD.dtype), "up")
    return x_BTD + named(jnp.tanh(up_BTF) @ weights["down"].astype(x_BTD.dtype), "down")


def _run(layer, weights, x_BTD, *, depth, is_unrolled):
    if not is_unrolled:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x_BTD, weights)[0]
    for index in range(depth):
        x_BTD = layer(x_BTD, jax.tree.map(lambda leaf, index=index: leaf[index], weights))
    return x_BTD


def flax_gpt2(policies, devices, *, batch: int = 4, layers: int = 12, seq: int = 1024) -> Step:
    """A training step of `FlaxGPT2LMHeadModel` as `transformers` ships it; its policies come by module path (`--wrap`)."""
    del policies
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_flax_gpt2 import FlaxGPT2LMHeadModel

        model = FlaxGPT2LMHeadModel(GPT2Config(n_layer=layers), _do_init=False)
    params = jax.eval_shape(lambda key: model.init_weights(key, (1, 1)), jax.random.key(0))
    optimizer = optax.adamw(3e-4)

    def loss(params, tokens):
        logits = model(tokens, params=params).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, axis=1)).mean()

    def train_step(params, opt_state, tokens):
        updates, opt_state = optimizer.update(jax.grad(loss)(params, tokens), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return Step(
        fn=train_step,
        args=(params, jax.eval_shape(optimizer.init, params), tokens),
        donate=(0, 1),
        roles=("parameters", "optimizer_state", "batch"),
    )
