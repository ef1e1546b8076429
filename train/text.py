"""Text as examples: files to tokens, tokens packed into sequences without padding. The default is Python's standard library.

Bytes are the tokens unless a tokenizer file is given; a document ends with a separator. Files are split into those to train on
and those held out by a hash of their names, so that a new file moves no other. Sequence i has the tokens [iT, iT + T] of all
documents laid end to end: T to read and, moved by one, T to predict.
"""

import hashlib
import importlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.config import DataConfig
from train.data import Batch, Example, Splits
from train.errors import DataError

# No text has it.
SEPARATOR = 0
NUM_BYTES = 256
_NOT_SOURCES = frozenset(("site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"))

Encode = Callable[[bytes], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Examples of `seq` tokens out of one long row of tokens.

    Attributes:
        tokens: All documents, end to end, of an unsigned type.
        seq: Tokens of an example.
    """

    tokens: np.ndarray
    seq: int

    def __len__(self) -> int:
        """Whole sequences; what is left at the end is never used."""
        return max(0, (len(self.tokens) - 1) // self.seq)

    def __getitem__(self, index: int) -> Example:
        """Tokens, the tokens one further as labels, and weights of 1."""
        part = self.tokens[index * self.seq : (index + 1) * self.seq + 1].astype(np.int32)
        return {"tokens": part[:-1], "labels": part[1:], "weights": np.ones(self.seq, np.float32)}


def text(config: DataConfig, batch: Batch) -> Splits:
    """The source of text.

    Args:
        config: Files, tokenizer, what is held out.
        batch: Of a language model: `tokens`, `labels` and `weights` of (B, T).

    Raises:
        DataError: No files, no tokenizer, or too little text.
    """
    if "tokens" not in batch:
        hint = ", like --data digits" if "images" in batch else ""
        raise DataError(f"--data text: the step takes {', '.join(batch)}, no tokens; give a source of these{hint}.")
    seq = batch["tokens"].shape[1]
    encode, num_labels = _encoder(config.tokenizer)
    files = list_files(config)
    held_out = {name for name, _ in files if is_held_out(name, config.held_out)}
    train = _tokens([path for name, path in files if name not in held_out], encode, num_labels)
    kept = _tokens([path for name, path in files if name in held_out], encode, num_labels)
    splits = Splits(
        train=PackedTokens(tokens=train, seq=seq),
        held_out=PackedTokens(tokens=kept, seq=seq),
        num_labels=num_labels,
        fingerprint=hashlib.sha256(train.tobytes() + b"|" + kept.tobytes()).hexdigest()[:16],
        unit="tokens",
        floor=unigram_loss(train, kept, num_labels) if len(kept) else None,
        floor_name="unigram model",
        notes=(f"{len(files)} files, {len(train):,} tokens to train on, {len(kept):,} held out",),
    )
    _check_enough(splits, seq)
    return splits


def _check_enough(splits: Splits, seq: int) -> None:
    if not len(splits.train) or not len(splits.held_out):
        raise DataError(
            f"--files: {splits.notes[0]}; a sequence has {seq + 1}. Give more files, a smaller --seq or another --held-out."
        )


def list_files(config: DataConfig) -> list[tuple[str, Path]]:
    """Pairs of a name that is the same on every machine and the file, sorted by name.

    Raises:
        DataError: A path that is not there, or no file at all.
    """
    roots = [Path(given) for given in config.files] or [Path(sysconfig.get_path("stdlib"))]
    found = sorted({pair for root in roots for pair in _files_in(root, config.suffix)})
    if not found:
        raise DataError(f"--files {' '.join(map(str, roots))}: no file there ends in {config.suffix!r}; see --suffix.")
    return found


def _files_in(root: Path, suffix: str) -> Iterator[tuple[str, Path]]:
    if root.is_file():
        yield root.name, root
    elif root.is_dir():
        inside = (path for path in root.rglob(f"*{suffix}") if path.is_file())
        yield from ((path.relative_to(root).as_posix(), path) for path in inside if _is_source(path.relative_to(root)))
    else:
        raise DataError(f"--files {root}: there is no such file or folder.")


def _is_source(path: Path) -> bool:
    return not _NOT_SOURCES & set(path.parts)


def is_held_out(name: str, share: float) -> bool:
    """Whether a file is kept for evaluation: by a hash of its name."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    return number < share * 2**64


def _encoder(tokenizer: str | None) -> tuple[Encode, int]:
    """How bytes become tokens, and how many tokens there are, the separator included."""
    if tokenizer is None:
        return lambda data: np.frombuffer(data, np.uint8), NUM_BYTES
    try:
        made: Any = importlib.import_module("tokenizers").Tokenizer.from_file(tokenizer)
    except ModuleNotFoundError:
        raise DataError(f"--tokenizer {tokenizer}: it needs the package tokenizers, which is not installed.") from None
    except Exception as error:  # noqa: BLE001 - the package raises bare Exception
        raise DataError(f"--tokenizer {tokenizer}: not a tokenizers JSON file: {error}.") from None
    # Tokens move up by one: 0 is the separator, as with bytes.
    return lambda data: np.asarray(made.encode(data.decode("utf-8", "replace")).ids, np.uint32) + 1, made.get_vocab_size() + 1


def _tokens(paths: Sequence[Path], encode: Encode, num_labels: int) -> np.ndarray:
    dtype = np.dtype(np.uint8 if num_labels <= 2**8 else np.uint16 if num_labels <= 2**16 else np.uint32)
    end = np.asarray([SEPARATOR], dtype)
    parts = [part for path in paths for part in (encode(path.read_bytes()).astype(dtype), end)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def unigram_loss(train: np.ndarray, held_out: np.ndarray, num_labels: int) -> float:
    """Cross-entropy, in nats a token, of a model that knows only how often each token occurs in `train` (plus one)."""
    counts = np.bincount(train, minlength=num_labels) + 1.0
    log_probabilities = np.log(counts / counts.sum())
    return float(-log_probabilities[held_out].mean())
