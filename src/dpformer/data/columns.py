"""The role of each column: from its name in the header or schema, or by option; never from the rows.

For a log without a header, the option `columns` supplies it.
"""

import re
from dataclasses import dataclass

from dpformer.errors import DpformerError

# In order of preference; compared without case and punctuation.
COLUMN_NAMES = {
    "user": ("userid", "user", "uid", "customerid", "customer", "reviewerid", "memberid", "visitorid"),
    "item": ("itemid", "item", "iid", "movieid", "productid", "parentasin", "asin", "bookid", "trackid", "sku"),
    "timestamp": (
        "timestamp", "time", "ts", "datetime", "date", "unixreviewtime", "eventtime", "eventtimestamp", "createdat",
        "occurredat", "unixtime", "epoch",
    ),
    "rating": ("rating", "stars", "overall", "score"),
}  # fmt: skip
_TIME_LIKE = re.compile(r".*(_at|_time|_date|_ts|_timestamp|_datetime)|.*[a-z](At|Time|Date|Timestamp)", re.DOTALL)
# Spellings of a column name that may occur as keys of JSON objects.
JSON_KEYS = {
    "user": ("user_id", "userId", "user", "uid", "customer_id", "customerId", "reviewerID", "visitor_id", "visitorId"),
    "item": ("item_id", "itemId", "item", "iid", "movie_id", "movieId", "product_id", "productId", "parent_asin",
             "asin", "book_id", "track_id", "sku"),
    "timestamp": ("timestamp", "time", "ts", "datetime", "date", "unixReviewTime", "event_time", "eventTime",
                  "created_at", "createdAt", "occurred_at"),
    "rating": ("rating", "stars", "overall", "score"),
}  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """Names of the columns; None: recognised by the usual names (`user_id`, `item_id`, `timestamp`, `rating`)."""

    user: str | None = None
    item: str | None = None
    timestamp: str | None = None
    rating: str | None = None


def plain(name: str) -> str:
    """A column's name without case and punctuation: `userId`, `user_id` and `User ID` are the same name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def resolve(names: list[str], columns: Columns, *, rating: bool, order: str, where: str) -> dict[str, str]:
    """Role → name of its column, for the required roles; an error if one is missing."""
    twice = [name for place, name in enumerate(names) if name and name in names[:place]]
    if twice:
        raise DpformerError(f"{where} has two columns named {twice[0]!r}: rename one")
    found = {role: _one(names, columns, role, where) for role in ("user", "item")}
    if order == "time":
        found["timestamp"] = _time(names, columns, where)
    if rating:
        found["rating"] = _one(names, columns, "rating", where)
    return found


def usual(names: list[str], role: str) -> str | None:
    """The first of a role's usual names that is present."""
    by_name = {plain(name): name for name in reversed(names)}
    return next((by_name[known] for known in COLUMN_NAMES[role] if known in by_name), None)


def listed(names: list[str]) -> str:
    return ", ".join(name[:40] for name in names[:12]) + (", …" if len(names) > 12 else "")


def _one(names: list[str], columns: Columns, role: str, where: str) -> str:
    chosen = getattr(columns, role)
    if chosen is not None and chosen not in names:
        raise DpformerError(f"{where} has no column {chosen!r}; it has {listed(names)}")
    found = chosen or usual(names, role)
    if found is None:
        name = role if role == "rating" else f"{role}_id"
        lacks = " (if the file has no header, give --columns user,item,timestamp)" if role != "rating" else ""
        raise DpformerError(
            f"{where} has no column {name!r} (it has {listed(names)}); give its name with --{role}-column{lacks}"
        )
    return str(found)


def _time(names: list[str], columns: Columns, where: str) -> str:
    if columns.timestamp is not None:
        return _one(names, columns, "timestamp", where)
    found = usual(names, "timestamp")
    if found is not None:
        return found
    like = [name for name in names if _TIME_LIKE.fullmatch(name)]
    if len(like) == 1:
        return like[0]
    if like:
        raise DpformerError(
            f"{where} has several columns that may be the time ({listed(like)}): choose one with --timestamp-column"
        )
    raise DpformerError(
        f"{where} has no timestamp column (it has {listed(names)}): choose one with --timestamp-column, or give "
        "--order file if its rows are in order of time"
    )
