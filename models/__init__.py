"""Decoder-only transformers in Flax Linen whose every interesting value is named, and training steps made of them.

`models:gpt2_small` and its siblings are step factories for `remat-kit` (`models/steps.py`); the parts they are made of
(`Decoder`, `loss_fn`, `make_optimizer`, `init_state`, `train_step`) are what a training loop imports.
"""

from models.config import DecoderConfig
from models.decoder import Decoder, Runtime, roles
from models.loss import chunked_cross_entropy
from models.steps import (
    StepOptions,
    gpt2_large,
    gpt2_medium,
    gpt2_small,
    gpt2_tiny,
    gpt2_xl,
    llama3_8b,
    llama3_70b,
    llama3_tiny,
    make_step,
)
from models.training import TrainState, init_state, loss_fn, make_optimizer, train_step

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Runtime",
    "StepOptions",
    "TrainState",
    "chunked_cross_entropy",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_small",
    "gpt2_tiny",
    "gpt2_xl",
    "init_state",
    "llama3_8b",
    "llama3_70b",
    "llama3_tiny",
    "loss_fn",
    "make_optimizer",
    "make_step",
    "roles",
    "train_step",
]
