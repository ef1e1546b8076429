"""A mixture of experts: a router, a queue of slots per expert and sequence, and MLPs as einsums over all experts.

What the router decides is integers, all named `routing`: which experts a token goes to, the slot it gets there, and the token
that a slot holds. `keep_routing` has every policy save them, so a backward pass never decides again: a router recomputed in
another fusion may see a tie the other way, and gradients would belong to another network than the loss. Rows move by gathers
alone, forward and backward, so the result does not depend on the order of additions. Slots are given in the order of tokens:
whether a token is dropped depends on those before it only.

Legend: B batch, T tokens, D model width, F width of an expert, E experts, C slots of an expert, N = T x k choices, S = E x C.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from models.config import DecoderConfig, Experts
from models.layers import WEIGHT_INIT, project
from models.sharding import BATCH, Layout, constrain, parameter_axes
from remat_kit import StackPlan
from remat_kit.plans import Segment
from remat_kit.policy import Action, Named, Policy, Remat

ROUTING = "routing"
EXPERT_IN, EXPERT_OUT = "becd,edf->becf", "becf,efd->becd"


def keep_routing(plan: StackPlan) -> StackPlan:
    """The plan with the routing indices in every saved set."""

    def keep(policy: Policy) -> Policy:
        return Remat((*policy.rules, Named(Action.SAVE, (ROUTING,)))) if isinstance(policy, Remat) else policy

    return StackPlan(tuple(Segment(keep(segment.policy), segment.num_layers) for segment in plan.segments))


def route(probabilities_BTE: jax.Array, experts: Experts) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decides which experts each token goes to, and in which slot.

    Args:
        probabilities_BTE: Of the router.
        experts: The mixture.

    Returns:
        The chosen experts (B, T, k); the slot of each choice (B, N), S where it is dropped; and the choice that each slot holds
        (B, S), N where it is empty. All int32, named `routing`.
    """
    batch, num_tokens, num_experts = probabilities_BTE.shape
    num_slots = experts.num_slots(num_tokens)
    chosen_BTk = jax.lax.top_k(jax.lax.stop_gradient(probabilities_BTE), experts.top_k)[1]
    chosen_BN = chosen_BTk.reshape(batch, -1)
    is_chosen_BNE = chosen_BN[..., None] == jnp.arange(num_experts)
    place_BN = jnp.where(is_chosen_BNE, jnp.cumsum(is_chosen_BNE, axis=1) - 1, 0).sum(-1)
    slot_BN = jnp.where(place_BN < num_slots, chosen_BN * num_slots + place_BN, num_experts * num_slots)
    choice_BS = jax.vmap(lambda slot_N: _invert(slot_N, num_experts * num_slots))(slot_BN)
    return tuple(checkpoint_name(x.astype(jnp.int32), ROUTING) for x in (chosen_BTk, slot_BN, choice_BS))  # type: ignore[return-value]


def _invert(slot_N: jax.Array, num_slots: int) -> jax.Array:
    """For each slot the choice that goes there, N for none."""
    size = slot_N.shape[0]
    return jnp.full(num_slots, size).at[slot_N].set(jnp.arange(size), mode="drop")


def _rows(x_BMD: jax.Array, index_BK: jax.Array) -> jax.Array:
    """Row `index` of each x, zeros where it lies beyond the last."""
    return jax.vmap(lambda x_MD, index_K: x_MD.at[index_K].get(mode="fill", fill_value=0))(x_BMD, index_BK)


def _tokens_of_slots(x_BTD: jax.Array, slot_BN: jax.Array, choice_BS: jax.Array) -> jax.Array:
    """The token of each slot (B, S, D), zeros in empty ones."""
    return _rows(x_BTD, choice_BS // (slot_BN.shape[1] // x_BTD.shape[1]))


def _dispatch_forward(x_BTD: jax.Array, slot_BN: jax.Array, choice_BS: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
    # Not by calling `dispatch`: policies do not look into a custom VJP that is called.
    return _tokens_of_slots(x_BTD, slot_BN, choice_BS), (slot_BN, x_BTD.shape[1])


def _dispatch_backward(saved: tuple[jax.Array, int], d_y_BSD: jax.Array) -> tuple[jax.Array, None, None]:
    slot_BN, num_tokens = saved
    d_x_BND = _rows(d_y_BSD, slot_BN)
    return d_x_BND.reshape(slot_BN.shape[0], num_tokens, -1, d_y_BSD.shape[-1]).sum(2), None, None


dispatch = jax.custom_vjp(_tokens_of_slots)
dispatch.defvjp(_dispatch_forward, _dispatch_backward)


def _results_of_choices(y_BSD: jax.Array, slot_BN: jax.Array, choice_BS: jax.Array) -> jax.Array:
    """What the expert of each choice made of its token (B, N, D), zeros for dropped ones."""
    del choice_BS
    return _rows(y_BSD, slot_BN)


def _collect_forward(y_BSD: jax.Array, slot_BN: jax.Array, choice_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _rows(y_BSD, slot_BN), choice_BS


def _collect_backward(choice_BS: jax.Array, d_y_BND: jax.Array) -> tuple[jax.Array, None, None]:
    return _rows(d_y_BND, choice_BS), None, None


collect = jax.custom_vjp(_results_of_choices)
collect.defvjp(_collect_forward, _collect_backward)


class ExpertMlp(nn.Module):
    """The mixture in place of a block's MLP.

    Attributes:
        config: The decoder, its `experts` among it.
        dtype: Of the computation; the router's is f32.
        layout: The devices.
    """

    config: DecoderConfig
    dtype: jnp.dtype
    layout: Layout

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mixture's output, and the load-balancing loss of each sequence (B,)."""
        config, experts = self.config, self.config.experts
        assert experts is not None
        batch, num_tokens, width = x_BTD.shape
        router_DE = self.param("router", WEIGHT_INIT, (width, experts.num_experts), jnp.float32)
        probabilities_BTE = jax.nn.softmax(x_BTD.astype(jnp.float32) @ router_DE)
        chosen_BTk, slot_BN, choice_BS = route(probabilities_BTE, experts)
        is_chosen_BTkE = chosen_BTk[..., None] == jnp.arange(experts.num_experts)
        share_BTk = jnp.where(is_chosen_BTkE, probabilities_BTE[:, :, None], 0.0).sum(-1)
        share_BTk /= share_BTk.sum(-1, keepdims=True)

        x_BECD = dispatch(x_BTD, slot_BN, choice_BS).reshape(batch, experts.num_experts, -1, width)
        x_BECD = constrain(x_BECD, self.layout, BATCH)
        up_BECF = checkpoint_name(self.project(x_BECD, "up", EXPERT_IN, config.d_ff), "up")
        gate_BECF = checkpoint_name(self.project(x_BECD, "gate", EXPERT_IN, config.d_ff), "gate")
        down_BECD = checkpoint_name(self.project(nn.silu(gate_BECF) * up_BECF, "down", EXPERT_OUT, width), "down")
        y_BND = collect(down_BECD.reshape(batch, -1, width), slot_BN, choice_BS)
        y_BTD = jnp.einsum("btkd,btk->btd", y_BND.reshape(batch, num_tokens, -1, width), share_BTk.astype(self.dtype))

        used_BE = is_chosen_BTkE.mean((1, 2), dtype=jnp.float32)
        return y_BTD, experts.num_experts * (used_BE * probabilities_BTE.mean(1)).sum(-1)

    def project(self, x_BECD: jax.Array, name: str, equation: str, num_features: int) -> jax.Array:
        """Each expert's projection of this name."""
        assert self.config.experts is not None
        shape = (self.config.experts.num_experts, x_BECD.shape[-1], num_features)
        kernel_EDF = self.param(name, WEIGHT_INIT, shape, jnp.float32)
        return project(x_BECD, kernel_EDF, self.layout, parameter_axes((name,), shape, self.layout), equation)
