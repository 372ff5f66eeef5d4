"""DuckDB, the backend that reads, encodes and sorts logs: within a memory limit, spilling to disk."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import duckdb

from dpformer.errors import DpformerError

Connection: TypeAlias = Any  # duckdb.DuckDBPyConnection; duckdb has no type annotations


@contextmanager
def connect(memory: str | None = None, what: str = "the data", failed: str = "cannot be read") -> Iterator[Connection]:
    """A private DuckDB, closed at the end; what exceeds `memory` goes to a private folder.

    Nothing is downloaded, times without a zone are UTC, and the order of rows is preserved.

    Args:
        memory: memory limit, such as "4GB"; by default half of the machine's memory, at most 8 GB.
        what: the subject of error messages.
        failed: the verb of error messages.
    """
    # Mode 0700: it may hold private rows.
    with tempfile.TemporaryDirectory(prefix="dpformer-", ignore_cleanup_errors=True) as folder:
        yield from _connected(Path(folder), memory, what, failed)


def _connected(folder: Path, memory: str | None, what: str, failed: str) -> Iterator[Connection]:
    options: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "memory_limit": memory or default_memory(),
        "temp_directory": str(folder / "spill"),
        "threads": str(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))),
    }
    try:
        connection = duckdb.connect(":memory:", config=options)
    except duckdb.Error as error:
        if memory is None:
            raise MemoryError(first_line(error)) from None
        raise DpformerError(f"memory is {memory!r}; give an amount such as 4GB ({first_line(error)})") from None
    try:
        with suppress(duckdb.InvalidInputException):  # a notebook without ipywidgets has no bar
            # Can be queried.
            connection.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
        connection.execute("SET TimeZone = 'UTC'; SET preserve_insertion_order = true")
        yield connection
    except duckdb.OutOfMemoryException as error:
        raise DpformerError(f"{what} needs more memory than its limit: raise --memory ({first_line(error)})") from None
    except duckdb.Error as error:
        raise DpformerError(f"{what} {failed}: {first_line(error)}") from None
    finally:
        connection.close()


def confine(connection: Connection, files: list[Path]) -> None:
    """From now on, SQL can read these files and no others, and write none; this cannot be undone.

    A query may come from an untrusted config.toml, a view from an untrusted database: `COPY log TO …`, `read_text(…)`.
    """
    allowed = ", ".join(text(str(file.resolve())) for file in files)
    connection.execute(f"SET allowed_paths = [{allowed}]")
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")


def default_memory() -> str:
    """Half of the machine's memory, at most 8 GB; 4 GB if the system does not say (Windows)."""
    if not hasattr(os, "sysconf"):
        return f"{4 * 10**9 // 2**20}MiB"
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{min(there // 2, 8 * 10**9) // 2**20}MiB"


def text(value: str) -> str:
    """A value as an SQL string."""
    return "'" + value.replace("'", "''") + "'"


def name(value: str) -> str:
    """A name as an SQL identifier."""
    return '"' + value.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    """The first line of an error message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
