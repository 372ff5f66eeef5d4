"""Recommendations for many histories into a file: ranked in blocks, joined with ids and titles by DuckDB.

One row per recommendation: user_id, rank, item_id, title if there are titles, score; in the order of the users.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.errors import DpformerError
from dpformer.files import replacing
from dpformer.runs.model_file import Release
from dpformer.serving.packed import Packed
from dpformer.serving.ranking import Ranker, Top
from dpformer.serving.rules import BoundRules

FORMATS = {
    ".parquet": "FORMAT parquet, COMPRESSION zstd",
    ".csv": "FORMAT csv, HEADER",
    ".tsv": "FORMAT csv, HEADER, DELIMITER '\t'",
    ".jsonl": "FORMAT json",
}


def format_of(path: Path) -> str:
    """DuckDB's options for writing a file, by its suffix."""
    if path.suffix.lower() not in FORMATS:
        raise DpformerError(f"{path.name} has no known format: give a name ending in {', '.join(FORMATS)}")
    return FORMATS[path.suffix.lower()]


def write_recommendations(
    ranker: Ranker,
    packed: Packed,
    path: str | Path,
    *,
    k: int = 10,
    filter_seen: bool = True,
    rules: BoundRules | None = None,
    done: Callable[[int], None] = lambda _: None,
) -> None:
    """Rank for all users and write the file atomically; `done` is called with the number of finished users."""
    from dpformer.engines.duckdb_connection import connect, text

    path = Path(path)
    form, release = format_of(path), ranker.release
    with replacing(path) as part, connect(what=str(path), failed="cannot be written") as connection:
        connection.execute("CREATE TABLE found (user_number INTEGER, rank INTEGER, item INTEGER, score FLOAT)")
        for top, users in ranker.blocks(packed.items, packed.offsets, k, filter_seen=filter_seen, rules=rules):
            connection.register("part", _rows(top, users))
            connection.execute("INSERT INTO found SELECT * FROM part")
            connection.unregister("part")
            done(users.stop)
        connection.register("users", _named(packed.user_ids, "user_id"))
        connection.register("items", _items(release))
        title = "" if release.titles is None else "title, "
        select = f"""SELECT user_id, rank, item_id, {title}score FROM found
            JOIN users ON users.number = user_number JOIN items ON items.number = item ORDER BY user_number, rank"""
        # On a full disk, several threads of DuckDB 2.0 deadlock (in two of two rounds of 40 tries).
        if "csv" in form:
            connection.execute("SET threads = 1")
        connection.execute(f"COPY ({select}) TO {text(str(part))} ({form})")


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
