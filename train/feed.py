"""From examples to batches on the devices: order, shuffling, resuming, and each process's own rows.

Global batch k holds the shuffled examples kB … kB + B - 1 whatever the number of processes, and a process reads only the rows
that its devices hold, so that one process and several see the same batches. Grain shuffles (every pass anew), reads ahead in
threads and knows where it is; its position counts global batches and is the same on every process.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain
import jax
import numpy as np

from train.data import Batch, Example, Examples

# Threads that read examples of one process, and batches that lie ready.
_READING = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)


@dataclass(frozen=True, slots=True)
class _LocalRows:
    """Rows of the global batches that one process holds, one after the other."""

    examples: Any
    rows: tuple[int, ...]
    num_rows: int
    num_batches: int

    def __len__(self) -> int:
        return self.num_batches * len(self.rows)

    def __getitem__(self, index: int) -> Example:
        number, row = divmod(index, len(self.rows))
        return self.examples[number * self.num_rows + self.rows[row]]


class Feed:
    """Batches to train on, for this process."""

    def __init__(self, examples: Examples, batch: Batch, *, num_batches: int, seed: int) -> None:
        """Starts at the first batch.

        Args:
            examples: All of them; they are repeated, each pass in another order.
            batch: Abstract arrays of the step's batch, with shardings.
            num_batches: Batches of the whole run.
            seed: Of the order.
        """
        rows = local_rows(batch)
        shuffled = grain.MapDataset.source(examples).shuffle(seed=seed).repeat()
        local = _LocalRows(shuffled, rows, _num_rows(batch), num_batches)
        batches = grain.MapDataset.source(local).batch(len(rows), drop_remainder=True)
        self._batch = batch
        self._batches: Any = iter(batches.to_iter_dataset(_READING))

    def __iter__(self) -> Iterator[Mapping[str, jax.Array]]:
        """Itself."""
        return self

    def __next__(self) -> Mapping[str, jax.Array]:
        """The next batch, on the devices."""
        return place(next(self._batches), self._batch)

    @property
    def position(self) -> str:
        """Where it is, as a text."""
        return json.dumps(self._batches.get_state())

    def go_to(self, position: str) -> None:
        """Goes on from a position that a feed of the same examples, batch and seed gave."""
        self._batches.set_state(json.loads(position))


def held_out_batches(examples: Examples, batch: Batch, *, num_batches: int) -> Iterator[Mapping[str, jax.Array]]:
    """Batches to evaluate on, always the same: the first examples, in order; rows behind the last one weigh nothing.

    Args:
        examples: What was held out.
        batch: Abstract arrays of the step's batch, with shardings.
        num_batches: At most so many.
    """
    num_rows, rows = _num_rows(batch), local_rows(batch)
    for number in range(min(num_batches, -(-len(examples) // num_rows))):
        parts = [_example_or_nothing(examples, number * num_rows + row) for row in rows]
        yield place({name: np.stack([part[name] for part in parts]) for name in batch}, batch)


def _example_or_nothing(examples: Examples, index: int) -> Example:
    if index < len(examples):
        return examples[index]
    return {**examples[0], "weights": np.zeros_like(examples[0]["weights"])}


def _num_rows(batch: Batch) -> int:
    return batch["weights"].shape[0]


def local_rows(batch: Batch) -> tuple[int, ...]:
    """Rows of the batch that this process's devices hold, in order, each once."""
    weights = batch["weights"]
    places = weights.sharding.addressable_devices_indices_map(weights.shape)
    return tuple(sorted({row for index in places.values() for row in range(weights.shape[0])[index[0]]}))


def place(rows: Mapping[str, np.ndarray], batch: Batch) -> Mapping[str, jax.Array]:
    """Puts this process's rows on its devices, as part of the global batch."""
    return {
        name: jax.make_array_from_process_local_data(leaf.sharding, np.ascontiguousarray(rows[name]), leaf.shape)
        for name, leaf in batch.items()
    }
