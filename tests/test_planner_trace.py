"""Blocks of traced steps: the planner's recompute FLOPs against those that JAX really traces under the same policy."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from remat_kit import remat
from remat_kit.errors import StepError
from remat_kit.planner.choices import all_choices, layer_choices
from remat_kit.planner.from_trace import Rates, block_graph, layer_loops
from remat_kit.planning import Objective
from remat_kit.step import Stack, Step
from remat_kit.trace import trace_graph, trace_step

L, B, T, D, F = 6, 2, 8, 16, 32
RATES = Rates(flops_per_s=1e12, bytes_per_s=1e12)


def block(p, x):
    """Attention with named parts and a gated MLP; some names are worth nothing."""
    x = checkpoint_name(x, "block_in")
    n = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    q, k, v = (checkpoint_name(n @ p[name], name) for name in "qkv")
    weights = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2), axis=-1)
    a = checkpoint_name(weights @ v, "attn")
    x = x + checkpoint_name(a @ p["o"], "attn_out")
    gate, up = checkpoint_name(x @ p["gate"], "gate"), checkpoint_name(x @ p["up"], "up")
    return x + checkpoint_name((jax.nn.silu(gate) * up) @ p["down"], "down")


SHAPES = {"q": (D, D), "k": (D, D), "v": (D, D), "o": (D, D), "gate": (D, F), "up": (D, F), "down": (F, D)}


def step(policy, *, body=block, shapes=SHAPES, num_layers=L, micro=1):
    layer = remat(body, policy, prevent_cse=False)

    def loss(params, x):
        return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0].sum()

    def whole(params, xs):
        grads = jax.lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None), params, xs)[0]
        return grads if micro > 1 else jax.grad(loss)(params, xs[0])

    params = {name: jax.ShapeDtypeStruct((num_layers, *shape), "float32") for name, shape in shapes.items()}
    return Step(fn=whole, args=(params, jax.ShapeDtypeStruct((micro, B, T, D), "float32")))


def test_recompute_flops_are_those_that_jax_traces_under_every_policy():
    loop = block_graph(trace_graph(step("none")), num_layers=L, rates=RATES)
    assert loop.calls == L
    names = ("q", "k", "v", "attn", "attn_out", "gate", "up", "down")
    assert set(loop.block.names) >= set(names) - {"down"}
    costs = {frozenset(choice.saved): choice.flops for choice in all_choices(loop.block)}
    subsets = [
        (),
        *((name,) for name in names[:-1]),
        ("q", "k"),
        ("q", "k", "v"),
        ("gate", "up"),
        ("attn", "gate", "up"),
        names[:-1],
    ]
    for kept in subsets:
        policy = f"save({','.join(kept)})" if kept else "full"
        assert costs[frozenset(kept)] * L == trace_step(step(policy))[1].remat_flops, policy


def test_the_input_of_a_layer_is_always_kept_and_no_choice():
    found = block_graph(trace_graph(step("none")), num_layers=L, rates=RATES).block
    assert found.input_names == ("block_in",)
    assert "block_in" not in found.names
    assert found.input_bytes == 4 * B * T * D
    assert {name for name in found.names if found.reads(name)} >= {"q", "v", "gate", "up"}
    assert not found.reads("attn_out")


def test_kept_bytes_are_those_of_the_named_values():
    found = block_graph(trace_graph(step("none")), num_layers=L, rates=RATES).block
    token = 4 * B * T
    assert [found.name_bytes(name) for name in ("q", "attn", "gate")] == [token * D, token * D, token * F]
    assert found.input_bytes == token * D


def test_names_that_spare_nothing_are_no_choice():
    found = block_graph(trace_graph(step("none")), num_layers=L, rates=RATES).block
    kept = {name for choice in layer_choices(found, objective=Objective.FLOPS) for name in choice.saved}
    assert {"q", "k", "v", "gate", "up"} <= kept
    assert not kept & {"block_in", "down"}


def test_micro_batches_run_the_loop_several_times():
    loop = block_graph(trace_graph(step("none", micro=3)), num_layers=L, rates=RATES)
    assert loop.calls == 3 * L
    assert max(choice.flops for choice in all_choices(loop.block)) * 3 * L == trace_step(step("full", micro=3))[1].remat_flops


def test_an_inner_loop_is_one_operation():
    def looped(p, x):
        y = jax.lax.fori_loop(0, 5, lambda _, y: jnp.tanh(y @ p["q"]), x)
        return x + checkpoint_name(y, "y") @ p["o"]

    traced = trace_graph(step("none", body=looped, shapes={"q": (D, D), "o": (D, D)}))
    loop = block_graph(traced, num_layers=L, rates=RATES)
    assert loop.calls == L
    assert max(choice.flops for choice in all_choices(loop.block)) == 5 * 2 * B * T * D * D


def test_seconds_are_the_roofline():
    found = block_graph(trace_graph(step("none")), num_layers=L, rates=Rates(flops_per_s=1e3, bytes_per_s=1e30)).block
    full = next(choice for choice in all_choices(found) if not choice.saved)
    assert full.seconds == pytest.approx(full.flops / 1e3)
    slow = block_graph(trace_graph(step("none")), num_layers=L, rates=Rates(flops_per_s=1e30, bytes_per_s=1.0)).block
    assert next(choice for choice in all_choices(slow) if not choice.saved).seconds > found.name_bytes("gate")


def test_a_step_without_such_a_loop_is_refused():
    traced = trace_graph(step("none"))
    with pytest.raises(StepError, match="no loop over 7 layers keeps values for the backward pass"):
        block_graph(traced, num_layers=7, rates=RATES)
    assert len(layer_loops(traced, rates=RATES)) == 1


def test_a_single_layer_is_called_no_loop():
    args = (jax.ShapeDtypeStruct((4, 4), "float32"),)
    single = Step(fn=jax.grad(lambda w: jnp.tanh(w).sum()), args=args, stacks=(Stack(name="layers", num_layers=1),))
    with pytest.raises(StepError, match="this stack has 1 layer, and a single layer is no loop"):
        block_graph(trace_graph(single), num_layers=1, rates=RATES)


def test_every_pair_of_names_costs_what_it_should():
    """Recomputation never grows when more is kept."""
    found = block_graph(trace_graph(step("none")), num_layers=L, rates=RATES).block
    costs = {frozenset(choice.saved): choice.flops for choice in all_choices(found)}
    for kept, more in itertools.product(list(costs)[:40], list(costs)[:40]):
        if kept < more:
            assert costs[more] <= costs[kept]


@pytest.mark.parametrize("policy", ["full", "dots_no_batch"])
def test_a_model_without_names_is_planned_by_the_rule_for_its_matmuls(policy):
    def nameless(p, x):
        q, k = x @ p["q"], x @ p["k"]
        x = x + jnp.einsum("bts,bsd->btd", jnp.sin(jnp.einsum("btd,bsd->bts", q, k)), jnp.sin(x @ p["v"]))
        return x + jnp.sin(x @ p["gate"]) @ p["down"]

    shapes = {name: SHAPES[name] for name in ("q", "k", "v", "gate", "down")}
    found = block_graph(trace_graph(step("none", body=nameless, shapes=shapes)), num_layers=L, rates=RATES).block
    assert found.names == found.rule_names == ("dots_no_batch",)  # not the scores, which have a batch dimension
    assert found.name_bytes("dots_no_batch") == 4 * B * T * (3 * D + F)
    costs = {str(choice.policy): choice.flops for choice in all_choices(found)}
    assert costs[policy] * L == trace_step(step(policy, body=nameless, shapes=shapes))[1].remat_flops
