"""A log in a cluster: Spark reads, encodes, sorts and splits it. Only the item list and sums come to this machine.

Rows have no order in a cluster, so there is no `--order file`, and interactions with equal times are ordered by item.
Types are declared by the table: ids are text or integers; times are numbers, timestamps or dates. Other types are cast
with `--query`, a SELECT in the cluster's own SQL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpformer.data.columns import Columns, resolve
from dpformer.data.dataset import MIN_TO_TEST
from dpformer.data.filters import Filters
from dpformer.data.population import check_declared
from dpformer.data.reading import Reading
from dpformer.data.unordered_hash import DIGITS, PARTS_OF_A_DIGEST, hash_of_digests
from dpformer.data.vocabulary import Vocabulary, canonical_order
from dpformer.engines.spark_sums import Spark, for_size, spark_session
from dpformer.engines.sql_sums import SqlSums
from dpformer.engines.sums import LONGEST
from dpformer.errors import DpformerError

_WHOLE = ("tinyint", "smallint", "int", "bigint")
_NUMBERS = (*_WHOLE, "float", "double", "decimal")
_TIMES = (*_NUMBERS, "timestamp", "timestamp_ntz", "date")
_NO_USER = "(u IS NULL OR u = '' OR u RLIKE '[\\\\n\\\\r\\\\x00]')"


@dataclass(frozen=True, eq=False)
class ClusterLog:
    """A log that stays in its cluster; its training part is Spark's view `histories` (u, p, i)."""

    session: Any
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

    def sums(self) -> SqlSums:
        """Exact sums of the training part, by Spark."""
        return SqlSums(Spark(self.session), self.num_users)


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
    (filters or Filters()).refuse_rows("does not apply to --engine spark: filter in --query, in the cluster's own SQL")
    session = spark_session(reading.memory)
    try:
        log = _Log(session, _source(session, file, reading), columns, reading, filters or Filters())
        skipped = log.check()
        words, dropped = log.encode(vocabulary, drop_unknown_items)
        return log.finish(words, dropped, skipped, max_length, validation, users)
    except Exception as error:
        if type(error).__module__.split(".")[0] not in ("pyspark", "py4j"):
            raise
        raise DpformerError(f"Spark cannot read the log: {(str(error).splitlines() or ['?'])[0][:300]}") from None


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
    """A log while it is transformed from its table to the view `histories`."""

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

    def check(self) -> dict[str, int]:
        """Refuse rows without an id or a time, or skip and count them."""
        wrong = {
            "no user": _NO_USER,
            "no item": "id IS NULL OR id = '' OR id RLIKE '[\\\\n\\\\r\\\\x00]'",
            "no time": "t IS NULL",
            "no rating": "r IS NULL",
        }
        tests = list(wrong.values())
        firsts = [
            f"{test} AND NOT ({' OR '.join(f'coalesce({t}, false)' for t in tests[:n]) or 'false'})"
            for n, test in enumerate(tests)
        ]
        counted = ", ".join(f"count_if(coalesce({first}, false)) AS bad{n}" for n, first in enumerate(firsts))
        # N: all users named by a row, before any filter.
        named = f"count(DISTINCT CASE WHEN NOT coalesce({_NO_USER}, false) THEN u END) AS named"
        row = self.session.sql(f"SELECT count(*) AS n, {counted}, {named} FROM dpformer_cells").collect()[0]
        self.named = int(row["named"])
        for_size(self.session, int(row["n"]))
        counts = {why: int(row[f"bad{n}"]) for n, why in enumerate(wrong)}
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
        good = f"NOT ({' OR '.join(f'coalesce({test}, false)' for test in wrong.values())})"
        least, few = self.filters.min_rating, self.filters.min_user_actions
        kept = f"SELECT u, id, t FROM dpformer_cells WHERE {good}" + ("" if least is None else f" AND r >= {least!r}")
        self._view("dpformer_kept", kept)
        if few > 1:
            enough = f"SELECT u AS v FROM dpformer_kept GROUP BY u HAVING count(*) >= {few}"
            self._view("dpformer_rows", f"SELECT u, id, t FROM dpformer_kept JOIN ({enough}) AS e ON u = v")
        else:
            self._view("dpformer_rows", "SELECT u, id, t FROM dpformer_kept")
        return bad

    def encode(self, vocabulary: Vocabulary | None, drop_unknown_items: bool) -> tuple[Vocabulary, int]:
        """Create the view `dpformer_encoded` (u, t, i); returns the items, and the number of rows with other items."""
        counted = self.session.sql("SELECT id, count(*) AS n FROM dpformer_rows GROUP BY id").toArrow()
        ids = counted.column("id").to_pylist()
        if not ids:
            raise DpformerError(f"the filters leave none of the {self.total:,} interactions: loosen them")
        if vocabulary is None:
            vocabulary = Vocabulary([ids[place] for place in canonical_order(ids).tolist()])
        numbers = vocabulary.match(ids)
        unknown = [place for place, number in enumerate(numbers.tolist()) if number < 0]
        dropped = sum(counted.column("n")[place].as_py() for place in unknown)
        if unknown and not drop_unknown_items:
            raise DpformerError(
                f"item {ids[unknown[0]]!r} and {len(unknown) - 1:,} other items are not in the catalogue "
                f"({dropped:,} interactions); complete it, or drop them with --drop-unknown-items"
            )
        import pyarrow

        known = [place for place, number in enumerate(numbers.tolist()) if number >= 0]
        table = pyarrow.table({"name": [ids[place] for place in known], "i": numbers[known]})
        self.session.createDataFrame(table).createOrReplaceTempView("dpformer_items")
        self._view("dpformer_encoded", "SELECT u, t, i FROM dpformer_rows JOIN dpformer_items ON id = name")
        return vocabulary, dropped

    def finish(
        self,
        words: Vocabulary,
        dropped: int,
        skipped: dict[str, int],
        max_length: int | None,
        validation: bool,
        declared: int | None,
    ) -> ClusterLog:
        """Split, keep the training part in the cluster, and count it."""
        held = f"CASE WHEN n >= {MIN_TO_TEST} THEN {1 + validation} ELSE 0 END"
        most = min(max_length or LONGEST, LONGEST)
        encoded = "SELECT u, t, i FROM dpformer_encoded DISTRIBUTE BY u"
        placed = self.session.sql(
            "SELECT u, i, row_number() OVER w AS p, count(*) OVER (PARTITION BY u) AS n, "
            "CASE WHEN t = lag(t) OVER w AND i = lag(i) OVER w THEN 1 ELSE 0 END AS twice "
            f"FROM ({encoded}) AS e WINDOW w AS (PARTITION BY u ORDER BY t, i)"
        ).persist()
        placed.createOrReplaceTempView("dpformer_placed")
        training = (
            f"SELECT u, CAST(p AS BIGINT) AS p, CAST(i AS BIGINT) AS i FROM dpformer_placed WHERE p <= n - {held}"
        )
        self._view("histories", f"{training} AND p > n - {held} - {most}")
        left, rows, longest, twice, digests = self._totals()
        if left < 2:
            raise DpformerError(f"only {left} user remains, but user-level privacy needs many: check the user column")
        if longest < 2:
            raise DpformerError(f"none of the {left:,} users has two items, so there is no next item to predict")
        users = check_declared(self.named, declared)
        facts = {
            "source": self.name,
            "format": "Spark",
            "order": "timestamp",
            "time_column": self.roles["timestamp"],
            "skipped": skipped,
            "duplicates": twice,
            "vocabulary": {"policy": words.policy, "interactions_dropped": dropped},
            "users": users,
            "users_declared": declared is not None,
            "items": len(words),
            "interactions": rows,
            "max_length": max_length,
        }
        found = hash_of_digests(digests, words, users, validation)
        return ClusterLog(self.session, users, rows, words, max_length, validation, found, facts)

    def _totals(self) -> tuple[int, int, int, int, list[int]]:
        """(users, interactions, longest history, exact duplicates, sums of digests), in one pass."""
        each = (
            "SELECT max(n) AS n, sum(twice) AS twice, sha2(concat_ws(',', transform(array_sort(collect_list(struct(p, "
            "i))), x -> CAST(x.i AS STRING))), 256) AS h FROM dpformer_placed GROUP BY u"
        )
        sums = ", ".join(
            f"CAST(sum(CAST(conv(substring(h, {at + 1}, {DIGITS}), 16, 10) AS DECIMAL(38, 0))) AS STRING)"
            for at in PARTS_OF_A_DIGEST
        )
        totals = f"SELECT count(*), sum(n), max(n), sum(twice), {sums} FROM ({each}) AS users"
        row = self.session.sql(totals).collect()[0]
        left, rows, longest, twice = (int(value or 0) for value in row[:4])
        return left, rows, longest, twice, [int(value or 0) for value in row[4:]]

    def _view(self, name: str, sql: str) -> None:
        self.session.sql(sql).createOrReplaceTempView(name)


def _kind(kind: str) -> str:
    """A type without its precision; integral decimals (unsigned numbers of Parquet) are integers."""
    return "bigint" if kind.startswith("decimal(") and kind.endswith(",0)") else kind.split("(")[0]


def _id(role: str, column: str, kind: str, where: str) -> str:
    if kind not in ("string", *_WHOLE):
        raise DpformerError(f"{where}: the {role} column {column!r} is {kind}; cast it to text in --query 'SELECT …'")
    return f"trim(BOTH ' \t' FROM CAST({_name(column)} AS STRING))"


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
