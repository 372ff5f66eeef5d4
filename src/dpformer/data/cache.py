"""Prepared data on disk: npy files that are memory-mapped, JSON beside them, no pickle.

A folder is created atomically: it is written under another name and renamed. It holds private data.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dpformer.data.dataset import Dataset
from dpformer.data.time_split import TimeSplitDataset
from dpformer.data.vocabulary import Vocabulary
from dpformer.errors import DpformerError

FORMAT = 2  # 1 dropped users without rows that pass the filters
CUTS = "cuts.npy"  # for a split by time
MARKS = {"weights": np.uint8, "sessions": np.int32}  # of interactions, if there are any


class PackedStrings(Sequence[str]):
    """Many strings as one array of UTF-8 bytes and offsets; decoded one at a time."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray) -> None:
        self.data, self.offsets = data, offsets

    @classmethod
    def pack(cls, strings: Iterable[str]) -> "PackedStrings":
        """Packs strings; lone surrogates, which JSON allows, survive."""
        encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
        offsets = np.concatenate([[0], np.cumsum([len(string) for string in encoded])]).astype(np.int64)
        return cls(np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return bytes(self.data[self.offsets[index] : self.offsets[index + 1]]).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


def save(dataset: Dataset, folder: Path) -> None:
    """Write a data set to a new folder, readable by its owner only."""
    if folder.exists():
        raise DpformerError(f"{folder} already exists")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))  # mode 0700
    except OSError as error:
        raise DpformerError(f"prepared data cannot be written to {folder}: {error}") from None
    try:
        users = PackedStrings.pack(dataset.user_ids)
        _write(part / "items.npy", np.asarray(dataset.items, dtype=np.int32))
        _write(part / "offsets.npy", np.asarray(dataset.offsets, dtype=np.int64))
        _write(part / "user_ids.npy", users.data)
        _write(part / "user_offsets.npy", users.offsets)
        for name, dtype in MARKS.items():
            if (marks := getattr(dataset, name)) is not None:
                _write(part / f"{name}.npy", np.asarray(marks, dtype=dtype))
        if isinstance(dataset, TimeSplitDataset):
            _write(part / CUTS, np.asarray(dataset.cuts, dtype=np.int64))
        (part / "vocabulary.json").write_text(dataset.vocabulary.to_json(), encoding="ascii")
        meta = {
            "format": FORMAT,
            "hash": dataset.hash,
            "files": {path.name: _digest(path) for path in part.iterdir()},
            "max_length": dataset.max_length,
            "validation": dataset.validation,
            "description": dataset.description,
        }
        (part / "meta.json").write_text(json.dumps(meta, indent=1), encoding="ascii")
        os.replace(part, folder)
    except OSError as error:
        if not folder.exists():  # otherwise another process has written the same data
            raise DpformerError(f"prepared data cannot be written to {folder}: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def load(folder: Path) -> Dataset:
    """Open a data set, memory-mapped; every file must have its original hash."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="ascii"))
        if meta["format"] != FORMAT:
            raise ValueError(f"it has format {meta['format']}, but this version reads {FORMAT}")
        for name, digest in meta["files"].items():
            if _digest(folder / name) != digest:
                raise ValueError(f"{name} was altered")
        kind, more = Dataset, {}
        if CUTS in meta["files"]:
            kind, more = TimeSplitDataset, {"cuts": _read(folder / CUTS, np.int64)}
        for name, dtype in MARKS.items():
            if f"{name}.npy" in meta["files"]:
                more[name] = _read(folder / f"{name}.npy", dtype)
        dataset = kind(
            items=_read(folder / "items.npy", np.int32),
            offsets=_read(folder / "offsets.npy", np.int64),
            user_ids=PackedStrings(
                _read(folder / "user_ids.npy", np.uint8), _read(folder / "user_offsets.npy", np.int64)
            ),
            vocabulary=Vocabulary.from_json((folder / "vocabulary.json").read_text(encoding="ascii")),
            max_length=meta["max_length"],
            validation=meta["validation"],
            description=meta["description"],
            folder=folder.resolve(),
            **more,
        )
        if dataset.hash != meta["hash"]:
            raise ValueError("its split was altered")
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, DpformerError) as error:
        raise DpformerError(f"{folder} is not intact prepared data ({error}); delete it and prepare again") from None
    return dataset


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _write(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, dtype: type) -> np.ndarray:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(f"{path.name} is {array.dtype} of {array.ndim} dimensions")
    return array
