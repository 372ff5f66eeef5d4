"""Business rules at request time: which items may be recommended, and how many of each kind.

    Rules(items=["a", "b"])                       only these
    Rules(exclude=["c"])                          not these
    Rules(where={"category": "Toys"})             only items with this value in the catalogue; a list means any of them
    Rules(where={"price": {"min": 5, "max": 20}}) numbers within bounds
    Rules(max_per={"brand": 2})                   at most two of each brand among the k

Rules are applied before the choice of the k best, so that k items are returned as long as k are allowed. They read
public columns and the request, never the training data: rules cost no privacy budget.

`max_per` takes items in the order of their scores and skips those whose value is used up. An item with several values
(genres) counts for each of them; an item without a value is unlimited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from dpformer.data.catalog_columns import CatalogColumns, Column, read_columns
from dpformer.data.interactions import id_text
from dpformer.errors import DpformerError
from dpformer.runs.config import Config
from dpformer.runs.folder import RunFolder
from dpformer.runs.model_file import Release
from dpformer.runs.trust import is_own

Condition: TypeAlias = "str | int | float | bool | Sequence[Any] | Mapping[str, float]"
CANDIDATES = 64  # initial number of candidates for `max_per`, or 4·k


@dataclass(frozen=True)
class Rules:
    """The rules of one request; see the module."""

    items: Sequence[Any] | None = None
    exclude: Sequence[Any] = ()
    where: Mapping[str, Condition] = field(default_factory=dict)
    max_per: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("items", "exclude"):
            if isinstance(getattr(self, name), str | bytes):
                raise DpformerError(f"{name} is the text {getattr(self, name)!r}; give a list of item ids")
        for name in ("where", "max_per"):
            if not isinstance(getattr(self, name), Mapping):
                raise DpformerError(f"{name} is {getattr(self, name)!r}; give a dictionary by column of the catalogue")
        for column, most in self.max_per.items():
            if isinstance(most, bool) or not isinstance(most, int) or most < 1:
                raise DpformerError(f"max_per of {column!r} is {most!r}; give an integer of 1 or more")

    def __bool__(self) -> bool:
        return self.items is not None or bool(len(self.exclude)) or bool(self.where) or bool(self.max_per)


@dataclass(frozen=True)
class Cap:
    """At most `most` items of each value of a column."""

    column: Column
    most: int


@dataclass(frozen=True)
class BoundRules:
    """Rules in item numbers of one model."""

    forbidden: np.ndarray | None  # (n,) int64, item numbers
    caps: tuple[Cap, ...]

    def choose(self, scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best allowed items of each row of (B, M) scores, which are overwritten: item numbers and scores."""
        if self.forbidden is not None:
            scores[:, self.forbidden] = -np.inf
        if not self.caps:
            return _best(scores, k)
        found = [_capped(row, k, self.caps) for row in scores]
        items, values = np.zeros((len(found), k), np.int64), np.full((len(found), k), -np.inf, np.float32)
        for row, chosen in enumerate(found):
            items[row, : len(chosen)], values[row, : len(chosen)] = chosen, scores[row, chosen]
        return items, values


NO_RULES = BoundRules(None, ())


class RuleBook:
    """Converts rules to item numbers of one model; conditions on columns are cached, since services repeat them."""

    def __init__(self, release: Release, columns: CatalogColumns | Callable[[], CatalogColumns] | None = None) -> None:
        """`columns` of the catalogue, or a function that reads them when first needed; None if there are none."""
        self._numbers = {id_text(name): number for number, name in enumerate(release.vocabulary)}
        self._columns = columns
        self._where = lru_cache(maxsize=256)(self._matching)

    @property
    def has_columns(self) -> bool:
        """Whether there is a catalogue for rules on columns."""
        return self._columns is not None

    @property
    def columns(self) -> CatalogColumns:
        if self._columns is None:
            raise DpformerError(
                "rules on columns need the catalogue: give its file with --catalog (catalog= in Python)"
            )
        if callable(self._columns):
            self._columns = self._columns()
        return self._columns

    def bind(self, rules: Rules) -> BoundRules:
        """Validate the rules and look up ids and values."""
        forbidden: np.ndarray | None = None
        allowed = None if rules.items is None else self._allowed(rules.items)
        for column, condition in rules.where.items():
            match = self._where(column, _frozen(column, condition))
            allowed = match if allowed is None else allowed & match
        if allowed is not None:
            forbidden = np.flatnonzero(~allowed)
        if len(rules.exclude):
            excluded = self._known(rules.exclude)
            forbidden = excluded if forbidden is None else np.union1d(forbidden, excluded)
        return BoundRules(forbidden, tuple(Cap(self.columns[name], most) for name, most in rules.max_per.items()))

    def _allowed(self, ids: Sequence[Any]) -> np.ndarray:
        known = self._known(ids)
        if not len(known):
            raise DpformerError(f"none of the {len(ids):,} ids in items is known to the model")
        allowed = np.zeros(len(self._numbers), bool)
        allowed[known] = True
        return allowed

    def _known(self, ids: Sequence[Any]) -> np.ndarray:
        """Item numbers; unknown ids cannot be recommended anyway."""
        try:
            found = list(map(self._numbers.get, ids))  # most are text, as in the model
            missed = [
                self._numbers.get(id_text(name)) for name, number in zip(ids, found, strict=True) if number is None
            ]
        except (ValueError, TypeError) as error:
            raise DpformerError(f"items or exclude holds an invalid item id: {error}") from None
        return np.array([number for number in (*found, *missed) if number is not None], dtype=np.int64)

    def _matching(self, name: str, condition: tuple[Any, ...]) -> np.ndarray:
        kind, *given = condition
        column = self.columns[name]
        found = column.between(*given) if kind == "between" else column.having(given)
        found.flags.writeable = False  # shared between requests
        return found


def rule_book(release: Release, run: str | Path | None = None, catalog: str | Path | None = None) -> RuleBook:
    """Rules for a model with the columns of a catalogue.

    Args:
        release: the model.
        run: the run folder, whose catalogue is read if the folder is the user's own (`runs.trust`).
        catalog: another catalogue; prices and stock change more often than models.
    """
    path = _own_catalog(run) if catalog is None else Path(catalog)
    if path is None:
        return RuleBook(release)
    names = [id_text(name) for name in release.vocabulary]
    return RuleBook(release, lambda: read_columns(path, names))


def _own_catalog(run: str | Path | None) -> Path | None:
    if run is None or not Path(run).is_dir():
        return None
    folder = RunFolder(run)
    return Config.make(folder.config).catalog if folder.config.is_file() and is_own(folder) else None


def _frozen(column: str, condition: Condition) -> tuple[Any, ...]:
    """A condition as a hashable key: ("between", low, high) or ("any", value, …)."""
    if isinstance(condition, Mapping):
        if not condition or set(condition) - {"min", "max"}:
            raise DpformerError(f"where for {column!r} is {dict(condition)!r}; give min, max or both")
        try:
            low, high = float(condition.get("min", -np.inf)), float(condition.get("max", np.inf))
        except (TypeError, ValueError):
            raise DpformerError(f"where for {column!r} is {dict(condition)!r}; min and max are numbers") from None
        return ("between", low, high)
    several = isinstance(condition, Sequence | set | np.ndarray) and not isinstance(condition, str | bytes)
    values = list(condition) if several else [condition]  # type: ignore[arg-type]
    if not values:
        raise DpformerError(f"where for {column!r} names no value, so that no item would remain")
    return ("any", *(_text(value) for value in values))


def _text(value: Any) -> str:
    """A value as the catalogue writes it: true and 3, not True and 3.0."""
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _best(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    values, best = torch.from_numpy(scores).topk(min(k, scores.shape[1]))
    return best.numpy(), values.numpy()


def _capped(scores: np.ndarray, k: int, caps: Sequence[Cap]) -> np.ndarray:
    """Greedy choice of up to k items of one row (M,) under caps, in the order of scores.

    A round considers only the best candidates. If they do not suffice, all items of used-up values are removed and the
    next candidates are found. The first candidate of a round is always taken, so there are at most k rounds.
    """
    left = scores.copy()
    used = [np.zeros(len(cap.column.values), np.int64) for cap in caps]
    chosen: list[int] = []
    width = min(len(scores), max(CANDIDATES, 4 * k))
    while len(chosen) < k:
        best, values = (part[0] for part in _best(left[None], width))
        best = best[values > -np.inf]
        if not len(best):
            break
        for item in best.tolist():
            if _take(item, caps, used):
                chosen.append(item)
                if len(chosen) == k:
                    return np.array(chosen)
        left[best] = -np.inf
        for cap, count in zip(caps, used, strict=True):
            full = count >= cap.most
            left[cap.column.origins[full[cap.column.links]]] = -np.inf
    return np.array(chosen, dtype=np.int64)


def _take(item: int, caps: Sequence[Cap], used: Sequence[np.ndarray]) -> bool:
    links = [cap.column.links[cap.column.offsets[item] : cap.column.offsets[item + 1]] for cap in caps]
    if any((count[own] >= cap.most).any() for cap, count, own in zip(caps, used, links, strict=True)):
        return False
    for count, own in zip(used, links, strict=True):
        count[own] += 1
    return True
