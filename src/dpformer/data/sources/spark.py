"""A log in a cluster: Spark reads, encodes and sorts it, and packs the histories of its users.

They stay there, and only the item list and sums come to this machine (`cluster_log`), or they come here part by part,
as prepared data on disk (`handed_over`).

Rows have no order in a cluster, so there is no `--order file`, and interactions with equal times are ordered by item.
Types are declared by the table: ids are text or integers; times are numbers, timestamps or dates. Other types are cast
with `--query`, a SELECT in the cluster's own SQL.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.cache import load, save
from dpformer.data.columns import Columns, resolve
from dpformer.data.dataset import MIN_TO_TEST, Dataset
from dpformer.data.filters import Filters
from dpformer.data.histories import Histories
from dpformer.data.population import check_declared
from dpformer.data.preparation import from_histories
from dpformer.data.reading import Reading
from dpformer.data.unordered_hash import unordered_hash
from dpformer.data.vocabulary import Vocabulary, canonical_order
from dpformer.engines.packed_parts import SCHEMA, pack, training_part, unpacked
from dpformer.engines.spark_session import one_sentence, ship_code, spark_session
from dpformer.engines.spark_sums import SparkSums
from dpformer.errors import DpformerError

ROWS_OF_A_PART = 1 << 18  # of a log, in the cluster: three million pairs
_WHOLE = ("tinyint", "smallint", "int", "bigint")
_NUMBERS = (*_WHOLE, "float", "double", "decimal")
_TIMES = (*_NUMBERS, "timestamp", "timestamp_ntz", "date")


@dataclass(frozen=True, eq=False)
class ClusterLog:
    """A log that stays in its cluster, packed: rows of `packed_parts.SCHEMA`."""

    packed: Any
    num_users: int
    num_interactions: int
    vocabulary: Vocabulary
    max_length: int | None
    validation: bool
    hash: str
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def unordered_hash(self) -> str:
        """Of all histories, in whatever order users come: as `Dataset.unordered_hash` is."""
        return self.hash

    @property
    def num_items(self) -> int:
        return len(self.vocabulary)

    def sums(self) -> SparkSums:
        """Exact sums of the training part, by Spark."""
        part = partial(training_part, longest=self.max_length, held_out=1 + self.validation, shortest=MIN_TO_TEST)
        return SparkSums(self.packed.rdd.map(part), self.num_users)


def cluster_log(
    file: Path | None,
    *,
    columns: Columns,
    reading: Reading,
    vocabulary: Vocabulary | None = None,
    drop_unknown_items: bool = False,
    filters: Filters | None = None,
    max_length: int | None = None,
    validation: bool = False,
    users: int | None = None,
) -> ClusterLog:
    """A table (`reading.table`), a query, or Parquet files (`file`) that Spark can access; options as for `prepare`."""
    with one_sentence("Spark cannot read the log"):
        log = _Log.open(file, columns, reading, filters or Filters())
        words = log.encode(vocabulary, drop_unknown_items)
        packed = log.packed()
        parts = packed.select("users", "interactions", "longest", "duplicates", "digests").collect()
    left, rows, duplicates = (sum(part[name] for part in parts) for name in ("users", "interactions", "duplicates"))
    if left < 2:
        raise DpformerError(f"only {left} user remains, but user-level privacy needs many: check the user column")
    if max(part["longest"] for part in parts) < 2:
        raise DpformerError(f"none of the {left:,} users has two items, so there is no next item to predict")
    named = check_declared(log.named, users)
    facts = {
        **log.facts(duplicates),
        "vocabulary": {"policy": words.policy, "interactions_dropped": log.dropped},
        "users": named,
        "users_declared": users is not None,
        "items": len(words),
        "interactions": rows,
        "max_length": max_length,
    }
    totals = [sum(map(int, column)) for column in zip(*(part["digests"] for part in parts), strict=True)]
    found = unordered_hash(totals, words, named, validation)
    return ClusterLog(packed, named, rows, words, max_length, validation, found, facts)


def handed_over(
    file: Path | None,
    cache: Path,
    *,
    columns: Columns,
    reading: Reading,
    vocabulary: Vocabulary | None = None,
    drop_unknown_items: bool = False,
    filters: Filters | None = None,
    max_length: int | None = None,
    validation: bool = False,
    users: int | None = None,
) -> Dataset:
    """The same as prepared data below `cache`, in order of user ids: Spark packs it, and parts come here one by one.

    The state of a table in a cluster is not known, so it is read anew each time; the beginning of the data's hash is
    the snapshot by which a run finds its own data again (`reading.snapshot`), without the cluster.
    """
    if reading.snapshot is not None:
        folder = cache / reading.snapshot
        if not re.fullmatch("[0-9a-f]{32}", reading.snapshot) or not folder.is_dir():
            raise DpformerError(f"{cache} does not hold the snapshot {reading.snapshot}: restore it, or train again")
        return load(folder).with_max_length(max_length)
    filters = filters or Filters()
    with one_sentence("Spark cannot read the log"):
        log = _Log.open(file, columns, reading, filters)
        words = log.encode(vocabulary, drop_unknown_items)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".histories-", dir=cache) as private:  # mode 0700
            histories = log.histories(Path(private) / "items", words)
            dataset = from_histories(histories, log.name, words, False, filters, max_length, validation, users)
            facts = {**dataset.description["vocabulary"], "interactions_dropped": log.dropped}
            snapshot = dataset.hash[:32]
            dataset = replace(dataset, description={**dataset.description, "vocabulary": facts, "snapshot": snapshot})
            if not (cache / snapshot).exists():
                save(dataset, cache / snapshot)
    return load(cache / snapshot).with_max_length(max_length)


def _source(session: Any, file: Path | None, reading: Reading) -> Any:
    """(frame, its name in messages)."""
    given = [value for value in (file, reading.table, reading.query) if value is not None]
    if len(given) != 1:
        raise DpformerError(
            "--engine spark reads one of --table db.events, --query 'SELECT …' or Parquet files: give one"
        )
    if reading.order != "time":
        raise DpformerError("rows in a cluster have no order: give a timestamp column, not --order file")
    if reading.table is not None:
        return session.table(reading.table), reading.table
    if reading.query is not None:
        return session.sql(f"SELECT * FROM ({reading.query}) AS log"), "the query"  # a subquery must be a SELECT
    assert file is not None
    return session.read.option("recursiveFileLookup", "false").parquet(str(file)), file.name


class _Log:
    """A log on its way from its table to packed histories."""

    def __init__(self, session: Any, source: Any, columns: Columns, reading: Reading, filters: Filters) -> None:
        self.session, self.reading, self.filters = session, reading, filters
        (frame, self.name), rated = source, filters.min_rating is not None
        kinds = {column: _kind(kind) for column, kind in frame.dtypes}
        self.roles = resolve(list(kinds), columns, rating=rated, order="time", where=self.name)
        frame.createOrReplaceTempView("dpformer_log")
        user, item = (_id(role, self.roles[role], kinds[self.roles[role]], self.name) for role in ("user", "item"))
        time = _typed("timestamp", self.roles["timestamp"], kinds, _TIMES, self.name)
        rating = _typed("rating", self.roles["rating"], kinds, _NUMBERS, self.name) if rated else "0"
        self._view("dpformer_cells", f"SELECT {user} AS u, {item} AS id, {time} AS t, {rating} AS r FROM dpformer_log")
        self.wrong = {
            "no user": _no_id("u", kinds[self.roles["user"]]),
            "no item": _no_id("id", kinds[self.roles["item"]]),
            "no time": "t IS NULL",
            "no rating": "r IS NULL",
        }
        self.skipped = self.check()
        self.dropped = 0  # interactions with other items than the vocabulary's

    @classmethod
    def open(cls, file: Path | None, columns: Columns, reading: Reading, filters: Filters) -> _Log:
        filters.refuse_rows("does not apply to --engine spark: filter in --query, in the cluster's own SQL")
        session = spark_session(reading.memory)
        return cls(session, _source(session, file, reading), columns, reading, filters)

    def check(self) -> dict[str, int]:
        """Refuse rows without an id or a time, or skip and count them."""
        tests = list(self.wrong.values())
        firsts = [
            f"{test} AND NOT ({' OR '.join(f'coalesce({t}, false)' for t in tests[:n]) or 'false'})"
            for n, test in enumerate(tests)
        ]
        counted = ", ".join(f"count_if(coalesce({first}, false)) AS bad{n}" for n, first in enumerate(firsts))
        # N: all users named by a row, before any filter.
        named = f"count(DISTINCT CASE WHEN NOT coalesce({tests[0]}, false) THEN u END) AS named"
        row = self.session.sql(f"SELECT count(*) AS n, {counted}, {named} FROM dpformer_cells").collect()[0]
        self.named = int(row["named"])
        counts = {why: int(row[f"bad{n}"]) for n, why in enumerate(self.wrong)}
        counts[""] = int(row["n"]) - sum(counts.values())
        if not counts[""]:
            raise DpformerError(f"{self.name} has no rows" + (" readable" if row["n"] else ""))
        bad = {why: count for why, count in counts.items() if why and count}
        if bad and not self.reading.skip_bad_rows:
            why, count = next(iter(bad.items()))
            raise DpformerError(
                f"{count:,} rows of {self.name} have {why}: complete them, or skip such rows with --skip-bad-rows"
            )
        self.total = counts[""]
        good = f"NOT ({' OR '.join(f'coalesce({test}, false)' for test in tests)})"
        least, few = self.filters.min_rating, self.filters.min_user_actions
        kept = f"SELECT u, id, t FROM dpformer_cells WHERE {good}" + ("" if least is None else f" AND r >= {least!r}")
        self._view("dpformer_kept", kept)
        if few > 1:
            enough = f"SELECT u AS v FROM dpformer_kept GROUP BY u HAVING count(*) >= {few}"
            self._view("dpformer_rows", f"SELECT u, id, t FROM dpformer_kept JOIN ({enough}) AS e ON u = v")
        else:
            self._view("dpformer_rows", "SELECT u, id, t FROM dpformer_kept")
        return bad

    def encode(self, vocabulary: Vocabulary | None, drop_unknown_items: bool) -> Vocabulary:
        """Create the view `dpformer_encoded` (u, t, i) with numbers of the items, which are returned."""
        counted = self.session.sql("SELECT id, count(*) AS n FROM dpformer_rows GROUP BY id").toArrow()
        ids = counted.column("id").to_pylist()
        if not ids:
            raise DpformerError(f"the filters leave none of the {self.total:,} interactions: loosen them")
        if vocabulary is None:
            vocabulary = Vocabulary([ids[place] for place in canonical_order(ids).tolist()])
        numbers = vocabulary.match(ids)
        unknown = [place for place, number in enumerate(numbers.tolist()) if number < 0]
        self.dropped = sum(counted.column("n")[place].as_py() for place in unknown)
        if unknown and not drop_unknown_items:
            raise DpformerError(
                f"item {ids[unknown[0]]!r} and {len(unknown) - 1:,} other items are not in the catalogue "
                f"({self.dropped:,} interactions); complete it, or drop them with --drop-unknown-items"
            )
        import pyarrow

        known = [place for place, number in enumerate(numbers.tolist()) if number >= 0]
        if not known:
            raise DpformerError(f"none of the {len(ids):,} items of {self.name} is in the catalogue: check both")
        table = pyarrow.table({"name": [ids[place] for place in known], "i": numbers[known].astype(np.int32)})
        self.session.createDataFrame(table).createOrReplaceTempView("dpformer_items")
        self._view("dpformer_encoded", "SELECT u, t, i FROM dpformer_rows JOIN dpformer_items ON id = name")
        return vocabulary

    def packed(self, *, ordered: bool = False) -> Any:
        """Histories as rows of `packed_parts.SCHEMA`, kept in the cluster; with `ordered`, in order of user ids."""
        context = self.session.sparkContext
        ship_code(context)
        number = max(context.defaultParallelism, -(-self.total // ROWS_OF_A_PART))
        rows = self.session.sql("SELECT CAST(u AS BINARY) AS u, t, i FROM dpformer_encoded")
        parts = rows.repartitionByRange(number, "u") if ordered else rows.repartition(number, "u")
        return parts.sortWithinPartitions("u", "t", "i").mapInArrow(pack, SCHEMA).persist()

    def histories(self, file: Path, words: Vocabulary) -> Histories:
        """All histories on this machine, in order of user ids, with the items in a memory-mapped file."""
        packed = self.packed(ordered=True)
        lengths, names, duplicates = [np.zeros(0, np.int64)], [], 0
        try:
            with file.open("wb") as stream:
                for row in packed.toLocalIterator():
                    items, each = unpacked(row)
                    stream.write(items.data)
                    lengths.append(each.copy())
                    names += _decoded(bytes(row["names"]))
                    duplicates += row["duplicates"]
        finally:
            packed.unpersist()
        names += [""] * (self.named - len(names))  # users whose rows are all filtered out
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        offsets = np.append(offsets, np.full(1 + self.named - len(offsets), offsets[-1]))
        read = {"users": self.named, "items": len(words), "interactions": self.total}
        facts = {**self.facts(duplicates), "read": read}
        return Histories(names, words.ids, np.memmap(file, np.int32, mode="r"), offsets, facts)

    def facts(self, duplicates: int) -> dict[str, Any]:
        """How the log was read, for a description."""
        order = {"order": "timestamp", "time_column": self.roles["timestamp"]}
        return {"source": self.name, "format": "Spark", **order, "skipped": self.skipped, "duplicates": duplicates}

    def _view(self, name: str, sql: str) -> None:
        self.session.sql(sql).createOrReplaceTempView(name)


def _kind(kind: str) -> str:
    """A type without its precision; integral decimals (unsigned numbers of Parquet) are integers."""
    return "bigint" if kind.startswith("decimal(") and kind.endswith(",0)") else kind.split("(")[0]


def _decoded(names: bytes) -> list[str]:
    try:
        return names.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DpformerError(f"an id of a user is not UTF-8: {error.object[error.start :][:20]!r}") from None


def _id(role: str, column: str, kind: str, where: str) -> str:
    if kind not in ("string", *_WHOLE):
        raise DpformerError(f"{where}: the {role} column {column!r} is {kind}; cast it to text in --query 'SELECT …'")
    text = f"CAST({_name(column)} AS STRING)"
    return text if kind in _WHOLE else f"trim(BOTH ' \t' FROM {text})"


def _no_id(cell: str, kind: str) -> str:
    if kind in _WHOLE:
        return f"{cell} IS NULL"
    breaks = " OR ".join(f"contains({cell}, char({code}))" for code in (0, 10, 13))
    return f"({cell} IS NULL OR {cell} = '' OR {breaks})"


def _typed(role: str, column: str, kinds: dict[str, str], known: tuple[str, ...], where: str) -> str:
    kind, name = kinds[column], _name(column)
    if kind not in known:
        raise DpformerError(
            f"{where}: the {role} column {column!r} is {kind}; cast it to one of {', '.join(known[3:])} in --query"
        )
    if kind in ("float", "double"):
        return f"CASE WHEN abs({name}) < double('infinity') THEN {name} END"  # NaN is the largest, here
    return name


def _name(column: str) -> str:
    return "`" + column.replace("`", "``") + "`"
