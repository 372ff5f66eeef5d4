"""Recommendations for many histories into a file: ranked in blocks, joined with ids and titles by DuckDB.

One row a recommendation: user_id, rank, item_id, title where there are titles, score; in the order of the users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.histories import Histories
from dpformer.data.interactions import Codes, id_text
from dpformer.errors import DpformerError
from dpformer.files import replacing
from dpformer.runs.model_file import Release
from dpformer.serving.ranking import Ranker, Top

FORMATS = {
    ".parquet": "FORMAT parquet, COMPRESSION zstd",
    ".csv": "FORMAT csv, HEADER",
    ".tsv": "FORMAT csv, HEADER, DELIMITER '\t'",
    ".jsonl": "FORMAT json",
}


@dataclass(frozen=True)
class Packed:
    """Histories in item numbers: user u's are items[offsets[u]:offsets[u + 1]]; what the model does not know is out."""

    items: np.ndarray  # (n,) int64
    offsets: np.ndarray  # (users + 1,) int64
    unknown: int  # interactions left out
    unknown_items: int  # different items among them

    @classmethod
    def of(cls, histories: Histories, release: Release) -> Packed:
        numbers = {id_text(name): number for number, name in enumerate(release.vocabulary)}
        of_code = np.fromiter((numbers.get(name, -1) for name in histories.item_ids), np.int64, len(histories.item_ids))
        items = of_code[histories.codes]
        known = items >= 0
        before = np.concatenate([[0], np.cumsum(known)])  # known ones before each place
        lost = np.unique(histories.codes[~known])
        return cls(items[known], before[histories.offsets], int((~known).sum()), len(lost))

    def __len__(self) -> int:
        return len(self.offsets) - 1


def histories_of(pairs: Iterable[tuple[Any, Iterable[Any]]]) -> Histories:
    """From (user id, item ids in the order of time), one a user."""
    users, items, codes, stops = [], Codes(), [], [0]
    for user, history in pairs:
        try:
            codes += [items[item] for item in history]
        except (ValueError, TypeError) as error:  # TypeError: a list is no key
            raise DpformerError(f"the history of {user!r} holds what is no item id: {error}") from None
        users.append(str(user))
        stops.append(len(codes))
    return Histories(users, items.names, np.array(codes, dtype=np.int32), np.array(stops, dtype=np.int64))


def format_of(path: Path) -> str:
    """How DuckDB is to write a file, by its name."""
    if path.suffix.lower() not in FORMATS:
        raise DpformerError(f"{path.name} has no known format: give a name ending in {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()]


def write_recommendations(
    ranker: Ranker,
    histories: Histories,
    path: str | Path,
    *,
    k: int = 10,
    filter_seen: bool = True,
    done: Callable[[int], None] = lambda _: None,
) -> Packed:
    """Ranks for all users and writes the file, whole or not at all; `done` is told how many users are finished."""
    from dpformer.engines.duckdb_connection import connect, text

    path = Path(path)
    form, release, packed = format_of(path), ranker.release, Packed.of(histories, ranker.release)
    with replacing(path) as part, connect(what=str(path), failed="cannot be written") as connection:
        connection.execute("CREATE TABLE found (user_number INTEGER, rank INTEGER, item INTEGER, score FLOAT)")
        for top, users in ranker.blocks(packed.items, packed.offsets, k, filter_seen=filter_seen):
            connection.register("part", _rows(top, users))
            connection.execute("INSERT INTO found SELECT * FROM part")
            connection.unregister("part")
            done(users.stop)
        connection.register("users", _named(histories.user_ids, "user_id"))
        connection.register("items", _items(release))
        title = "" if release.titles is None else "title, "
        select = f"""SELECT user_id, rank, item_id, {title}score FROM found
            JOIN users ON users.number = user_number JOIN items ON items.number = item ORDER BY user_number, rank"""
        # On a full disk several threads of DuckDB 2.0 wait for each other for ever (in two of two rounds of 40 tries).
        if "csv" in form:
            connection.execute("SET threads = 1")
        connection.execute(f"COPY ({select}) TO {text(str(part))} ({form})")
    return packed


def _rows(top: Top, users: slice) -> dict[str, np.ndarray]:
    there = top.items >= 0
    numbers = np.broadcast_to(np.arange(users.start, users.stop)[:, None], there.shape)
    ranks = np.broadcast_to(np.arange(1, there.shape[1] + 1), there.shape)
    columns = {"user_number": numbers, "rank": ranks, "item": top.items, "score": top.scores}
    return {name: np.ascontiguousarray(column[there]) for name, column in columns.items()}


def _named(names: Any, column: str) -> dict[str, np.ndarray]:
    return {"number": np.arange(len(names)), column: np.array([str(name) for name in names], dtype=object)}


def _items(release: Release) -> dict[str, np.ndarray]:
    table = _named(release.vocabulary, "item_id")
    return table if release.titles is None else {**table, "title": np.array(release.titles, dtype=object)}
