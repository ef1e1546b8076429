"""Data of a run: packed text, what is held out, order, resuming, each process's rows, and sources of one's own."""

import json
import math

import jax
import numpy as np
import pytest

from models.sharding import BATCH, make_layout
from tests.train_runs import FILES
from train.config import DataConfig
from train.data import Splits, load_splits
from train.errors import DataError
from train.feed import Feed, held_out_batches, local_rows, place
from train.text import SEPARATOR, PackedTokens, is_held_out, list_files, text, unigram_loss


def spec(batch=4, seq=8, devices=1, mesh=""):
    layout = make_layout(jax.devices("cpu")[:devices], mesh)

    def of(dtype):
        return jax.ShapeDtypeStruct((batch, seq), dtype, sharding=layout.sharding(BATCH))

    return {"tokens": of("int32"), "labels": of("int32"), "weights": of("float32")}


def numbered(count, seq=8):
    """Examples whose every token is their number."""
    return PackedTokens(tokens=np.append(np.repeat(np.arange(count, dtype=np.uint32), seq), 0), seq=seq)


def firsts(batches):
    return [np.asarray(batch["tokens"])[:, 0].tolist() for batch in batches]


@pytest.fixture
def documents(tmp_path):
    for number in range(40):
        (tmp_path / f"d{number:02}.py").write_bytes(bytes([65 + number]) * (number + 5))
    return DataConfig(files=(str(tmp_path),), held_out=0.2)


def test_every_token_is_read_once_and_predicted_once(documents):
    splits = text(documents, spec(seq=8))
    whole = splits.train.tokens
    parts = [splits.train[index] for index in range(len(splits.train))]
    read = np.concatenate([part["tokens"] for part in parts])
    predicted = np.concatenate([part["labels"] for part in parts])
    np.testing.assert_array_equal(read, whole[: len(read)])
    np.testing.assert_array_equal(predicted, whole[1 : len(read) + 1])
    assert len(whole) - 1 - len(read) < 8
    assert all((part["weights"] == 1).all() for part in parts)


def test_documents_end_with_a_separator_and_none_is_in_both_splits(documents):
    splits = text(documents, spec(seq=8))
    both = [np.split(part.tokens, np.flatnonzero(part.tokens == SEPARATOR) + 1)[:-1] for part in (splits.train, splits.held_out)]
    names = [{int(document[0]) for document in documents} for documents in both]
    assert names[0] | names[1] == set(range(65, 105))
    assert names[0] & names[1] == set()
    assert all(len(document) == document[0] - 65 + 6 for documents in both for document in documents)


def test_a_new_file_moves_no_other(documents, tmp_path):
    held = [name for name, _ in list_files(documents) if is_held_out(name, 0.2)]
    (tmp_path / "a_new_one.py").write_text("x")
    assert [name for name, _ in list_files(documents) if is_held_out(name, 0.2)] in (held, ["a_new_one.py", *held])
    assert 0.1 < sum(is_held_out(str(number), 0.2) for number in range(1000)) / 1000 < 0.3


def test_the_default_is_the_standard_library_and_the_unigram_model_is_honest():
    splits = text(DataConfig(), spec(seq=64))
    assert len(splits.train.tokens) > 5_000_000
    assert 2.5 < splits.floor < math.log(256)
    counts = np.bincount(splits.train.tokens, minlength=256) + 1.0
    expected = -np.mean([math.log(counts[token] / counts.sum()) for token in splits.held_out.tokens])
    assert splits.floor == pytest.approx(expected)


def test_a_unigram_model_of_two_tokens():
    train, held_out = np.array([0, 0, 1], np.uint8), np.array([0, 1], np.uint8)
    assert unigram_loss(train, held_out, 2) == pytest.approx(-(math.log(3 / 5) + math.log(2 / 5)) / 2)


def test_a_tokenizer_file_gives_its_tokens_moved_by_one(tmp_path, documents):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "t.json"))
    (tmp_path / "only.txt").write_text("a b a c " * 9)
    config = DataConfig(files=(str(tmp_path),), suffix=".txt", tokenizer=str(tmp_path / "t.json"), held_out=0.999)
    with pytest.raises(DataError, match="0 tokens to train on"):
        text(config, spec())
    (tmp_path / "other.txt").write_text("b " * 20)
    splits = text(DataConfig(files=config.files, suffix=".txt", tokenizer=config.tokenizer, held_out=0.5), spec())
    assert splits.num_labels == 4
    found = {tuple(part.tokens[:4].tolist()) for part in (splits.train, splits.held_out)}
    assert found == {(2, 3, 2, 1), (3, 3, 3, 3)}


def test_each_pass_has_every_example_once_in_another_order():
    feed = Feed(numbered(12), spec(), num_batches=6, seed=3)
    order = np.concatenate([np.asarray(batch["tokens"])[:, 0] for batch in feed])
    first, second = order[:12].tolist(), order[12:].tolist()
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert first != sorted(first)


def test_order_depends_on_the_seed_alone_and_goes_on_from_a_position():
    batches = firsts(Feed(numbered(12), spec(), num_batches=6, seed=3))
    assert batches == firsts(Feed(numbered(12), spec(), num_batches=6, seed=3))
    assert batches != firsts(Feed(numbered(12), spec(), num_batches=6, seed=4))
    feed = Feed(numbered(12), spec(), num_batches=6, seed=3)
    for _ in range(4):
        next(feed)
    other = Feed(numbered(12), spec(), num_batches=6, seed=3)
    other.go_to(feed.position)
    assert firsts(other) == batches[4:]


def test_processes_read_their_own_rows_and_together_the_whole_batch():
    from train.feed import _LocalRows  # what a second process would hold can't be had through its devices here

    examples = numbered(12)
    whole = [_LocalRows(examples, (0, 1, 2, 3), 4, 3)[index] for index in range(12)]
    halves = [_LocalRows(examples, rows, 4, 3) for rows in ((0, 1), (2, 3))]
    for number in range(3):
        rows = [halves[process][2 * number + row] for process in (0, 1) for row in (0, 1)]
        expected = [example["tokens"][0] for example in whole[4 * number : 4 * number + 4]]
        assert [row["tokens"][0] for row in rows] == expected


@pytest.mark.parametrize("mesh", ["fsdp:8", "data:2,fsdp:2,tensor:2", "data:4,tensor:2"])
def test_a_batch_lies_on_its_mesh_in_order(mesh):
    abstract = spec(batch=8, devices=8, mesh=mesh)
    assert local_rows(abstract) == tuple(range(8))
    rows = {name: np.arange(64).reshape(8, 8).astype(leaf.dtype) for name, leaf in abstract.items()}
    placed = place(rows, abstract)
    np.testing.assert_array_equal(placed["tokens"], rows["tokens"])
    assert placed["tokens"].sharding.is_equivalent_to(abstract["tokens"].sharding, 2)


def test_what_is_held_out_comes_once_in_order_and_the_rest_weighs_nothing():
    batches = list(held_out_batches(numbered(6), spec(), num_batches=9))
    assert firsts(batches)[0] == [0, 1, 2, 3]
    assert firsts(batches)[1][:2] == [4, 5]
    assert [np.asarray(batch["weights"]).sum(1).tolist() for batch in batches] == [[8, 8, 8, 8], [8, 8, 0, 0]]


def own_source(config, batch):
    """A source of one's own, as T2's images are."""
    del config
    shape = batch["weights"].shape[1:]
    example = {name: np.zeros(shape, leaf.dtype) for name, leaf in batch.items()}
    return Splits(train=[example] * 3, held_out=[example], num_labels=7, fingerprint="f", unit="images")


def test_a_source_of_ones_own_is_found_by_name():
    splits = load_splits(DataConfig(data="tests.test_train_data:own_source"), spec(), num_labels=7)
    assert (len(splits.train), splits.unit) == (3, "images")


@pytest.mark.parametrize(
    ("config", "num_labels", "message"),
    [
        ({"data": "txt"}, None, "Did you mean 'text'?"),
        ({"data": "nowhere:source"}, None, "No module named 'nowhere'"),
        ({"data": "train.text:nothing"}, None, "has no attribute 'nothing'"),
        ({"data": "tests.test_train_data:own_source"}, 5, "has labels below 7, the model knows 5"),
        ({"files": ("nowhere",)}, None, "--files nowhere: there is no such file or folder."),
        ({"files": FILES[:1], "suffix": ".none"}, None, "no file there ends in '.none'"),
        ({"tokenizer": "nowhere.json"}, None, "--tokenizer nowhere.json: not a tokenizers JSON file"),
        ({"files": FILES[:1], "held_out": 1e-9}, None, "0 held out; a sequence has 9"),
    ],
)
def test_bad_data_are_errors(config, num_labels, message):
    with pytest.raises(DataError) as caught:
        load_splits(DataConfig(**config), spec(), num_labels=num_labels)
    assert message in str(caught.value)


def test_examples_must_be_what_the_step_takes():
    images = {"images": jax.ShapeDtypeStruct((4, 8, 8), "float32"), "weights": jax.ShapeDtypeStruct((4,), "float32")}
    with pytest.raises(DataError, match="the step takes images, weights, no tokens"):
        load_splits(DataConfig(files=FILES), images, num_labels=None)
    longer = spec(seq=9)["tokens"]
    with pytest.raises(DataError, match=r"the step takes .*tokens int32\[9\].*the source gives .*tokens int32\[8\]"):
        load_splits(DataConfig(data="tests.test_train_data:own_source"), spec() | {"tokens": longer}, num_labels=None)


def test_a_position_is_a_text():
    assert json.loads(Feed(numbered(12), spec(), num_batches=6, seed=3).position)


def images(batch=4, side=32, dtype="uint8"):
    layout = make_layout(jax.devices("cpu")[:1], "")
    shapes = {"images": ((batch, side, side, 3), dtype), "labels": ((batch,), "int32"), "weights": ((batch,), "float32")}
    return {name: jax.ShapeDtypeStruct(shape, of, sharding=layout.sharding(BATCH)) for name, (shape, of) in shapes.items()}


def test_digits_are_real_scans_in_tiles_and_none_is_in_both_splits():
    splits = load_splits(DataConfig(data="digits", held_out=0.2), images(), num_labels=10)
    assert len(splits.train) + len(splits.held_out) == 1797
    assert 0.15 < len(splits.held_out) / 1797 < 0.25
    first = splits.train[0]
    assert first["images"].shape == (32, 32, 3)
    tiles = first["images"].reshape(8, 4, 8, 4, 3)
    assert (tiles == tiles[:, :1, :, :1, :1]).all()
    assert set(splits.train.labels) == set(range(10))
    assert 2.25 < splits.floor < 2.40, "ten classes, about as many of each"
    means = np.stack([splits.train.scans[splits.train.labels == digit].mean(0) for digit in range(10)])
    distances = ((splits.held_out.scans[:, None] - means) ** 2).sum((-1, -2))
    assert (distances.argmin(1) == splits.held_out.labels).mean() > 0.8, "labels belong to their scans"


def test_batches_of_digits_go_to_the_devices():
    splits = load_splits(DataConfig(data="digits", held_out=0.2), images(), num_labels=10)
    batch = next(Feed(splits.train, images(), num_batches=2, seed=0))
    assert {name: (value.shape, value.dtype.name) for name, value in batch.items()} == {
        name: (leaf.shape, leaf.dtype.name) for name, leaf in images().items()
    }


@pytest.mark.parametrize(
    ("config", "batch", "message"),
    [
        (DataConfig(data="digits"), spec(), "--data digits: the step takes tokens, labels, weights, no images; give a source"),
        (DataConfig(data="digits", files=FILES), images(), "it reads neither --files nor a --tokenizer"),
        (DataConfig(data="digits"), images(dtype="float32"), "the source gives images uint8[32, 32, 3]"),
        (DataConfig(files=FILES), images(), "no tokens; give a source of these, like --data digits."),
        (DataConfig(data="digit"), images(), "Did you mean 'digits'?"),
    ],
)
def test_images_and_text_are_not_taken_for_each_other(config, batch, message):
    with pytest.raises(DataError) as caught:
        load_splits(config, batch, num_labels=None)
    assert message in str(caught.value)
