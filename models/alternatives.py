"""What else could make a step fit, for `remat-kit plan`: other values of the factory's own options, most harmless first.

Micro-batches and a smaller chunk of the loss change no result but rounding; nested groups cost another forward pass; adapters
train something else.
"""

from typing import TYPE_CHECKING

from models.config import DecoderConfig
from remat_kit import Alternative

if TYPE_CHECKING:
    from models.steps import StepOptions

SMALLER_CHUNK = 4
LORA_RANK = 16


def alternatives(config: DecoderConfig, options: "StepOptions", *, num_shards: int) -> tuple[Alternative, ...]:
    """Options that need less memory than those given.

    Args:
        config: The model; experts are neither adapted nor nested here.
        options: Those given.
        num_shards: Parts that the batch is split into over the devices.
    """
    found = []
    rows = options.batch // num_shards
    if rows > options.accumulate:
        found.append(_of(f"{rows} micro-batches, a row of each device at a time", accumulate=rows))
    if options.chunk >= 2 * SMALLER_CHUNK:
        smaller = options.chunk // SMALLER_CHUNK
        found.append(_of(f"the loss in chunks of {smaller} tokens instead of {options.chunk}", chunk=smaller))
    if not options.group and options.layers > 3 and config.experts is None:
        found.append(_of("nested segments: the inputs of every sqrt(layers)-th layer, one more forward pass", group="sqrt"))
    if options.adapter is None and config.experts is None:
        text = f"adapters of rank {LORA_RANK} on the frozen model in 4 bits, which trains something else"
        found.append(_of(text, lora_rank=LORA_RANK, frozen="nf4"))
    return tuple(found)


def _of(text: str, **options: int | str) -> Alternative:
    return Alternative(text=text, options={name: str(value) for name, value in options.items()})
