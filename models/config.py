"""What a decoder-only transformer is: GPT-2 or Llama 3, by one frozen record.

Sizes are those of the published models: GPT-2 (Radford et al., 2019; 124M, 355M, 774M, 1.5B) and Llama 3 (Grattafiori et al.,
2024; 8B, 70B). The `tiny` ones keep every part of their family and are made for tests. No JAX here.
"""

from dataclasses import dataclass
from enum import StrEnum


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
