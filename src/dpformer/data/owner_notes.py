"""Notes for the owner of the data only: counted from the data without noise, printed, never stored in a run folder.

They point to likely mistakes in a log, which is nevertheless read unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpformer.data.dataset import Dataset

NOT_PRIVATE = "not private: for the data's owner only"
NOBODY = frozenset(
    ("0", "-1", "null", "none", "nil", "nan", "na", "n/a", "<na>", "nat", "undefined", "unknown", "anonymous", "anon",
     "anonym", "guest", "default", "test", "(null)", "(none)", "(not set)", "not set", "missing", "empty", "-")
)  # fmt: skip
LOOKED_AT = 1000  # number of users and items examined
MANY = 10_000  # interactions of one user, if that is also this multiple of the median:
TIMES_MEDIAN = 100
REPEATS = 0.1  # share of interactions, among this many:
ENOUGH = 5_000_000
MILLISECONDS = 1e11  # larger numbers are not seconds since 1970 (they would be after the year 5138)


def hints(dataset: Dataset, user_column: str | None = None, item_column: str | None = None) -> list[str]:
    """Sentences on unusual features of a log; the column names are used in the advice."""
    found = [
        *_nobody(dataset.user_ids, dataset.lengths, "user", user_column),
        *_nobody(dataset.vocabulary.ids, dataset.item_counts(), "item", item_column),
        *_long_histories(dataset),
        *_times(dataset),
        *_repeats(dataset),
    ]
    return [f"hint ({NOT_PRIVATE}): {sentence}" for sentence in found]


def _nobody(ids: Sequence[str], counts: np.ndarray, role: str, column: str | None) -> list[str]:
    """Ids that seem to be placeholders, among those with the most interactions."""
    median = float(np.median(counts[counts > 0])) if (counts > 0).any() else 0.0
    most = np.argpartition(-counts, LOOKED_AT)[:LOOKED_AT] if len(counts) > LOOKED_AT else np.arange(len(counts))
    return [
        f"{role} {ids[place]!r} has {counts[place]:,} interactions; if that is a placeholder rather than a {role}, "
        f"drop them with --where \"{column or f'{role}_id'} <> '{ids[place]}'\""
        for place in most[np.argsort(-counts[most], kind="stable")].tolist()
        if counts[place] and ids[place] and _stands_for_none(ids[place], counts[place] / median)
    ][:2]


def _stands_for_none(name: str, times_median: float) -> bool:
    """A number may be a normal id, unless it occurs far more often."""
    known = name.strip().lower() in NOBODY
    return known and (times_median > TIMES_MEDIAN or not name.strip().lstrip("-").isdecimal())


def _long_histories(dataset: Dataset) -> list[str]:
    lengths = dataset.lengths[dataset.lengths > 0]
    longest, median = int(lengths.max(initial=0)), float(np.median(lengths)) if len(lengths) else 0.0
    if longest < MANY or longest < TIMES_MEDIAN * median:
        return []
    user = dataset.user_ids[int(dataset.lengths.argmax())]
    return [
        f"user {user!r} has {longest:,} interactions, but the median is {median:g}; a robot or a shared account counts "
        "as one user, so most of its interactions will have no influence"
    ]


def _times(dataset: Dataset) -> list[str]:
    range_of = dataset.description.get("time_range")
    if not range_of or None in range_of:
        return []
    first, last = range_of
    if 1e8 < first < MILLISECONDS < last:
        return [
            f"times run from {first:,.0f} to {last:,.0f}: some seem to be seconds, others milliseconds since 1970, but "
            "all are ordered as plain numbers"
        ]
    return []


def _repeats(dataset: Dataset) -> list[str]:
    some = max(1, int(np.searchsorted(dataset.offsets, ENOUGH)))  # users
    lengths = dataset.lengths[:some]
    users = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    items = dataset.items[: len(users)]
    share = 1 - len(np.unique(users * dataset.num_items + items)) / max(1, len(items))
    if share < REPEATS:
        return []
    return [
        f"{share:.0%} of the interactions repeat an item of the user's history; recommend and serve exclude such items "
        "by default (change with --allow-seen or filter_seen=False)"
    ]


def kept_items(dataset: Dataset, item_list: Sequence[int] | np.ndarray) -> str:
    """How much of the data remains with an item list released within ε; the first half may be published."""
    listed = np.asarray(item_list)
    said = (
        f"items: {len(listed):,} are frequent enough to be released within ε; with a public item list (--catalog) the "
        "model has all of them"
    )
    counts = getattr(dataset, "item_counts", None)
    if counts is None:  # for a log in a cluster
        return said
    occurs = counts()
    share = occurs[listed].sum() / max(1, occurs.sum())
    return (
        f"{said} ({NOT_PRIVATE}: the data has {np.count_nonzero(occurs):,} items, and the released ones account for "
        f"{share:.0%} of the {int(occurs.sum()):,} training interactions)"
    )
