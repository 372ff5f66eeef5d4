"""How to read a log: declared by options, the file name and the header, never inferred from rows.

One user's rows must not change how another's are read: a format guessed from rows would let one row affect everyone.
An invalid row affects only itself: it is refused, or skipped and counted.
"""

from dataclasses import dataclass

from dpformer.errors import DpformerError

DELIMITERS = ",;|\t"


@dataclass(frozen=True)
class Reading:
    """Reading options of a log, besides the names of its columns.

    Attributes:
        format: the name of a format (`readers/formats.py`); by default from the file's name.
        columns: the header, if the file has none, such as "user,item,timestamp"; a last name `items` stands for all
            other fields of a line (one user per line).
        delimiter: separator of CSV fields; by default the one in its header.
        quotes: whether CSV fields may be quoted; otherwise quotes are ordinary characters.
        encoding: utf-8, utf-16, latin-1, …
        order: "time": by the timestamp column; "file": rows are in order of time.
        skip_bad_rows: skip and count invalid rows, instead of refusing the file.
        table: table of a database.
        query: SQL, with the log as table `log`.
        snapshot: state of a table that has numbered ones: a version (Delta), a snapshot (Iceberg) or a commit (Hub);
            by default the current one.
        memory: memory limit of the engine, such as "4GB".
    """

    format: str | None = None
    columns: str | None = None
    delimiter: str | None = None
    quotes: bool = True
    encoding: str = "utf-8"
    order: str = "time"
    skip_bad_rows: bool = False
    table: str | None = None
    query: str | None = None
    snapshot: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.format is not None:
            from dpformer.data.readers.formats import formats  # every reader

            if self.format not in formats():
                raise DpformerError(f"format is {self.format!r}; it must be one of {', '.join(formats())}")
        if self.order not in ("time", "file"):
            raise DpformerError(f"order is {self.order!r}; it must be time or file")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise DpformerError(f"delimiter is {self.delimiter!r}; it must be one character, not a quote or line break")

    @property
    def header(self) -> list[str] | None:
        """The names in `columns`."""
        return None if self.columns is None else [name.strip() for name in self.columns.split(",")]
