"""Step factories that the planning tests compile: small stacks whose names differ in bytes and in what they spare."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remat_kit import Alternative, Knobs, Stack, Step, StepError, remat, stack


def block(weights, x_BTD):
    """Three matmuls of different widths, each named; the last one is dead in a rematerialized backward pass."""
    wide_BTF = jnp.sin(checkpoint_name(x_BTD @ weights["wide"], "wide"))
    slim_BTD = jnp.sin(checkpoint_name(wide_BTF @ weights["slim"], "slim"))
    return x_BTD + checkpoint_name(slim_BTD @ weights["out"], "out")


def shapes(depth, width):
    return {"wide": (depth, width, 4 * width), "slim": (depth, 4 * width, width), "out": (depth, width, width)}


def abstract(tree, dtype="float32"):
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in tree.items()}


def random_arrays(key, args):
    """Real arrays for abstract ones, small so that nothing saturates."""
    leaves, tree = jax.tree.flatten(args)
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten([0.3 * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)])


def update(loss, params, *batch):
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, jax.grad(loss)(params, *batch))


def layers_loss(policies, *, chunk=16):
    """The loss of `layers`; besides the layers it sorts a buffer of chunk KiB."""

    def loss(params, x_BTD):
        hidden_BTD = stack(block, params, x_BTD, policies["layers"])
        spread = jnp.sin(hidden_BTD.mean() + jnp.arange(chunk * 256, dtype=jnp.float32))
        return jnp.mean(hidden_BTD**2) + jnp.sort(spread)[0]

    return loss


def layers(
    policies, devices, *, batch: int = 32, seq: int = 16, depth: int = 8, width: int = 32, chunk: int = 16, mixes: bool = True
) -> Step:
    """A stack that may mix policies; `seq` is at most 64."""
    if seq > 64:
        raise StepError(f"seq={seq}: at most 64.")
    loss = layers_loss(policies, chunk=chunk)
    args = (abstract(shapes(depth, width)), jax.ShapeDtypeStruct((batch, seq, width), "float32"))
    return Step(
        fn=lambda params, x_BTD: update(loss, params, x_BTD),
        args=args,
        donate=(0,),
        roles=("parameters", "batch"),
        stacks=(Stack(name="layers", num_layers=depth, accepts_mixed=mixes),),
        knobs=Knobs(batch="batch", seq="seq", depth="depth"),
        alternatives=(Alternative(text=f"a chunk of 1 instead of {chunk}", options={"chunk": "1"}),),
        init=lambda key: random_arrays(key, args),
    )


def matmul_flops(*, batch=32, seq=16, width=32):
    """FLOPs of the widest matmul of a layer, which is the second one, too."""
    return 2 * batch * seq * width * 4 * width


def no_depth(policies, devices, *, batch: int = 32, seq: int = 16) -> Step:
    """The same without options that say what they are."""
    made = layers(policies, devices, batch=batch, seq=seq, mixes=False)
    return Step(fn=made.fn, args=made.args, donate=made.donate, stacks=made.stacks, init=made.init)


def two_stacks(policies, devices, *, batch: int = 32, seq: int = 16, width: int = 32) -> Step:
    """An encoder and a decoder of different lengths; the decoder can't mix."""

    def loss(params, x_BTD):
        x_BTD = stack(block, params["encoder"], x_BTD, policies["encoder"])
        layer = remat(block, policies["decoder"], prevent_cse=False)
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(p, x), None), x_BTD, params["decoder"])[0] ** 2)

    params = {"encoder": abstract(shapes(8, width)), "decoder": abstract(shapes(6, width))}
    args = (params, jax.ShapeDtypeStruct((batch, seq, width), "float32"))
    return Step(
        fn=lambda params, x_BTD: update(loss, params, x_BTD),
        args=args,
        donate=(0,),
        stacks=(Stack(name="encoder", num_layers=8, accepts_mixed=True), Stack(name="decoder", num_layers=6)),
        init=lambda key: random_arrays(key, args),
    )


class Layer(nn.Module):
    """A block that names nothing."""

    width: int

    @nn.compact
    def __call__(self, x_BD):
        return x_BD + nn.Dense(self.width, name="down")(jnp.sin(nn.Dense(4 * self.width, name="up")(x_BD)))


class Model(nn.Module):
    """Layers one after the other, as a model that knows nothing of rematerialization has them."""

    depth: int
    width: int

    @nn.compact
    def __call__(self, x_BD):
        for number in range(self.depth):
            x_BD = Layer(self.width, name=f"h_{number}")(x_BD)
        return x_BD


def unnamed_loss(model):
    return lambda params, x_BD: jnp.mean(model.apply(params, x_BD) ** 2)


def unnamed(policies, devices, *, batch: int = 512, depth: int = 8, width: int = 32) -> Step:
    """A model that nobody edits: no stack, no name."""
    model, x_BD = Model(depth, width), jax.ShapeDtypeStruct((batch, width), "float32")
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, width)))
    return Step(
        fn=lambda params, x_BD: update(unnamed_loss(model), params, x_BD),
        args=(params, x_BD),
        donate=(0,),
        knobs=Knobs(batch="batch", depth="depth"),
        init=lambda key: random_arrays(key, (params, x_BD)),
    )
