"""Texts from tables: Parquet, DuckDB, databases, Delta and Iceberg tables, data frames; one text per row.

A table without an order of rows (a database) gives the texts of an author in order of time, if a column of times is
named, and of the texts themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dpformer.data.columns import Columns, listed
from dpformer.data.filters import Filters
from dpformer.data.readers.formats import Format, Given, format_of
from dpformer.data.readers.parse_cell import id_of
from dpformer.data.readers.relation import Wanted
from dpformer.data.reading import Reading
from dpformer.data.sources.elsewhere import Asked, source_of
from dpformer.data.sources.files import files_of
from dpformer.data.sources.urls import called
from dpformer.engines.duckdb_connection import connect, name
from dpformer.errors import DpformerError

ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class TextColumns:
    """Names of the columns of texts.

    Attributes:
        text: the text.
        ids: the author or document; the first of these that is there.
        required: whether there must be such a column.
        time: by which texts are ordered; None: as they stand.
    """

    text: str
    ids: Sequence[str]
    required: bool
    time: str | None = None

    def found(self, names: list[str], where: str) -> tuple[str, str | None, str | None]:
        """(text, id, time) among the columns of a table."""
        for needed in (self.text, *([self.time] if self.time else [])):
            if needed not in names:
                raise DpformerError(f"{where} has no column {needed!r} (it has {listed(names)}): give --text-column")
        chosen = next((known for known in self.ids if known in names), None)
        if chosen is None and self.required:
            raise DpformerError(
                f"{where} has no column {self.ids[0]!r} (it has {listed(names)}), but each text needs an owner: name "
                "it with --user-column"
            )
        return self.text, chosen, self.time


@dataclass(frozen=True)
class Here:
    """Texts that are on this machine.

    Attributes:
        path: the file or files.
        reading: their reading options.
        where: what they are called.
        snapshot: the version of a table, if versions are numbered.
    """

    path: Path
    reading: Reading
    where: str
    snapshot: str | None = None

    def format(self) -> Format | None:
        """The format of a table; None: it is JSON lines or plain text."""
        files = files_of(self.path)
        try:
            form = format_of(files[0], self.reading.format)
        except DpformerError:
            if self.reading.format is not None:
                raise
            return None
        return form if form.tables else None


@contextmanager
def here(path: Path, reading: Reading, columns: TextColumns) -> Iterator[Here]:
    """Texts at a path or URL, copied to this machine for as long as the context lasts."""
    found = source_of(path)
    if found is None:
        yield Here(path, reading, called(path))
        return
    source, url = found

    def choose(names: list[str]) -> list[str]:
        text, owner, time = columns.found(names, str(url))
        return [column for column in (time, owner, text) if column is not None]

    with TemporaryDirectory(prefix="dpformer-") as folder:
        brought = source.bring(Asked(url, choose, reading, Path(folder)))
        yield Here(brought.path, brought.reading, str(url), brought.snapshot)


def table_texts(found: Here, form: Format, columns: TextColumns) -> Iterator[tuple[str | None, str]]:
    """(id, text) of each row."""
    if form.select is None:
        raise DpformerError(f"{found.where} is {form.title}, from which texts are not read: give Parquet or JSON lines")
    files = files_of(found.path)
    wanted = Wanted(Columns(), found.reading, Filters(), found.where)
    with connect(found.reading.memory, found.where) as connection, TemporaryDirectory(prefix="dpformer-") as folder:
        select = form.select(Given(connection, files, wanted, Path(folder), together=files != [found.path]))
        kinds = {str(row[0]): str(row[1]) for row in connection.execute(f"DESCRIBE {select}").fetchall()}
        text, owner, time = columns.found(list(kinds), found.where)
        if kinds[text] != "VARCHAR":
            raise DpformerError(f"{found.where}: the text column {text!r} is of type {kinds[text]}, not text")
        cells = f"{'NULL' if owner is None else id_of(owner, kinds[owner])} AS id, {name(text)} AS text"
        order = "" if time is None else f" ORDER BY {name(time)}"
        rows = connection.execute(f"SELECT {cells} FROM ({select}){order}")
        number = 0
        while block := rows.fetchmany(ROWS_AT_ONCE):
            for key, value in block:
                number += 1
                if value is None or (key is None and columns.required):
                    what = "text" if value is None else "owner"
                    raise DpformerError(f"{found.where}, row {number} has no {what}: leave such rows out with --query")
                yield key, value


def frame_rows(frame: Any, columns: TextColumns) -> list[dict[str, str]] | None:
    """The rows of a data frame as JSON lines have them; None if it is none."""
    import narwhals as nw

    table = nw.from_native(frame, eager_only=True, pass_through=True)
    if not isinstance(table, nw.DataFrame):
        return None
    text, owner, time = columns.found(list(table.columns), "the frame")
    ordered = table if time is None else table.sort(time)
    texts = ordered[text].to_list()
    owners = [None] * len(texts) if owner is None else ordered[owner].to_list()
    rows = []
    for number, (key, value) in enumerate(zip(owners, texts, strict=True), start=1):
        if not isinstance(value, str) or (columns.required and (key is None or key != key)):
            what = "owner" if isinstance(value, str) else "text"
            raise DpformerError(f"row {number} of the frame has no {what}: leave such rows out")
        rows.append({columns.text: value, **({} if key is None or key != key else {columns.ids[0]: str(key)})})
    return rows
