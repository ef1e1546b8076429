"""Where a run starts from: one configuration per model of `models/`, chosen by `--model`, or by `--preset` for another model.

Learning rates and batches are those of the papers (GPT-2: Brown et al., 2020, table 2.1, its sizes; Llama 3: Grattafiori et al.,
2024), shrunk for the tiny ones, which are to learn on two CPU cores in minutes.
"""

from collections.abc import Mapping

from train.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig

TEXT = DataConfig()
# 1797 in all: with two percent, hardly any would be held out.
DIGITS = DataConfig(data="digits", held_out=0.2)


def _preset(
    model: str, *, batch: int, seq: int | None, learning_rate: float, steps: int, every: int = 1000, data: DataConfig = TEXT
) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(model=model, batch=batch, seq=seq),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
        data=data,
        run=RunConfig(steps=steps, eval_every=every, checkpoint_every=every),
    )


PRESETS: Mapping[str, TrainConfig] = {
    "gpt2_tiny": _preset("gpt2_tiny", batch=16, seq=64, learning_rate=3e-3, steps=1500, every=500),
    "llama3_tiny": _preset("llama3_tiny", batch=16, seq=64, learning_rate=3e-3, steps=1500, every=500),
    "gpt2_nnx_tiny": _preset("gpt2_nnx_tiny", batch=16, seq=64, learning_rate=3e-3, steps=1500, every=500),
    "moe_tiny": _preset("moe_tiny", batch=16, seq=64, learning_rate=3e-3, steps=1500, every=500),
    "vit_tiny": _preset("vit_tiny", batch=32, seq=None, learning_rate=1e-3, steps=1000, every=500, data=DIGITS),
    "gpt2_small": _preset("gpt2_small", batch=32, seq=1024, learning_rate=6e-4, steps=20_000),
    "gpt2_medium": _preset("gpt2_medium", batch=32, seq=1024, learning_rate=3e-4, steps=20_000),
    "gpt2_large": _preset("gpt2_large", batch=32, seq=1024, learning_rate=2.5e-4, steps=20_000),
    "gpt2_xl": _preset("gpt2_xl", batch=32, seq=1024, learning_rate=2e-4, steps=20_000),
    "llama3_8b": _preset("llama3_8b", batch=32, seq=2048, learning_rate=3e-4, steps=20_000),
    "llama3_70b": _preset("llama3_70b", batch=128, seq=4096, learning_rate=1.5e-4, steps=20_000),
}
DEFAULT = "gpt2_tiny"
