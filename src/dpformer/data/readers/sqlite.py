"""Tables and views of an SQLite file, in which every value has its own type."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from dpformer.data.columns import Columns
from dpformer.data.readers.formats import Format, Given
from dpformer.data.readers.jsonl import json_lines
from dpformer.data.readers.parse_cell import EXACT_BELOW
from dpformer.data.readers.relation import Relation, Wanted
from dpformer.data.readers.typed_table import only_table
from dpformer.data.row_filter import RowFilter
from dpformer.errors import DpformerError


def read(given: Given) -> Relation:
    files, wanted, folder = given.files, given.wanted, given.folder
    if wanted.reading.query is not None:
        raise DpformerError(
            "--query applies to DuckDB and Parquet; create a view in the SQLite file and give it with --table"
        )
    if len(files) != 1:
        raise DpformerError(f"{len(files)} SQLite files were given: give one")
    table, names = sqlite_columns(files[0], wanted.reading.table)
    roles = wanted.resolve(names)
    row_filter = wanted.row_filter(names)
    others = row_filter.columns if row_filter is not None else ()
    folder.mkdir(parents=True, exist_ok=True)
    sqlite_rows(files[0], table, {**roles, **{f"where {name}": name for name in others}}, folder / "rows.jsonl")
    found = json_lines([folder / "rows.jsonl"], _OfSqlite(_ROLES, wanted.reading, wanted.filters, wanted.where))
    return Relation(found.sql, roles.get("timestamp"), 1, found.cells, filtered=True)


_ROLES = Columns("user", "item", "timestamp", "rating")


class _OfSqlite(Wanted):
    """The request for the JSON lines to which a table was written."""

    def row_filter(self, names: list[str] | None) -> RowFilter | None:
        found = super().row_filter(names)
        return found and replace(found, columns=tuple(f"where {name}" for name in found.columns))


def sqlite_columns(path: Path, table: str | None) -> tuple[str, list[str]]:
    """The table of an SQLite file (the only one, or the chosen one) and the names of its columns."""
    with _sqlite(path) as connection:
        found = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        table = only_table(found, table, path)
        quoted = table.replace('"', '""')
        return table, [row[1] for row in connection.execute(f'PRAGMA table_info("{quoted}")')]


def sqlite_rows(path: Path, table: str, columns: dict[str, str], out: Path) -> None:
    """Write the chosen columns of an SQLite table as JSON lines with text values, since types may differ by row."""
    chosen = ", ".join(_cell(role, name.replace('"', '""')) for role, name in columns.items())
    quoted = table.replace('"', '""')
    with _sqlite(path) as connection, out.open("w", encoding="utf-8") as file:
        connection.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
        for row in connection.execute(f'SELECT {chosen} FROM "{quoted}"'):
            file.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")


def _cell(role: str, column: str) -> str:
    """SQL of a value as text. SQLite prints 15 digits of a float, which can merge ids: see `id_of`."""
    text = f'CAST("{column}" AS TEXT)'
    if role not in ("user", "item"):
        return text
    whole = f'CAST(CAST("{column}" AS INTEGER) AS TEXT)'
    exact = f'abs("{column}") < {EXACT_BELOW["DOUBLE"]}'
    return (
        f"CASE WHEN typeof(\"{column}\") <> 'real' THEN {text} WHEN NOT {exact} THEN NULL "
        f'WHEN "{column}" = CAST("{column}" AS INTEGER) THEN {whole} ELSE printf(\'%.17g\', "{column}") END'
    )


@contextmanager
def _sqlite(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise DpformerError(f"{path} is not a readable SQLite file: {error}") from None


_MAGIC = b"SQLite format 3\0"
FORMATS = (Format("sqlite", "SQLite", (".sqlite", ".sqlite3", ".db"), read, magic=_MAGIC, tables=True),)
