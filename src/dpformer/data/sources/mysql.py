"""MySQL and MariaDB, by PyMySQL: a cursor on the server's side, whose rows become batches of Arrow."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from dpformer.data.sources.urls import Url
from dpformer.errors import DpformerError, MissingExtra

ROWS_AT_ONCE = 1 << 16
_BINARY = 63  # the character set of what is no text
_MODES = ("DISABLED", "REQUIRED", "VERIFY_IDENTITY")
_TABLES = "SELECT table_name FROM information_schema.tables WHERE table_schema = database() ORDER BY table_name"


class Database:
    """See `databases.Database`."""

    title = "MySQL"
    advice = "mysql://user@host/…, MYSQL_PWD or ~/.my.cnf"

    def __init__(self, url: Url) -> None:
        try:
            import pyarrow  # noqa: F401
            import pymysql
            from pymysql.constants import FIELD_TYPE, FLAG
            from pymysql.cursors import SSCursor
        except ImportError:
            raise MissingExtra("PyMySQL", "mysql") from None
        self.library, self.url = pymysql, url
        self.connection: Any = None
        self.cursor: Any = None
        self.types, self.unsigned, self.streaming = FIELD_TYPE, FLAG.UNSIGNED, SSCursor
        self.failures: tuple[type[Exception], ...] = (pymysql.err.Error,)

    def open(self) -> None:
        from dpformer.data.sources.databases import TIMEOUT

        parts, given = self.url.parts, {}
        own = Path.home() / ".my.cnf"
        for key, value in (
            ("user", parts.username and unquote(parts.username)),
            ("password", os.environ.get("MYSQL_PWD")),
        ):
            if value:
                given[key] = value
        self.connection = self.library.connect(
            host=parts.hostname or "localhost",
            port=parts.port or 3306,
            database=self.url.path,
            read_default_file=str(own) if own.exists() else None,
            charset="utf8mb4",
            connect_timeout=TIMEOUT,
            ssl=self._encryption(),
            **given,
        )
        self._execute("SET SESSION time_zone = '+00:00'")
        self._execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")

    def columns(self, query: str) -> list[str]:
        return [str(column[0]) for column in self._execute(f"SELECT * FROM ({query}) AS given LIMIT 0").description]

    def tables(self) -> list[str]:
        return [self.quoted(str(row[0])) for row in self._execute(_TABLES).fetchall()]

    def quoted(self, word: str) -> str:
        return "`" + word.replace("`", "``") + "`"

    def rows(self, query: str) -> Any:
        import pyarrow

        self.cursor = cursor = self.connection.cursor(self.streaming)
        cursor.execute(query)
        kinds = [self._kind(field) for field in cursor._result.fields]
        schema = pyarrow.schema(list(zip([column[0] for column in cursor.description], kinds, strict=True)))
        return pyarrow.RecordBatchReader.from_batches(schema, _batches(cursor, schema))

    def close(self) -> None:
        if self.cursor is not None:
            self.cursor.close()
        if self.connection is not None:
            self.connection.close()

    def _encryption(self) -> ssl.SSLContext | None:
        """For hosts elsewhere required, as the URL says (`?ssl-mode=`) or by default; PyMySQL would do without."""
        options = dict(parse_qsl(self.url.parts.query))
        mode = options.get("ssl-mode", "DISABLED" if self.url.is_local else "REQUIRED").upper()
        if mode not in _MODES or set(options) - {"ssl-mode"}:
            raise DpformerError(f"{self.url}: after ? may stand ssl-mode, one of {', '.join(_MODES)}, and nothing else")
        if mode == "DISABLED":
            return None
        context = ssl.create_default_context()
        if mode == "REQUIRED":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _kind(self, field: Any) -> Any:
        """The type of Arrow for a column: decimals, JSON and the like are text."""
        import pyarrow

        types, code = self.types, field.type_code
        if code in (types.TINY, types.SHORT, types.INT24, types.LONG, types.LONGLONG, types.YEAR):
            return pyarrow.uint64() if field.flags & self.unsigned else pyarrow.int64()
        if code in (types.FLOAT, types.DOUBLE):
            return pyarrow.float32() if code == types.FLOAT else pyarrow.float64()
        if code in (types.DATETIME, types.TIMESTAMP):
            return pyarrow.timestamp("us")
        if code == types.DATE:
            return pyarrow.date32()
        blobs = (types.TINY_BLOB, types.BLOB, types.MEDIUM_BLOB, types.LONG_BLOB, types.STRING, types.VAR_STRING)
        if code == types.BIT or (code in blobs and field.charsetnr == _BINARY):
            return pyarrow.binary()
        return pyarrow.string()

    def _execute(self, sql: str) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(sql)
        return cursor


def _batches(cursor: Any, schema: Any) -> Iterator[Any]:
    import pyarrow

    while rows := cursor.fetchmany(ROWS_AT_ONCE):
        columns = zip(*rows, strict=True)
        cells = [[_cell(value, field.type) for value in column] for column, field in zip(columns, schema, strict=True)]
        arrays = [pyarrow.array(column, field.type) for column, field in zip(cells, schema, strict=True)]
        yield pyarrow.record_batch(arrays, schema=schema)


def _cell(value: Any, kind: Any) -> Any:
    """A value of a type; a date that is none (0000-00-00, which comes as text) is missing."""
    import pyarrow

    if value is None:
        return None
    if pyarrow.types.is_temporal(kind):
        return value if isinstance(value, date | datetime) else None
    return str(value) if pyarrow.types.is_string(kind) else value
