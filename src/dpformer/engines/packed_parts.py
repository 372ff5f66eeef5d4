"""Histories of some users as a few arrays, packed by a worker of a cluster, which has NumPy and PyArrow only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dpformer.engines.digests import digest_sums
from dpformer.engines.sums import ArraySums

# Sums are text, because they exceed 64 bits.
SCHEMA = (
    "items binary, lengths binary, names binary, users bigint, interactions bigint, longest bigint, duplicates bigint, "
    "digests array<string>"
)


def pack(batches: Iterable[Any]) -> Iterator[Any]:
    """Rows (u, t, i), ordered by user, time and item, as one row of `SCHEMA`: items int32 and lengths int64, and ids of
    users, separated by line breaks."""
    import pyarrow
    from pyarrow import compute

    batches = [batch for batch in batches if batch.num_rows]
    if not batches:
        return
    rows = pyarrow.Table.from_batches(batches)
    users, times, numbers = (rows.column(name).combine_chunks() for name in ("u", "t", "i"))

    def changes(column: Any) -> np.ndarray:
        """Whether each value but the first differs from the one before it."""
        found = compute.not_equal(column.slice(1), column.slice(0, len(column) - 1))
        return np.asarray(found.to_numpy(zero_copy_only=False))

    items = numbers.to_numpy().astype(np.int32)
    new = changes(users)
    starts = np.concatenate([[0], 1 + np.flatnonzero(new)])
    offsets = np.append(starts, len(items)).astype(np.int64)
    lengths = np.diff(offsets)
    columns = {
        "items": pyarrow.array([items.tobytes()], pyarrow.binary()),
        "lengths": pyarrow.array([lengths.tobytes()], pyarrow.binary()),
        "names": pyarrow.array([b"\n".join(users.take(pyarrow.array(starts)).to_pylist())], pyarrow.binary()),
        "users": pyarrow.array([len(lengths)], pyarrow.int64()),
        "interactions": pyarrow.array([len(items)], pyarrow.int64()),
        "longest": pyarrow.array([int(lengths.max())], pyarrow.int64()),
        "duplicates": pyarrow.array([int((~(new | changes(times) | changes(numbers))).sum())], pyarrow.int64()),
        "digests": pyarrow.array([list(map(str, digest_sums(items, offsets)))], pyarrow.list_(pyarrow.string())),
    }
    yield pyarrow.RecordBatch.from_pydict(columns)


def unpacked(row: Any) -> tuple[np.ndarray, np.ndarray]:
    """(items, lengths) of a row of `pack`."""
    return np.frombuffer(row["items"], np.int32), np.frombuffer(row["lengths"], np.int64)


def training_part(row: Any, *, longest: int | None, held_out: int, shortest: int) -> ArraySums:
    """The training part of a row of `pack`.

    Args:
        row: the row.
        longest: last items used of each history; None: all.
        held_out: number of held-out items of users with enough items.
        shortest: the number of items that is enough.
    """
    items, lengths = unpacked(row)
    stops = np.cumsum(lengths)
    starts, stops = stops - lengths, stops - np.where(lengths >= shortest, held_out, 0)
    return ArraySums(items, starts if longest is None else np.maximum(starts, stops - longest), stops)
