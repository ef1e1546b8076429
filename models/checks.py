"""What every factory checks of its options before it builds anything."""

from models.config import DecoderConfig
from models.sharding import BATCH, TENSOR, Layout
from remat_kit import StepError


def check_counts(**counts: int) -> None:
    """Raises a `StepError` for an option below 1."""
    for name, count in counts.items():
        if count < 1:
            raise StepError(f"{name}={count}: it must be at least 1.")


def check_layout(config: DecoderConfig, layout: Layout, *, batch: int, mesh: str) -> None:
    """Raises a `StepError` where the batch or the model can't be split over the mesh."""
    parts = layout.axis_size(BATCH)
    if batch % parts:
        near = max(parts, batch - batch % parts)
        raise StepError(
            f"batch={batch} can't be split over data x fsdp = {parts} devices; give a multiple of {parts}, like batch={near}."
        )
    tensor = layout.axis_size(TENSOR)
    for what, count in (("key/value heads", config.num_kv_heads), ("MLP width", config.d_ff)):
        if count % tensor:
            raise StepError(f"mesh={mesh!r}: tensor:{tensor} does not divide the model's {what}, {count}; give a divisor.")
