"""Kernels in a traced step: recognised, priced by hand-counted attention FLOPs, listed with their phase."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from remat_kit import remat
from remat_kit.step import Step
from remat_kit.trace import trace_step

BATCH, SEQ, HEADS, WIDTH = 3, 256, 2, 128
SQUARE = 2 * BATCH * HEADS * SEQ * SEQ * WIDTH  # one matmul of attention without a mask


def train(attention, policy="none"):
    def loss(q, k, v):
        return remat(lambda q, k, v: attention(jnp.sin(q), k, v), policy)(q, k, v).astype("float32").sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))


def kernels(fn, *shapes, dtype="bfloat16"):
    _, found = trace_step(Step(fn=fn, args=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)))
    return [(kernel.name, kernel.phase, kernel.count, kernel.flops) for kernel in found.kernels], found


@pytest.fixture
def _cudnn_is_there(monkeypatch):
    """Tracing asks for the version of a library that only compiling needs."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91300)


@pytest.mark.usefixtures("_cudnn_is_there")
@pytest.mark.parametrize(
    ("options", "square"),
    [
        ({}, SQUARE),
        ({"is_causal": True}, SQUARE // 2),
        ({"is_causal": True, "local_window_size": (15, 0)}, 2 * BATCH * HEADS * (16 * 17 // 2 + (SEQ - 16) * 16) * WIDTH),
    ],
    ids=["full", "causal", "window of 16"],
)
def test_cudnn_attention_is_two_matmuls_forward_and_five_backward(options, square):
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **options)
    query, key = (BATCH, SEQ, HEADS, WIDTH), (BATCH, SEQ, 1, WIDTH)
    none, _ = kernels(train(attention), query, key, key)
    full, found = kernels(train(attention, "full"), query, key, key)
    forward, backward = ("forward", 1, 2 * square), ("backward", 1, 5 * square)
    assert none == [("cudnn_attention", *forward), ("cudnn_attention", *backward)]
    assert full == [
        ("cudnn_attention", *forward),
        ("cudnn_attention", "recompute", 1, 2 * square),
        ("cudnn_attention", *backward),
    ]
    assert found.remat_flops == 2 * square
    assert found.flops == (2 + 2 + 5) * square
    assert "bfloat16" in found.dtypes


def splash_attention(mask, *, fused, num_heads=HEADS):
    sizes = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), 128),
        block_q_dq=None if fused else 128,
        block_kv_dq=None if fused else 128,
        use_fused_bwd_kernel=fused,
    )
    kernel = splash.make_splash_mha_single_device(mask=masks.MultiHeadMask([mask] * num_heads), block_sizes=sizes)
    return jax.vmap(kernel)


@pytest.mark.parametrize("fused", [True, False], ids=["one backward kernel", "dq and dkv"])
@pytest.mark.parametrize(
    ("mask", "square"),
    [
        (masks.FullMask((SEQ, SEQ)), SQUARE),
        (masks.CausalMask((SEQ, SEQ)), SQUARE // 2),
        (masks.LocalMask((SEQ, SEQ), (127, 0), 0), SQUARE * 3 // 8),  # two masked blocks on the diagonal, one below it
    ],
    ids=["full", "causal", "local"],
)
def test_splash_attention_is_priced_by_its_kernels_and_mask(mask, square, fused):
    shape = (BATCH, HEADS, SEQ, WIDTH)
    found, trace = kernels(train(splash_attention(mask, fused=fused), "full"), shape, shape, shape)
    backward = (1, 5 * square) if fused else (2, (3 + 4) * square)
    assert found == [
        ("splash_attention", "forward", 1, 2 * square),
        ("splash_attention", "recompute", 1, 2 * square),
        ("splash_attention", "backward", *backward),
    ]
    assert trace.remat_flops == 2 * square


def test_splash_attention_inside_shard_map_counts_all_shards():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "heads"))
    mask = masks.CausalMask((SEQ, SEQ))
    spec = P("data", "heads")

    def attention(q, k, v):
        kernel = splash_attention(mask, fused=True, num_heads=1)
        return jax.shard_map(kernel, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)(q, k, v)

    shape = (4, HEADS, SEQ, WIDTH)
    found, trace = kernels(train(attention), shape, shape, shape)
    square = 2 * 4 * HEADS * SEQ * SEQ * WIDTH // 2
    assert trace.num_devices == 4
    assert found == [("splash_attention", "forward", 1, 2 * square // 4), ("splash_attention", "backward", 1, 5 * square // 4)]


@pytest.mark.parametrize("estimate", [None, pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)])
def test_other_pallas_kernels_are_listed_and_priced_by_their_own_estimate(estimate):
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def step(x):
        kernel = pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=estimate, name="double")
        return jax.lax.scan(lambda x, _: (kernel(x), None), x, length=3)[0]

    flops = None if estimate is None else 3 * 1000
    found, trace = kernels(step, (8, 128))
    assert found == [("double", "forward", 3, flops)]
    assert trace.flops == (flops or 0)
