"""What a service holds of a run: the model, the statement and the names of the items. The data is never opened."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data import read_catalog
from dpformer.data.interactions import id_text
from dpformer.errors import DpformerError
from dpformer.runs.folder import RunFolder
from dpformer.runs.model_file import Release, load_release, model_file, sha256_of
from dpformer.serving.ranking import Ranker
from dpformer.serving.rules import BoundRules, RuleBook, rule_book
from dpformer.serving.search import Search
from dpformer.statement.shape import check_shape


class Served:
    """A model with its statement, addressed by ids and titles."""

    def __init__(self, release: Release, statement: dict[str, Any], book: RuleBook | None = None) -> None:
        self.release, self.statement = release, statement
        self.ranker = Ranker(release)
        self.book = book or RuleBook(release)
        names = [release.title(item) for item in range(len(release.vocabulary))]
        ids = [str(name) for name in release.vocabulary]
        self.search = Search(names, release.frequencies, None if release.titles is None else ids)
        self.model_sha256: str | None = None
        self.opened = datetime.now(timezone.utc)
        self._numbers = {id_text(name): number for number, name in enumerate(release.vocabulary)}

    @classmethod
    def open(cls, path: str | Path, catalog: str | Path | None = None) -> Served:
        """Open a run folder, or a model.safetensors file, which then provides the statement.

        Titles and the columns for rules come from `catalog`; by default titles are those of training, and columns those
        of the run's own catalogue if the folder is the user's own.
        """
        file = model_file(path)
        release = load_release(file)
        book = rule_book(release, path, catalog)
        if catalog is not None:
            release = release.titled(read_catalog(catalog))
        folder = RunFolder(path)
        known = {name: release.metadata.get(name) for name in ("headline", "private", "epsilon", "delta")}
        statement = known
        if Path(path).is_dir() and folder.statement.is_file():
            statement = check_shape(folder.read_json(folder.statement), folder.statement)
            if any(statement[name] != value for name, value in known.items()):
                raise DpformerError(f"{folder.statement} does not belong to {folder.model}: they differ in ε or δ")
        served = cls(release, statement, book)
        served.model_sha256 = sha256_of(file)
        return served

    def warm_up(self) -> None:
        """Answer once, so that everything computed on first use is ready before the first request."""
        if self.book.has_columns:
            _ = self.book.columns
        first = str(self.release.vocabulary[0])
        self.recommend([first], 1, filter_seen=True, why=True)
        self.similar(0, 1)

    def examples(self) -> list[str]:
        """A few ids for documentation: of the most popular items, by the released frequencies."""
        return [entry["item_id"] for entry in self.find("", 3)]

    # Ids of the log outside, item numbers inside.

    def number(self, name: str) -> int | None:
        return self._numbers.get(name.strip())

    def numbers(self, names: Sequence[str | int]) -> tuple[np.ndarray, int]:
        """Item numbers of a history without unknown items, and the number of unknown ones."""
        found = [self._numbers.get(str(name).strip()) for name in names]
        known = [number for number in found if number is not None]
        return np.array(known, dtype=np.int64), len(found) - len(known)

    def entry(self, item: int) -> dict[str, Any]:
        return {"item_id": str(self.release.vocabulary[item]), "title": self.release.title(item)}

    def find(self, text: str, limit: int) -> list[dict[str, Any]]:
        return [self.entry(item) for item in self.search.find(text, limit)]

    def recommend(
        self,
        names: Sequence[str | int],
        k: int,
        *,
        filter_seen: bool,
        why: bool,
        rules: BoundRules | None = None,
    ) -> dict[str, Any]:
        """The answer to a history; unknown items are ignored and counted."""
        history, unknown = self.numbers(names)
        top = self.ranker.top(history, np.array([0, len(history)]), k, filter_seen=filter_seen, rules=rules)
        items, scores = top.items[0][top.items[0] >= 0], top.scores[0]
        found = [{**self.entry(item), "score": float(score)} for item, score in zip(items, scores, strict=False)]
        if why:
            for entry, reasons in zip(found, self._reasons(history, items), strict=True):
                entry.update(reasons)
        answer = {"history": len(history), "unknown": unknown, "recommendations": found}
        return {**answer, "method": self.ranker.method} if why else answer

    def similar(self, item: int, k: int) -> list[dict[str, Any]]:
        top = self.ranker.similar(item, k)
        pairs = zip(top.items[0].tolist(), top.scores[0].tolist(), strict=True)
        return [{**self.entry(other), "similarity": value} for other, value in pairs]

    def explain(self, names: Sequence[str | int], item: int) -> dict[str, Any]:
        """Why an item is, or is not, recommended after a history."""
        history, unknown = self.numbers(names)
        reasons = self._reasons(history, np.array([item]))[0]
        return {**self.entry(item), "unknown": unknown, "method": self.ranker.method, **reasons}

    def _reasons(self, history: np.ndarray, items: np.ndarray) -> list[dict[str, Any]]:
        added, popularity = self.ranker.contributions(history, items)
        places = [self.entry(place) for place in history.tolist()]
        behind = self.ranker.attributes_behind(history, items)
        return [
            {
                "why": [
                    {**place, "contribution": float(value), "attribute": names[number]}
                    for place, value, names in zip(places, column, behind, strict=True)
                ],
                "popularity": None if np.isnan(share) else float(share),
            }
            for number, (column, share) in enumerate(zip(added.T, popularity, strict=True))
        ]
