"""FLOPs, recomputation, names and regions of traced steps, against numbers counted by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from remat_kit import remat
from remat_kit.graph import Phase
from remat_kit.records import StepTrace
from remat_kit.step import Step
from remat_kit.trace import trace_graph, trace_step

L, B, D, F = 4, 8, 16, 32
MATMUL = 2 * B * D * F  # one of the MLP's matmuls


def shape(*sizes, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def trace(fn, *args) -> StepTrace:
    return trace_step(Step(fn=fn, args=args))[1]


def mlp(x, p):
    h = checkpoint_name(x @ p["up"], "h")
    return x + jnp.sin(h) @ p["down"]


def mlp_step(policy, *, use_scan=True):
    block = remat(mlp, policy, prevent_cse=not use_scan)

    def loss(params, x):
        if use_scan:
            return jax.lax.scan(lambda x, p: (block(x, p), None), x, params)[0].sum()
        for layer in range(L):
            x = block(x, jax.tree.map(lambda p: p[layer], params))  # noqa: B023 (run at once)
        return x.sum()

    return lambda params, x: jax.value_and_grad(loss, argnums=(0, 1))(params, x)


MLP_ARGS = ({"up": shape(L, D, F), "down": shape(L, F, D)}, shape(B, D))


@pytest.mark.parametrize("use_scan", [True, False], ids=["scan", "unrolled"])
def test_full_remat_of_an_mlp_recomputes_its_live_half(use_scan):
    none = trace(mlp_step("none", use_scan=use_scan), *MLP_ARGS)
    full = trace(mlp_step("full", use_scan=use_scan), *MLP_ARGS)
    assert none.flops == L * 6 * MATMUL  # 2 forward, 4 backward
    assert none.remat_flops == 0
    assert none.num_remat_regions == 0
    assert full.flops - none.flops == full.remat_flops == L * MATMUL  # the second matmul is dead in backward
    assert full.num_remat_regions == (1 if use_scan else L)


def test_saving_the_only_live_matmul_leaves_nothing_to_recompute():
    saved = trace(mlp_step("save(h)"), *MLP_ARGS)
    assert saved.remat_flops == 0
    assert saved.num_remat_regions == 1
    assert [(name.name, name.shape, name.dtype, name.count) for name in saved.names] == [("h", (B, F), "float32", L)]


def test_a_scan_of_16_matmuls_costs_as_much_as_16_matmuls():
    def scanned(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    def unrolled(x, w):
        for layer in range(16):
            x = x @ w[layer]
        return x

    args = (shape(B, D), shape(16, D, D))
    assert trace(scanned, *args).flops == trace(unrolled, *args).flops == 16 * 2 * B * D * D


def test_nested_scans_multiply():
    def nested(x, w):
        inner = functools.partial(jax.lax.scan, lambda x, _: (x @ w, None), length=3)
        return jax.lax.scan(lambda x, _: (inner(x)[0], None), x, length=5)[0]

    assert trace(nested, shape(B, D), shape(D, D)).flops == 15 * 2 * B * D * D


def test_vmap_counts_every_instance():
    assert trace(jax.vmap(jnp.dot), shape(5, B, D), shape(5, D, F)).flops == 5 * MATMUL


def test_a_fori_loop_counts_its_trips_and_a_while_loop_leaves_a_note():
    fori = trace(lambda x, w: jax.lax.fori_loop(0, 7, lambda _, x: x @ w, x), shape(B, D), shape(D, D))
    loop = trace(lambda x, w: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x), shape(B, D), shape(D, D))
    assert (fori.flops, fori.notes) == (7 * 2 * B * D * D, ())
    assert loop.flops == 2 * B * D * D
    assert "test_trace.py" in loop.notes[0]
    assert "no known trip count" in loop.notes[0]


def test_a_conditional_counts_its_most_expensive_branch():
    def step(x, w):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x), lambda x: checkpoint_name(x @ w, "big") @ w, x)

    found = trace(step, shape(B, D), shape(D, D))
    assert found.flops == 2 * 2 * B * D * D
    assert [(name.name, name.count) for name in found.names] == [("big", 1)]


def test_dead_code_counts_nothing():
    def step(x, w):
        x, _dead = jax.lax.scan(lambda x, _: (jnp.sin(x), x @ w), x, length=3)
        (x, _) = jax.lax.scan(lambda carry, _: ((jnp.sin(carry[0]), carry[1] @ w), None), (x, x), length=3)[0]
        return x

    assert trace(step, shape(B, D), shape(D, D)).flops == 0


def test_work_inside_shard_map_counts_on_every_shard():
    mesh = Mesh(jax.devices()[:8], ("data",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    def sharded(x, w):
        return checkpoint_name(x @ w, "y")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    def replicated(x, w):
        return x @ w

    args = (shape(B, D), shape(D, F))
    assert trace(sharded, *args).flops == MATMUL // 8
    assert trace(sharded, *args).names[0].shape == (B, F)  # global
    assert trace(replicated, *args).flops == MATMUL
    assert trace(replicated, *args).num_devices == 8


def test_flops_are_per_device_of_the_arguments_mesh():
    sharding = NamedSharding(Mesh(jax.devices()[:4], ("data",)), P("data"))
    found = trace(jnp.dot, shape(B, D, sharding=sharding), shape(D, F))
    assert (found.flops, found.num_devices) == (MATMUL // 4, 4)


def test_convolutions_count_only_positions_that_read_data():
    def conv(x, k, **options):
        return jax.lax.conv_general_dilated(x, k, dimension_numbers=("NWC", "WIO", "NWC"), **options)

    args = (shape(2, 8, 3), shape(3, 3, 5))
    padded = functools.partial(conv, window_strides=(1,), padding="SAME")
    assert trace(padded, *args).flops == 2 * (2 * 3 * 5) * (8 * 3 - 2)
    dilated = functools.partial(conv, window_strides=(1,), padding=[(2, 2)], lhs_dilation=(2,))
    assert trace(dilated, *args).flops == 2 * (2 * 3 * 5) * (8 * 3)  # every element meets every tap once
    grouped = functools.partial(conv, window_strides=(1,), padding="VALID", feature_group_count=3)
    assert trace(grouped, shape(2, 8, 3), shape(3, 1, 6)).flops == 2 * (2 * 1 * 6) * (6 * 3)


def test_the_gradients_of_a_convolution_cost_as_much_as_itself():
    def step(x, k):
        return jax.grad(lambda x, k: jax.lax.conv(x, k, (2, 2), "SAME").sum(), argnums=(0, 1))(x, k)

    args = (shape(2, 3, 9, 9), shape(5, 3, 3, 3))
    forward = trace(lambda x, k: jax.lax.conv(x, k, (2, 2), "SAME"), *args).flops
    assert forward == 2 * 2 * 3 * 5 * (5 * 3 - 2) ** 2
    assert trace(step, *args).flops == 2 * forward  # linear: its value is not needed


def test_grouped_matmuls_cost_tokens_not_groups():
    def step(x, w, sizes):
        return jax.value_and_grad(lambda x, w: jnp.sin(jax.lax.ragged_dot(x, w, sizes)).sum(), argnums=(0, 1))(x, w)

    args = (shape(B, D), shape(3, D, F), shape(3, dtype="int32"))
    assert trace(jax.lax.ragged_dot, *args).flops == MATMUL
    assert trace(step, *args).flops == 3 * MATMUL


def test_full_remat_of_a_gpt_block_recomputes_8_of_12_units_and_attention():
    seq, heads = 8, 2

    def block(x, p):
        q, k, v = (checkpoint_name((x @ p[name]).reshape(B, seq, heads, D // heads), name) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, seq, D)
        x = x + context @ p["o"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def step(params, x):
        wrapped = remat(block, "full", prevent_cse=False)
        return jax.value_and_grad(lambda params: jax.lax.scan(lambda x, p: (wrapped(x, p), None), x, params)[0].sum())(params)

    params = {name: shape(L, D, D) for name in "qkvo"} | {"up": shape(L, D, 4 * D), "down": shape(L, 4 * D, D)}
    unit, attention = 2 * B * seq * D * D, 2 * B * seq * seq * D
    found = trace(step, params, shape(B, seq, D))
    assert found.remat_flops == L * (8 * unit + 2 * attention)
    # The first layer's input gets no gradient outside the loop, but the loop makes one for every layer.
    assert found.flops == L * (3 * 12 * unit + 3 * 2 * attention) + found.remat_flops


def test_an_outer_region_recomputes_the_inner_ones_again():
    inner = remat(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w), "full")

    def step(x, w):
        outer = remat(lambda x, w: inner(inner(x, w), w), "full")
        return jax.value_and_grad(lambda x: outer(x, w).sum())(x)

    matmul = 2 * B * D * D
    found = trace(step, shape(B, D), shape(D, D))
    # Forward 4, backward 4; the outer region runs the first block once more, both inner ones their two matmuls.
    assert found.remat_flops == (2 + 2 * 2) * matmul
    assert found.flops == (4 + 4) * matmul + found.remat_flops


@pytest.fixture
def _remat3():
    before = jax.config.jax_remat3  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.usefixtures("_remat3")
def test_the_new_remat_implementation_is_read_too():
    none = trace(mlp_step("none"), *MLP_ARGS)
    full = trace(mlp_step("full"), *MLP_ARGS)
    assert (none.remat_flops, none.num_remat_regions) == (0, 0)
    assert (full.remat_flops, full.num_remat_regions) == (L * MATMUL, 1)
    assert [(name.name, name.shape, name.count) for name in full.names] == [("h", (B, F), L)]


def test_our_loops_scopes_tell_the_phase():
    @jax.custom_vjp
    def layer(x, w):
        return jnp.sin(x @ w)

    def forward(x, w):
        with jax.named_scope("remat_kit.forward"):
            return layer(x, w), (x, w)

    def backward(saved, ct):
        with jax.named_scope("remat_kit.recompute"):
            _, vjp = jax.vjp(lambda x, w: jnp.sin(x @ w), *saved)
        with jax.named_scope("remat_kit.backward"):
            return vjp(ct)

    layer.defvjp(forward, backward)

    def step(x, w):
        return jax.value_and_grad(lambda x, w: layer(x, w).sum(), argnums=(0, 1))(x, w)

    graph = trace_graph(Step(fn=step, args=(shape(B, D), shape(D, F))))
    dots = [op.phase for op in graph.ops if op.kind == "dot_general" and op.is_live]
    assert dots == [Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD, Phase.BACKWARD]
    assert len(graph.regions) == 1


def test_the_traced_object_lowers_with_donation():
    traced, _ = trace_step(Step(fn=lambda x: x + 1, args=(shape(B, D),), donate=(0,)))
    assert "tf.aliasing_output" in traced.lower().as_text() or "jax.buffer_donor" in traced.lower().as_text()
