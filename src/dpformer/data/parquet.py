"""Parquet, read by DuckDB: rows are streamed, so a file may be larger than memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from dpformer.data.tables import Table, plain
from dpformer.errors import DpformerError, MissingExtra

BLOCK = 1 << 16


@contextmanager
def open_parquet(path: Path, known_names: frozenset[str]) -> Iterator[Table]:
    """Opens a Parquet file; instants come as microseconds since 1970. Needs the extra `parquet`.

    Columns outside `known_names` are there by name and never read: their fields are None.
    """
    try:
        import duckdb
    except ImportError:
        raise MissingExtra("duckdb", "parquet") from None

    connection = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
    try:
        connection.execute("SET enable_progress_bar = false")
        yield _table(connection, path, known_names)
    except duckdb.Error as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DpformerError(f"{path} is not a readable Parquet file: {reason}") from None
    finally:
        connection.close()


def _table(connection: Any, path: Path, known_names: frozenset[str]) -> Table:
    pattern = str(path.resolve()).replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")  # a name, not a glob
    described = connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", [pattern]).fetchall()
    names = [(str(name), str(kind)) for name, kind, *_ in described]
    expressions = [_expression(name, kind, known_names) for name, kind in names]
    result = connection.execute(f"SELECT {', '.join(expressions)} FROM read_parquet(?)", [pattern])

    def rows() -> Iterator[tuple[Any, ...]]:
        while block := result.fetchmany(BLOCK):
            yield from block

    stream = rows()
    first = next(stream, None)
    if first is None:
        raise DpformerError(f"{path} has no rows")
    keys = {name: place for place, (name, _) in enumerate(names)}
    return Table("Parquet", True, keys, first, chain([first], stream))


def _expression(name: str, kind: str, known_names: frozenset[str]) -> str:
    if name not in known_names and plain(name) not in known_names and not name.isdigit():
        return "NULL"
    quoted = '"' + name.replace('"', '""') + '"'
    return f"epoch_us({quoted})" if kind.startswith(("TIMESTAMP", "DATE")) else quoted
