"""Every format of the guide trains with one command, and gives the same model."""

import gzip
import json
import lzma
import sqlite3
from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pytest

from tests.tiny_runs import printed

ROWS = [(f"u{user}", f"i{item}", time) for time, (user, item) in enumerate(
    zip(*np.random.default_rng(0).integers(0, [[30], [12]], (2, 400)).tolist(), strict=True)
)]  # fmt: skip


def _text(delimiter: str, header: str | None = "user_id,item_id,timestamp") -> str:
    head = "" if header is None else header.replace(",", delimiter) + "\n"
    return head + "".join(delimiter.join(map(str, row)) + "\n" for row in ROWS)


def _lines_of_users() -> str:
    users: dict[str, list[str]] = {}
    for user, item, _ in ROWS:
        users.setdefault(user, []).append(item)
    return "".join(" ".join([user, *items]) + "\n" for user, items in users.items())


def _database(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE events (user_id, item_id, timestamp)")
        database.executemany("INSERT INTO events VALUES (?, ?, ?)", ROWS)


def _table(path: Path) -> None:
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE events (user_id VARCHAR, item_id VARCHAR, timestamp BIGINT)")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?)", ROWS)


def _parquet(folder: Path) -> None:
    """A hundred files, and what Spark leaves beside them."""
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    for part in range(100):
        rows = ", ".join(map(str, ROWS[part::100]))
        query = f"SELECT * FROM (VALUES {rows}) AS t (user_id, item_id, timestamp)"
        duckdb.execute(f"COPY ({query}) TO '{folder}/part-{part:03}.parquet' (FORMAT parquet)")


WRITTEN: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "log.csv": (lambda path: path.write_text(_text(",")), []),
    "log.tsv": (lambda path: path.write_text(_text("\t")), []),
    "log.csv.gz": (lambda path: path.write_bytes(gzip.compress(_text(";").encode())), []),
    "log.csv.xz": (lambda path: path.write_bytes(lzma.compress(_text("|").encode())), []),
    "wide.csv": (lambda path: path.write_bytes(_text(",").encode("utf-16")), ["--encoding", "utf-16"]),
    "bare.csv": (lambda path: path.write_text(_text(",", None)), ["--columns", "user,item,timestamp"]),
    "log.jsonl": (
        lambda path: path.write_text(
            "".join(json.dumps({"user": u, "item": i, "ts": t}) + "\n" for u, i, t in ROWS)
        ),
        [],
    ),
    "log.inter": (lambda path: path.write_text(_text("\t", "user_id:token,item_id:token,timestamp:float")), []),
    "log.dat": (lambda path: path.write_text("".join(f"{u}::{i}::5::{t}\n" for u, i, t in ROWS)), []),
    "log.txt": (lambda path: path.write_text("".join(f"{u} {i}\n" for u, i, _ in ROWS)), []),
    "users.txt": (lambda path: path.write_text(_lines_of_users()), ["--columns", "user,items"]),
    "log.sqlite": (_database, []),
    "log.duckdb": (_table, ["--query", "SELECT * FROM events WHERE timestamp >= 0"]),
    "events": (_parquet, []),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_trains_with_one_command(name: str, tmp_path: Path) -> None:
    write, options = WRITTEN[name]
    write(tmp_path / name)
    out = tmp_path / "run"
    facts = json.loads(
        printed("train", tmp_path / name, *options, "--model", "counts", "--epsilon", "inf", "--out", out, "--json")
    )
    assert facts["users"] == len({user for user, _, _ in ROWS})
    assert _same_numbers(out / "model.safetensors")


_FIRST: dict[str, bytes] = {}


def _same_numbers(model: Path) -> bool:
    """Without noise the model is a function of the histories: the same from every format."""
    from safetensors.numpy import load_file

    tensors = b"".join(name.encode() + value.tobytes() for name, value in sorted(load_file(model).items()))
    return _FIRST.setdefault("model", tensors) == tensors
