"""What a decoder-only transformer is: GPT-2, Llama 3 or Mixtral, by one frozen record.

Sizes are those of the published models: GPT-2 (Radford et al., 2019; 124M, 355M, 774M, 1.5B), Llama 3 (Grattafiori et al., 2024;
8B, 70B) and Mixtral (Jiang et al., 2024; 8x7B). The `tiny` ones keep every part of their family and are made for tests. No arrays
here.
"""

import dataclasses
import math
from dataclasses import dataclass
from enum import StrEnum

from remat_kit.attention import Mask


class Positions(StrEnum):
    """How a token knows where it stands."""

    LEARNED = "learned"
    ROPE = "rope"


class Norm(StrEnum):
    """Normalization before attention, before the MLP and at the end."""

    LAYER = "layer"
    RMS = "rms"


class Mlp(StrEnum):
    """The feed-forward half of a block."""

    GELU = "gelu"
    SWIGLU = "swiglu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of each MLP.

    Attributes:
        num_experts: MLPs of a block.
        top_k: Experts that each token goes to.
        capacity: Slots of an expert per sequence, as a multiple of its even share; tokens beyond pass it by.
        balance_weight: Of the load-balancing loss (Fedus et al., 2021), which is 1 when experts are evenly used.
    """

    num_experts: int
    top_k: int
    capacity: float = 1.25
    balance_weight: float = 0.01

    def num_slots(self, num_tokens: int) -> int:
        """Slots of an expert for a sequence."""
        share = math.ceil(self.capacity * num_tokens * self.top_k / self.num_experts)
        return min(num_tokens, share)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and parts of a decoder.

    Attributes:
        vocab_size: Tokens that the model knows.
        num_layers: Blocks.
        d_model: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; fewer than `num_heads` = grouped queries.
        d_ff: Inner width of the MLP.
        positions: See `Positions`.
        norm: See `Norm`.
        mlp: See `Mlp`.
        has_biases: Whether projections have a bias.
        has_tied_head: Whether the embedding is also the output head.
        max_seq: Longest sequence; None = any, as with rotary positions.
        rope_theta: Base of the rotary frequencies.
        norm_epsilon: Added to the variance.
        experts: The mixture in place of the MLP, each of width `d_ff`; None = one MLP.
        mask: Which keys a token sees.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    positions: Positions
    norm: Norm
    mlp: Mlp
    has_biases: bool
    has_tied_head: bool
    max_seq: int | None = None
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    experts: Experts | None = None
    mask: Mask = Mask.CAUSAL

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.d_model // self.num_heads


def gpt2(num_layers: int, d_model: int, num_heads: int, *, vocab_size: int = 50_257, max_seq: int = 1024) -> DecoderConfig:
    """A GPT-2: learned positions, LayerNorm, GELU, biases, tied embedding."""
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        d_ff=4 * d_model,
        positions=Positions.LEARNED,
        norm=Norm.LAYER,
        mlp=Mlp.GELU,
        has_biases=True,
        has_tied_head=True,
        max_seq=max_seq,
    )


def llama3(
    num_layers: int, d_model: int, num_heads: int, *, num_kv_heads: int = 8, d_ff: int, vocab_size: int = 128_256
) -> DecoderConfig:
    """A Llama 3: rotary positions, RMSNorm, SwiGLU, grouped queries, an output head of its own."""
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        d_ff=d_ff,
        positions=Positions.ROPE,
        norm=Norm.RMS,
        mlp=Mlp.SWIGLU,
        has_biases=False,
        has_tied_head=False,
        rope_theta=500_000.0,
    )


GPT2_TINY = gpt2(2, 64, 4, vocab_size=257, max_seq=64)
GPT2_SMALL = gpt2(12, 768, 12)
GPT2_MEDIUM = gpt2(24, 1024, 16)
GPT2_LARGE = gpt2(36, 1280, 20)
GPT2_XL = gpt2(48, 1600, 25)
LLAMA3_TINY = llama3(2, 64, 4, num_kv_heads=2, d_ff=160, vocab_size=256)
LLAMA3_8B = llama3(32, 4096, 32, d_ff=14_336)
LLAMA3_70B = llama3(80, 8192, 64, d_ff=28_672)


def mixtral(
    num_layers: int,
    d_model: int,
    num_heads: int,
    *,
    num_kv_heads: int = 8,
    d_ff: int,
    experts: Experts = Experts(num_experts=8, top_k=2),
    vocab_size: int = 32_000,
) -> DecoderConfig:
    """A Mixtral: Llama's block with a mixture of experts for its MLP."""
    dense = llama3(num_layers, d_model, num_heads, num_kv_heads=num_kv_heads, d_ff=d_ff, vocab_size=vocab_size)
    return dataclasses.replace(dense, experts=experts, rope_theta=1_000_000.0)


MOE_TINY = mixtral(2, 64, 4, num_kv_heads=2, d_ff=96, experts=Experts(num_experts=4, top_k=2), vocab_size=256)
MOE_SMALL = mixtral(12, 768, 12, num_kv_heads=4, d_ff=2048)
MIXTRAL_8X7B = mixtral(32, 4096, 32, d_ff=14_336)
