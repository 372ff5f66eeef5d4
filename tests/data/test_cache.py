"""Prepared data on disk: the same data back, whole or not at all, no pickle."""

import json
import pickle
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from dpformer.data import Dataset, Vocabulary, cache, load, prepare, save
from dpformer.errors import DpformerError


@pytest.fixture
def dataset() -> Dataset:
    made = Dataset.from_histories([[0, 1, 2, 2], [3, 4], [1]], 6, max_length=3, validation=True)
    words = Vocabulary(["a", "ü", "c", "d", "\ud800", "f"], ["A", "", "C", "D", "E", "F"], "catalog")
    return Dataset(made.items, made.offsets, ["ann", "böb", "\udfff"], words, 3, True, {"source": "x", "max_length": 3})


def test_comes_back_the_same_and_memory_mapped(dataset: Dataset, tmp_path: Path) -> None:
    save(dataset, tmp_path / "a" / "data")
    back = load(tmp_path / "a" / "data")
    assert isinstance(back.items, np.memmap)
    assert back.items.tolist() == dataset.items.tolist() and back.offsets.tolist() == dataset.offsets.tolist()
    assert list(back.user_ids) == list(dataset.user_ids) and back.user_ids[-1] == "\udfff"
    assert back.vocabulary == dataset.vocabulary and back.description == dataset.description
    assert (back.max_length, back.validation, back.hash) == (3, True, dataset.hash)
    assert back.batch(np.array([2, 0]))[0].tolist() == dataset.batch(np.array([2, 0]))[0].tolist()
    assert (tmp_path / "a" / "data").stat().st_mode & 0o077 == 0, "private data: the owner's only"
    with pytest.raises(DpformerError, match="already exists"):
        save(dataset, tmp_path / "a" / "data")


def test_hash_sees_every_part_of_the_split(dataset: Dataset) -> None:
    def varied(**changes: object) -> str:
        fields = {name: getattr(dataset, name) for name in dataset.__dataclass_fields__}
        return Dataset(**{**fields, **changes}).hash

    items, offsets = dataset.items.copy(), dataset.offsets.copy()
    items[0], offsets[1] = 5, 3
    words = Vocabulary([*dataset.vocabulary.ids[:5], "g"])
    hashes = [
        varied(),
        varied(items=items),
        varied(offsets=offsets),
        varied(vocabulary=words),
        varied(validation=False),
    ]
    assert len(set(hashes)) == 5
    assert varied(user_ids=["x", "y", "z"], max_length=9) == hashes[0]


@pytest.mark.parametrize(
    "name", ["items.npy", "offsets.npy", "user_ids.npy", "user_offsets.npy", "vocabulary.json", "meta.json"]
)
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "bent", "pickle"])
def test_damage_is_found(dataset: Dataset, tmp_path: Path, name: str, damage: str) -> None:
    save(dataset, tmp_path / "data")
    path = tmp_path / "data" / name
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(["code"]))
    else:
        path.write_bytes(
            {"cut": whole[:-3], "empty": b"", "bent": whole[:-3] + bytes(b ^ 1 for b in whole[-3:])}[damage]
        )
    with pytest.raises(DpformerError, match="not intact prepared data"):
        load(tmp_path / "data")


def test_a_foreign_format_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    save(dataset, tmp_path / "data")
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    (tmp_path / "data" / "meta.json").write_text(json.dumps({**meta, "format": 1}))
    with pytest.raises(DpformerError, match="format 1"):
        load(tmp_path / "data")


def test_a_full_disk_leaves_nothing(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, array: np.ndarray) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    with pytest.raises(DpformerError, match="No space left"):
        save(dataset, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_prepare_finds_its_cache_while_the_file_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "log.txt", tmp_path / "cache"
    path.write_text("1 1\n1 2\n1 3\n2 1\n")
    first = prepare(path, cache=folder)
    with monkeypatch.context() as patch:
        patch.setattr(import_module("dpformer.data.preparation"), "read", None)
        again = prepare(path, cache=folder, max_length=2)
        assert again.hash == first.hash and again.max_length == again.description["max_length"] == 2
    other = prepare(path, cache=folder, validation=True)
    assert other.hash != first.hash
    path.write_text("1 1\n1 2\n1 3\n2 1\n2 2\n")
    assert prepare(path, cache=folder).num_interactions == 5
    assert len(list(folder.iterdir())) == 3
