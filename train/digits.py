"""Images as examples: the 1797 handwritten digits that scikit-learn ships, real scans of 8 x 8 pixels in 16 shades of grey.

They are enlarged to the images that the step takes, each pixel to a tile, so a vision transformer of any size trains on them
with nothing to download (E. Alpaydin and C. Kaynak, 1998, UCI repository). What is held out is chosen by a hash of the number.
"""

import hashlib
import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.config import DataConfig
from train.data import Batch, Example, Splits
from train.errors import DataError
from train.text import is_held_out, unigram_loss

NUM_CLASSES = 10
_DARKEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Scans of digits, enlarged when they are asked for.

    Attributes:
        scans: Of one side length, 0 to 255, uint8, (N, 8, 8).
        labels: Which digits they are, int32, (N,).
        shape: Height, width and channels of an example's image.
    """

    scans: np.ndarray
    labels: np.ndarray
    shape: tuple[int, int, int]

    def __len__(self) -> int:
        """How many."""
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        """An image, its label and a weight of 1."""
        height, width, channels = self.shape
        scan = self.scans[index]
        rows, columns = (np.arange(length) * side // length for length, side in zip((height, width), scan.shape, strict=True))
        image = np.repeat(scan[rows][:, columns, None], channels, axis=2)
        return {"images": image, "labels": self.labels[index], "weights": np.ones((), np.float32)}


def digits(config: DataConfig, batch: Batch) -> Splits:
    """The source of digits.

    Args:
        config: Says what is held out.
        batch: Of an image model: `images` of (B, height, width, channels) uint8, `labels` and `weights` of (B,).

    Raises:
        DataError: The step takes no images, scikit-learn is missing, or files were given, which digits have none of.
    """
    if "images" not in batch:
        raise DataError(f"--data digits: the step takes {', '.join(batch)}, no images; give a source of these, like --data text.")
    if config.files or config.tokenizer:
        raise DataError("--data digits: it reads neither --files nor a --tokenizer; leave them out.")
    scans, labels = _load()
    is_held = np.asarray([is_held_out(str(number), config.held_out) for number in range(len(labels))])
    shape = tuple(batch["images"].shape[1:])
    train, kept = (Digits(scans=scans[rows], labels=labels[rows], shape=shape) for rows in (~is_held, is_held))
    return Splits(
        train=train,
        held_out=kept,
        num_labels=NUM_CLASSES,
        fingerprint=hashlib.sha256(scans.tobytes() + labels.tobytes() + is_held.tobytes()).hexdigest()[:16],
        unit="images",
        floor=unigram_loss(train.labels, kept.labels, NUM_CLASSES) if len(kept) else None,
        floor_name="model that sees no image",
        notes=(f"{len(train):,} digits to train on, {len(kept):,} held out",),
    )


def _load() -> tuple[np.ndarray, np.ndarray]:
    """Scans (N, 8, 8) uint8 and labels (N,) int32."""
    try:
        found: Any = importlib.import_module("sklearn.datasets").load_digits()
    except ModuleNotFoundError:
        raise DataError("--data digits: the images are in the package scikit-learn: pip install scikit-learn.") from None
    return (found.images * (255 / _DARKEST)).astype(np.uint8), found.target.astype(np.int32)
