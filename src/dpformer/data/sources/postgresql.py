"""PostgreSQL, by its ADBC driver: binary copies into Arrow, and libpq's own ways to give a password."""

from __future__ import annotations

import os
from typing import Any

from dpformer.data.sources.urls import Url
from dpformer.engines.duckdb_connection import name
from dpformer.errors import MissingExtra

_PLAIN = ("string", "int", "uint", "float", "double", "halffloat", "timestamp", "date", "bool", "binary", "list")
_TABLES = (
    "SELECT quote_ident(table_schema) || '.' || quote_ident(table_name) AS name FROM information_schema.tables "
    "WHERE table_schema NOT IN ('pg_catalog', 'information_schema') ORDER BY 1"
)


class Database:
    """See `databases.Database`."""

    title = "PostgreSQL"
    advice = "postgresql://user@host/…, PGPASSWORD or ~/.pgpass"

    def __init__(self, url: Url) -> None:
        try:
            import pyarrow  # noqa: F401
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise MissingExtra("adbc-driver-postgresql", "postgresql") from None
        self.library, self.url = dbapi, url
        self.connection: Any = None
        self.streaming: Any = None
        self.failures: tuple[type[Exception], ...] = (dbapi.Error,)

    def open(self) -> None:
        from dpformer.data.sources.databases import TIMEOUT

        options = [f"connect_timeout={TIMEOUT}"] * ("connect_timeout=" not in self.url.parts.query)
        # libpq would do without encryption where the server does.
        encrypted = self.url.is_local or "sslmode=" in self.url.parts.query or "PGSSLMODE" in os.environ
        options += [] if encrypted else ["sslmode=require"]
        joined = f"{self.url}{'&' if self.url.parts.query else '?'}{'&'.join(options)}" if options else str(self.url)
        self.connection = self.library.connect(joined)
        self._execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        self._execute("SET LOCAL TIME ZONE 'UTC'")

    def columns(self, query: str) -> list[str]:
        return list(self._schema(query).names)

    def tables(self) -> list[str]:
        return [str(row[0]) for row in self._execute(_TABLES).fetchall()]

    def quoted(self, word: str) -> str:
        return name(word)

    def rows(self, query: str) -> Any:
        """Types that Arrow has no own one for (numeric, uuid, …) come as text, as PostgreSQL writes it."""
        kinds = self._schema(query)
        cells = [
            name(field.name) if str(field.type).startswith(_PLAIN) else f"CAST({name(field.name)} AS text)"
            for field in kinds
        ]
        named = ", ".join(f"{cell} AS {name(field.name)}" for cell, field in zip(cells, kinds, strict=True))
        self.streaming = self._execute(f"SELECT {named} FROM ({query}) AS cells")  # a cursor ends with its last name
        return self.streaming.fetch_record_batch()

    def close(self) -> None:
        if self.streaming is not None:
            self.streaming.close()
        if self.connection is not None:
            self.connection.rollback()
            self.connection.close()

    def _schema(self, query: str) -> Any:
        """Names and types, without a row."""
        return self._execute(f"SELECT * FROM ({query}) AS given LIMIT 0").fetch_record_batch().schema

    def _execute(self, sql: str) -> Any:
        cursor = self.connection.cursor()
        cursor.execute(sql)
        return cursor
