"""How a log is to be read, as declared: by options, by the name of the file, by its header. Never by its rows.

One user's rows must not change how another's are read: a format that were guessed from rows would let one row change
everybody's. What is wrong in a row concerns that row: it is refused, or skipped and counted.
"""

from dataclasses import dataclass
from pathlib import Path

from dpformer.errors import DpformerError

FORMATS = {
    "csv": "CSV",
    "tsv": "TSV",
    "jsonl": "JSON lines",
    "inter": "RecBole",
    "movielens": "MovieLens ::",
    "lines": "plain lines",
    "parquet": "Parquet",
    "duckdb": "DuckDB",
    "sqlite": "SQLite",
}
SUFFIXES = {
    ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
    ".inter": "inter", ".dat": "movielens", ".txt": "lines", ".data": "lines", ".parquet": "parquet", ".pq": "parquet",
    ".duckdb": "duckdb", ".ddb": "duckdb", ".sqlite": "sqlite", ".sqlite3": "sqlite", ".db": "sqlite",
}  # fmt: skip
COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
MAGIC = {b"PAR1": "parquet", b"SQLite format 3\0": "sqlite"}  # no text file starts so, whoever wrote its first row
DELIMITERS = ",;|\t"


@dataclass(frozen=True)
class Reading:
    """What is declared about a log besides the names of its columns.

    Attributes:
        format: one of `FORMATS`; by default from the file's name.
        columns: the header that the file lacks, such as "user,item,timestamp"; a last name `items` stands for all
            other fields of a line: one user a line.
        delimiter: between the fields of CSV; by default the one in its header.
        quotes: whether CSV fields may stand in quotes; else a quote is a character like others.
        encoding: utf-8, utf-16, latin-1, …
        order: "time": by the column of times; "file": rows are in the order of time.
        skip_bad_rows: leave out and count rows that cannot be read, instead of refusing the file.
        table: of a database.
        query: SQL, with the log as table `log`.
        memory: limit of the engine, such as "4GB".
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
    memory: str | None = None

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in FORMATS:
            raise DpformerError(f"format is {self.format!r}; it must be one of {', '.join(FORMATS)}")
        if self.order not in ("time", "file"):
            raise DpformerError(f"order is {self.order!r}; it must be time or file")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise DpformerError(f"delimiter is {self.delimiter!r}; it must be one character, not a quote or line break")

    @property
    def header(self) -> list[str] | None:
        """The names in `columns`."""
        return None if self.columns is None else [name.strip() for name in self.columns.split(",")]


def format_of(path: Path, reading: Reading) -> str:
    """A key of `FORMATS`: declared, or by the name of a file, or by its magic bytes."""
    if reading.format is not None:
        return reading.format
    if path.name != "-" and path.is_file():
        with path.open("rb") as file:
            start = file.read(16)
        found = next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)
        if found is not None:
            return found
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED]
    if suffixes and suffixes[-1] in SUFFIXES:
        return SUFFIXES[suffixes[-1]]
    name = "standard input" if path.name == "-" else str(path)
    raise DpformerError(f"the format of {name} does not show in its name: give --format, one of {', '.join(FORMATS)}")
