"""Step factories with one planted fault each, and without it: what `test_findings` compiles.

A stack of MLP blocks on float32 weights with a momentum, computing in bfloat16, under a policy of its own (`jax.checkpoint` by
`remat_kit.remat`). `fault` names what is wrong; the empty text is the clean twin.

Legend: B batch, T tokens, D model width, F MLP width, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as named

from remat_kit import Alternative, Knobs, Stack, Step, remat


def mlp(x_BTD, weights, *, names_output=False):
    x_BTD = named(x_BTD, "in")
    up_BTF = named(x_BTD @ weights["up"].astype(x_BTD.dtype), "up")
    out_BTD = x_BTD + named(jnp.tanh(up_BTF), "act") @ weights["down"].astype(x_BTD.dtype)
    return named(out_BTD, "out") if names_output else out_BTD


def plain_attention(q_BTD, k_BTD, v_BTD):
    """Output and log-sum-exp of the scores, which the backward rule reads too."""
    scores_BTT = (q_BTD @ k_BTD.mT).astype(jnp.float32)
    lse_BT1 = jax.nn.logsumexp(scores_BTT, -1, keepdims=True)
    return jnp.exp(scores_BTT - lse_BT1).astype(v_BTD.dtype) @ v_BTD, lse_BT1


def attention(*, names_inside):
    """A kernel-like attention with a backward rule that needs its output and its statistics."""

    @jax.custom_vjp
    def attend(q_BTD, k_BTD, v_BTD):
        return plain_attention(q_BTD, k_BTD, v_BTD)[0]

    def forward(q_BTD, k_BTD, v_BTD):
        o_BTD, lse_BT1 = plain_attention(q_BTD, k_BTD, v_BTD)
        if names_inside:
            o_BTD, lse_BT1 = named(o_BTD, "attn"), named(lse_BT1, "lse")
        return o_BTD, (q_BTD, k_BTD, v_BTD, o_BTD, lse_BT1)

    def backward(kept, ct_BTD):
        q_BTD, k_BTD, v_BTD, o_BTD, lse_BT1 = kept
        p_BTT = jnp.exp((q_BTD @ k_BTD.mT).astype(jnp.float32) - lse_BT1)
        delta_BT1 = (ct_BTD * o_BTD).astype(jnp.float32).sum(-1, keepdims=True)
        d_scores_BTT = (p_BTT * ((ct_BTD @ v_BTD.mT).astype(jnp.float32) - delta_BT1)).astype(q_BTD.dtype)
        return d_scores_BTT @ k_BTD, d_scores_BTT.mT @ q_BTD, p_BTT.astype(ct_BTD.dtype).mT @ ct_BTD

    attend.defvjp(forward, backward)
    return attend


def attending(x_BTD, weights, *, names_inside):
    q_BTD, k_BTD, v_BTD = (named(x_BTD @ weights[name].astype(x_BTD.dtype), name) for name in "qkv")
    o_BTD = attention(names_inside=names_inside)(q_BTD, k_BTD, v_BTD)
    if not names_inside:
        o_BTD = named(o_BTD, "attn")
    return x_BTD + o_BTD @ weights["o"].astype(x_BTD.dtype)


def step(
    policies,
    devices,
    *,
    fault: str = "",
    depth: int = 6,
    batch: int = 8,
    seq: int = 256,
    width: int = 256,
    vocab: int = 0,
    block: str = "mlp",
    unrolls: bool = False,
) -> Step:
    """A momentum step of a stack of blocks; with a vocabulary, tokens come in and logits go out."""
    of_block = {
        "mlp": functools.partial(mlp, names_output=fault == "names output"),
        "attention": functools.partial(attending, names_inside=fault != "no statistics"),
    }[block]
    prevents = unrolls and fault != "no barrier"
    layer = remat(of_block, policies["layers"], prevent_cse=prevents)
    if fault == "wrapped twice":
        layer = jax.checkpoint(layer, prevent_cse=prevents)

    def run(x_BTD, layers):
        if fault == "cast outside":
            layers = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layers)
        if unrolls:
            for number in range(depth):
                x_BTD = layer(x_BTD, jax.tree.map(lambda w: w[number], layers))  # noqa: B023 (used at once)
            return x_BTD
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x_BTD, layers)[0]

    def loss(params, batch):
        if not vocab:
            return (run(batch["x"], params["layers"]).astype(jnp.float32) ** 2).mean()
        x_BTD = run(params["embedding"].astype(jnp.bfloat16)[batch["tokens"]], params["layers"])
        head = params["head"].astype(jnp.bfloat16)
        if fault == "whole logits":
            return cross_entropy(head, x_BTD, batch["tokens"]).mean()
        chunks = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(a.shape[0], 8, -1, *a.shape[2:]), 1, 0), (x_BTD, batch["tokens"]))
        of_chunk = jax.checkpoint(functools.partial(cross_entropy, head), prevent_cse=False)
        return jax.lax.scan(lambda total, chunk: (total + of_chunk(*chunk).sum(), None), 0.0, chunks)[0]

    def train_step(params, momentum, batch):
        grads = jax.grad(loss)(params, batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum

    params = {"layers": _stacked(block, depth, width)}
    if vocab:
        params |= {"embedding": _array(vocab, width), "head": _array(width, vocab)}
        data = {"tokens": jax.ShapeDtypeStruct((batch, seq), "int32")}
    else:
        data = {"x": jax.ShapeDtypeStruct((batch, seq, width), "bfloat16")}
    return Step(
        fn=train_step,
        args=(params, params, data),
        donate=(0,) if fault == "momentum not donated" else (0, 1),
        roles=("parameters", "optimizer_state", "batch"),
        stacks=(Stack(name="layers", num_layers=depth),),
        knobs=Knobs(batch="batch", seq="seq", depth="depth"),
        alternatives=(Alternative(text="the loss in 8 chunks", options={"fault": ""}),) if fault == "whole logits" else (),
    )


def cross_entropy(head_DV, x_BTD, tokens_BT):
    with jax.named_scope("head"):
        logits_BTV = (x_BTD @ head_DV).astype(jnp.float32)
        right_BT = jnp.take_along_axis(logits_BTV, tokens_BT[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits_BTV, -1) - right_BT


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def _stacked(block, depth, width):
    if block == "attention":
        return {name: _array(depth, width, width) for name in "qkvo"}
    return {"up": _array(depth, width, 4 * width), "down": _array(depth, 4 * width, width)}
