"""Options for the data: which log, how to read it, what to use of it, and which items there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from dpformer.options import Count, Limit, Options, option

if TYPE_CHECKING:
    from dpformer.data import Columns, Filters, Reading

OF_READING = (
    "format", "columns", "delimiter", "quotes", "encoding", "order", "skip_bad_rows", "table", "query", "snapshot",
    "memory",
)  # fmt: skip
OF_COLUMNS = ("user_column", "item_column", "timestamp_column", "rating_column")
WEIGHING = ("event_weights", "event_column", "session_gap")  # options of training, not of reading another log
FILTERS = ("where", "since", "until", "min_rating", "min_user_actions")
READING = (*OF_COLUMNS, *OF_READING, *FILTERS)  # options of every command that reads a log
# Options that describe the format of one file and do not apply to a file of another format.
OF_FORMAT = ("format", "columns", "delimiter", "quotes", "encoding", "table", "query", "snapshot")
OF_TABLES = ("format", "table", "query", "snapshot", "memory")  # of logs and of texts
OF_LOGS = (
    "item_column", "rating_column", *FILTERS, *WEIGHING, "split", "catalog",
    *(n for n in OF_READING if n not in OF_TABLES), "attributes", "drop_unknown_items", "assume_items_public",
    "validation", "cache",
)  # fmt: skip


class DataOptions(Options):
    """The section `Data`."""

    section: ClassVar[str] = "Data"

    file: Path | None = option(
        None, "Log: a file, folder, glob, table, database, URL, or - for standard input (default: synthetic data)."
    )
    task: Literal["recommend", "lm"] = option("recommend", "recommend (items of users) or lm (language model of text).")
    unit: Literal["chunk", "line", "document", "author"] | None = option(
        None, "Text: unit of privacy: chunk, line, document or author."
    )
    characters: str | None = option(
        None, "Text: ascii, latin, greek, cyrillic, or Unicode ranges such as U+000A,U+0020-U+007E (default: ascii)."
    )
    tokenizer: Path | None = option(None, "Text: a public tokenizer.json, instead of characters.")
    user_column: str | None = option(None, "Column of user ids.")
    item_column: str | None = option(None, "Column of item ids.")
    text_column: str | None = option(None, "Text: column of texts in a table, or key in JSON lines (default: text).")
    timestamp_column: str | None = option(None, "Column of timestamps.")
    rating_column: str | None = option(None, "Column of ratings.")
    format: str | None = option(None, "Format of the log (default: inferred from its name).")
    columns: str | None = option(None, "Header of a log without one: user,item,timestamp, or user,items.")
    delimiter: str | None = option(None, "Field separator of CSV (default: the one in its header).")
    quotes: bool = option(True, "Allow quoted CSV fields.")
    encoding: str = option("utf-8", "Encoding of the log: utf-8, utf-16, latin-1.")
    order: Literal["time", "file"] = option("time", "Order of interactions: by timestamp, or file (rows are in order).")
    skip_bad_rows: bool = option(False, "Skip and count invalid rows.")
    table: str | None = option(None, "Table of a database.")
    query: str | None = option(None, "SQL that selects the log from a database, or from Parquet as table log.")
    snapshot: str | None = option(
        None, "Version of a Delta table, or snapshot id of an Iceberg table (default: current)."
    )
    engine: Literal["numpy", "duckdb", "spark"] | None = option(
        None, "Backend for counting: numpy, duckdb or spark (default: chosen by data size)."
    )
    memory: str | None = option(None, "Memory limit of DuckDB, such as 4GB (default: half of the machine's).")
    where: str | None = option(None, "Keep only rows that satisfy a condition on their own columns: \"event = 'buy'\".")
    since: str | None = option(None, "Keep interactions from this date (or number) onwards.")
    until: str | None = option(
        None, "Keep interactions before this date (or number); with --split time, test on those after it."
    )
    split: Literal["last", "time"] = option(
        "last", "Test on the last item of each user, or (time) on the first item after --until."
    )
    min_rating: float | None = option(None, "Drop interactions with a lower rating.")
    min_user_actions: Limit = option(0, "Drop the interactions of users with fewer.")
    event_weights: str | None = option(
        None, "Counts: how much interactions count by their event: purchase=3,view=1 (default: all the same)."
    )
    event_column: str | None = option(None, "Column of events, for --event-weights (default: event).")
    session_gap: str | None = option(
        None, "Counts: a pause that ends a session, such as 30min: items follow one another only within a session."
    )
    users: Annotated[int, Field(ge=2)] | None = option(
        None, "Declared number of users, N (default: counted in the log, before any filter)."
    )
    catalog: Path | None = option(None, "Public file of all items, with or without titles and attributes.")
    attributes: bool | None = option(
        None, "Counts: use the catalogue's attributes besides titles and ids (default: if there are any)."
    )
    drop_unknown_items: bool = option(False, "Drop items missing in the catalogue.")
    assume_items_public: bool = option(
        False, "Take the item list from the data, unprotected, instead of releasing it within ε and δ."
    )
    max_length: Count | None = option(
        None, "Train on this many last items per user (default: all for counts, 200 for networks)."
    )
    validation: bool = option(False, "Also hold out a validation item.")
    cache: Path | None = option(None, "Folder for prepared data, which is private.")

    def reading(self) -> Reading:
        """The declared reading options."""
        from dpformer.data.reading import Reading  # numpy

        return Reading(**{name: getattr(self, name) for name in OF_READING})

    def filters(self) -> Filters:
        """The filters of the log."""
        from dpformer.data.filters import Filters  # numpy

        until = None if self.split == "time" else self.until
        return Filters(**{**{name: getattr(self, name) for name in (*FILTERS, *WEIGHING)}, "until": until})

    @property
    def split_at(self) -> str | None:
        """The cut of a split by time."""
        return self.until if self.split == "time" else None

    def log_columns(self) -> Columns:
        """Names of the log's columns."""
        from dpformer.data.columns import Columns  # numpy

        return Columns(self.user_column, self.item_column, self.timestamp_column, self.rating_column)

    @property
    def synthetic(self) -> bool:
        """Whether the built-in synthetic data is used, which is public. Spark has logs without a file."""
        return self.file is None and self.engine != "spark"

    def check_data(self) -> None:
        """Raise ValueError on contradictions within the section."""
        if self.format is not None:
            self.reading()  # the table of formats knows the valid names
        if self.where or self.since or self.until or self.event_weights or self.session_gap:
            self.filters()
        if self.session_gap and self.order == "file":
            raise ValueError("session_gap needs times, but order is file: give a timestamp column")
        if self.split == "time":
            self._check_split()
        if self.file is not None:
            self._check_url(self.file)

    def _check_split(self) -> None:
        if not self.until:
            raise ValueError("split is time: give the end of the training period with --until, such as 2024-06-01")
        if self.validation:
            raise ValueError("split is time, which holds out no validation items: omit validation")
        if self.order == "file":
            raise ValueError("split is time, but order is file: give a timestamp column")
        from dpformer.data.time_window import Bound

        Bound.parse(self.until, "until")

    def _check_url(self, file: Path) -> None:
        """A URL with a secret is refused before it is written anywhere."""
        from dpformer.data.sources.urls import url_of

        url = url_of(file)
        if url is not None and self.engine == "spark":
            raise ValueError(f"engine is spark, but file is {url}: name a table known to Spark with --table")
