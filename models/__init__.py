"""Decoder-only transformers in Flax Linen whose every interesting value is named, and training steps made of them.

`models:gpt2_small` and its siblings are step factories for `remat-kit` (`models/steps.py`); the parts they are made of
(`Decoder`, `loss_fn`, `make_optimizer`, `init_params`, `update`) are what a training loop imports.
"""

from models.config import DecoderConfig
from models.decoder import Decoder, Runtime, roles
from models.loss import chunked_cross_entropy
from models.model_step import ModelStep, Trained, make_model_step
from models.steps import (
    StepOptions,
    gpt2_large,
    gpt2_medium,
    gpt2_nnx_small,
    gpt2_nnx_tiny,
    gpt2_small,
    gpt2_tiny,
    gpt2_xl,
    llama3_8b,
    llama3_8b_lora,
    llama3_8b_qlora,
    llama3_70b,
    llama3_tiny,
    make_step,
    mixtral_8x7b,
    moe_small,
    moe_tiny,
)
from models.training import OptimizerOptions, TrainState, init_params, loss_fn, make_optimizer, make_schedule, update
from models.vit_steps import VitOptions, make_vit_step, vit_b16, vit_l16, vit_tiny

__all__ = [
    "Decoder",
    "DecoderConfig",
    "ModelStep",
    "OptimizerOptions",
    "Runtime",
    "StepOptions",
    "TrainState",
    "Trained",
    "VitOptions",
    "chunked_cross_entropy",
    "gpt2_large",
    "gpt2_medium",
    "gpt2_nnx_small",
    "gpt2_nnx_tiny",
    "gpt2_small",
    "gpt2_tiny",
    "gpt2_xl",
    "init_params",
    "llama3_8b",
    "llama3_8b_lora",
    "llama3_8b_qlora",
    "llama3_70b",
    "llama3_tiny",
    "loss_fn",
    "make_model_step",
    "make_optimizer",
    "make_schedule",
    "make_step",
    "make_vit_step",
    "mixtral_8x7b",
    "moe_small",
    "moe_tiny",
    "roles",
    "update",
    "vit_b16",
    "vit_l16",
    "vit_tiny",
]
