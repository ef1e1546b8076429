"""What a source of examples is, and how one is found: `--data text`, `digits`, or `module:function` for your own.

A source is a function `(config, batch) -> Splits`: it is told the abstract batch of the step (its names, shapes and dtypes, B
rows first) and returns examples that are addressed by number: a mapping of the same names to arrays without the B. Order,
batches, processes and resuming are `train.feed`'s work, so a source needs no state.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from remat_kit.errors import nearest
from train.config import DataConfig
from train.errors import DataError

Example: TypeAlias = Mapping[str, np.ndarray]


class Examples(Protocol):
    """Examples by number; the same number always gives the same example."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int) -> Example:
        """One of them, 0 <= index < len."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Examples to train on and others to evaluate on.

    Attributes:
        train: To train on.
        held_out: To evaluate on; none of them is in `train`.
        num_labels: Every label is below it.
        fingerprint: Of all examples: a run is only resumed on the same ones.
        unit: What a weight counts: tokens, images ….
        floor: Loss of a model that knows nothing of its input, on `held_out`, in nats; None = not known.
        floor_name: What that model is.
        notes: What a reader should know.
    """

    train: Examples
    held_out: Examples
    num_labels: int
    fingerprint: str
    unit: str
    floor: float | None = None
    floor_name: str = ""
    notes: tuple[str, ...] = ()


Batch: TypeAlias = Mapping[str, Any]
Source: TypeAlias = Callable[[DataConfig, Batch], Splits]

SOURCES: Mapping[str, str] = {"text": "train.text:text", "digits": "train.digits:digits"}


def load_splits(config: DataConfig, batch: Batch, *, num_labels: int | None) -> Splits:
    """Finds the source, asks it for examples and checks that the step can take them.

    Args:
        config: Which source, and what it is told.
        batch: Abstract arrays of the step's batch.
        num_labels: Labels must be below it; None = the step doesn't say.

    Raises:
        DataError: No such source, or its examples are not what the step takes.
    """
    splits = _find(config.data)(config, batch)
    if not len(splits.train) or not len(splits.held_out):
        raise DataError(f"--data {config.data}: {len(splits.train)} examples to train on, {len(splits.held_out)} held out.")
    if num_labels is not None and splits.num_labels > num_labels:
        raise DataError(
            f"--data {config.data} has labels below {splits.num_labels}, the model knows {num_labels}: choose another "
            "tokenizer or another model."
        )
    _check_example(splits.train[0], batch, config.data)
    return splits


def _find(name: str) -> Source:
    spelled = SOURCES.get(name, name)
    module, _, function = spelled.partition(":")
    if not function:
        raise DataError(f"--data {name}: there is {', '.join(SOURCES)}, or module:function.{nearest(name, SOURCES)}")
    try:
        return getattr(importlib.import_module(module), function)
    except (ModuleNotFoundError, AttributeError) as error:
        raise DataError(f"--data {name}: {error}.") from None


def _check_example(example: Example, batch: Batch, name: str) -> None:
    wanted = {key: (tuple(leaf.shape[1:]), np.dtype(leaf.dtype).name) for key, leaf in batch.items()}
    found = {key: (value.shape, value.dtype.name) for key, value in example.items()}
    if wanted != found:
        raise DataError(f"--data {name}: the step takes {_words(wanted)}; the source gives {_words(found)}.")


def _words(shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (shape, dtype) in sorted(shapes.items()))
