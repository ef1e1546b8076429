"""The mixture of experts against loops and a dense formula; routing that no policy decides again."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models.steps
from models.config import MOE_TINY, Experts
from models.experts import ROUTING, ExpertMlp, route
from models.sharding import Layout
from remat_kit import StepError
from tests.decoders import QUICK, count_primitive, make
from tests.model_oracles import assert_same_gradients, kept_names, run

B, T, D = 2, 12, 8
LAYOUT = Layout(devices=())
MIXED = "full*1 | save(q,k,v)*1"


def small(**experts):
    return dataclasses.replace(MOE_TINY, d_model=D, d_ff=6, experts=Experts(num_experts=4, top_k=2, **experts))


def mixture(config):
    """A mixture of random weights, and a random input."""
    module = ExpertMlp(config, jnp.dtype("float32"), LAYOUT)
    x_BTD = jax.random.normal(jax.random.key(1), (B, T, D))
    params = jax.jit(module.init)(jax.random.key(0), x_BTD)["params"]
    return module, jax.tree.map(lambda leaf: 20 * leaf, params), x_BTD


def choices_by_hand(params, x_BTD, experts, num_slots):
    """Which experts each token goes to, and which of them have a slot for it: a loop over tokens in order."""
    logits_BTE = np.asarray(x_BTD @ params["router"])
    chosen_BTE, kept_BTE = np.zeros(logits_BTE.shape), np.zeros(logits_BTE.shape)
    for b in range(B):
        taken = [0] * experts.num_experts
        for t in range(T):
            for e in np.argsort(-logits_BTE[b, t], kind="stable")[: experts.top_k]:
                chosen_BTE[b, t, e], kept_BTE[b, t, e] = 1, taken[e] < num_slots
                taken[e] += 1
    return chosen_BTE, kept_BTE


def by_hand(params, x_BTD, experts, chosen_BTE, kept_BTE):
    """Every expert on every token, and of that what was chosen and kept."""
    logits_BTE = x_BTD @ params["router"]
    every_BTEF = jax.nn.silu(jnp.einsum("btd,edf->btef", x_BTD, params["gate"]))
    every_BTEF = every_BTEF * jnp.einsum("btd,edf->btef", x_BTD, params["up"])
    every_BTED = jnp.einsum("btef,efd->bted", every_BTEF, params["down"])
    share_BTE = jax.nn.softmax(jnp.where(chosen_BTE, logits_BTE, -jnp.inf))
    balance_B = experts.num_experts / experts.top_k * (chosen_BTE.mean(1) * jax.nn.softmax(logits_BTE).mean(1)).sum(-1)
    return jnp.einsum("bted,bte->btd", every_BTED, share_BTE * kept_BTE), balance_B


@pytest.mark.parametrize("capacity", [pytest.param(4.0, marks=pytest.mark.slow), 0.75])
def test_the_mixture_is_what_loops_make_of_it(capacity):
    config = small(capacity=capacity)
    module, params, x_BTD = mixture(config)
    choices = choices_by_hand(params, x_BTD, config.experts, min(T, math.ceil(capacity * T * 2 / 4)))
    assert (choices[0] != choices[1]).any() == (capacity < 1), "some tokens are dropped where there are too few slots"

    def value(apply):
        def loss(params, x_BTD):
            y_BTD, balance_B = apply(params, x_BTD)
            return (y_BTD**2).sum() + balance_B.sum(), (y_BTD, balance_B)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True), compiler_options=QUICK)(params, x_BTD)

    found = value(lambda params, x: module.apply({"params": params}, x))
    expected = value(lambda params, x: by_hand(params, x, config.experts, *choices))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


def test_slots_and_choices_are_inverse():
    probabilities = jax.nn.softmax(3 * jax.random.normal(jax.random.key(2), (B, T, 4)))
    chosen, slot, choice = map(
        np.asarray, jax.jit(route, static_argnums=1)(probabilities, Experts(num_experts=4, top_k=2, capacity=0.5))
    )
    num_slots = 4 * math.ceil(0.5 * T * 2 / 4)
    assert (slot == num_slots).any(), "some choices are dropped here"
    for b in range(B):
        pairs = [(n, s) for n, s in enumerate(slot[b]) if s < num_slots]
        assert all(choice[b, s] == n and s // (num_slots // 4) == chosen[b].ravel()[n] for n, s in pairs)
        assert (choice[b] < T * 2).sum() == len(pairs) == len({s for _, s in pairs})


def test_a_token_does_not_depend_on_later_ones():
    module, params, x_BTD = mixture(small(capacity=0.5))
    other_BTD = x_BTD.at[:, T // 2 :].set(jax.random.normal(jax.random.key(3), (B, T - T // 2, D)))
    apply = jax.jit(module.apply)
    y_BTD, z_BTD = (apply({"params": params}, x)[0] for x in (x_BTD, other_BTD))
    np.testing.assert_array_equal(y_BTD[:, : T // 2], z_BTD[:, : T // 2])
    assert not np.array_equal(y_BTD, z_BTD)


PLANS = ("full", "save(q,k,v)", "dots", "dots_no_batch", "minimal", "dots+cheap(8)", "full*1 | none*1", MIXED)


@pytest.mark.parametrize("plan", PLANS)
def test_routing_is_decided_once_and_kept_under_every_policy(plan):
    """In the jaxpr, where policies are decided: a top_k, a queue and its inverse per segment, none in the backward pass."""
    step = make("moe_tiny", plan)
    program = jax.jit(step.fn).trace(*step.args).jaxpr
    num_segments = 1 + plan.count("|")
    assert count_primitive(program, "top_k") == count_primitive(program, "cumsum") == num_segments
    assert ROUTING in kept_names(step) or "none" in plan


def test_without_that_rule_full_would_decide_again(monkeypatch):
    monkeypatch.setattr(models.steps, "keep_routing", lambda plan: plan)
    step = make("moe_tiny", "full")
    assert count_primitive(jax.jit(step.fn).trace(*step.args).jaxpr, "top_k") == 2


def test_gradients_agree():
    assert_same_gradients("moe_tiny", MIXED)


@pytest.mark.slow
def test_micro_batches_have_the_loss_of_the_batch():
    """The balance of experts too, as it is a mean over sequences."""
    (_, whole, grads), (_, parts, sums) = run("moe_tiny", "full"), run("moe_tiny", "full", accumulate=2)
    assert float(whole["loss"]) == pytest.approx(float(parts["loss"]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), grads, sums)


@pytest.mark.slow
def test_what_a_batch_is_judged_by_leaves_the_balance_out():
    step = make("moe_tiny")
    state, batch = step.init(jax.random.key(0))
    loss = float(jax.jit(step.fn, compiler_options=QUICK)(state, batch)[1]["loss"])
    balance = loss - float(jax.jit(step.evaluate, compiler_options=QUICK)(state.params, batch))
    assert balance == pytest.approx(0.01, rel=0.2), "experts are about evenly used at first: the loss is 0.01 x 1"


def test_has_as_many_parameters_as_published():
    shapes = jax.tree.leaves(make("mixtral_8x7b").args[0].params)
    assert sum(math.prod(leaf.shape) for leaf in shapes) == 46_702_792_704


def test_experts_have_no_adapters():
    with pytest.raises(StepError, match="lora_rank: experts have no adapters here; give lora_rank=0"):
        make("moe_tiny", lora_rank=4)
