"""`dp.Recommender` and `dp.LanguageModel`: from a data frame or texts to a private model, in a few lines.

They are the command line as objects: the same options (`Config`) and the same training (`runs.train`); the result is
saved as a run folder. Data given in memory is written to a private folder for training, deleted with the object.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from dpformer.accounting import Ledger
from dpformer.data import Columns
from dpformer.data.sources.frames import store_frame
from dpformer.errors import DpformerError
from dpformer.kinds.auto import AUTO
from dpformer.runs.budget import NO_PLAN
from dpformer.runs.config import Config
from dpformer.runs.ledger_file import read as read_budget
from dpformer.runs.model_file import Release
from dpformer.runs.run import Run, finished, train
from dpformer.serving.frames import Frame, any_frame, write_catalog
from dpformer.serving.histories import histories_of, read_histories, read_log, reading_config
from dpformer.serving.notebook import Card, ExactFacts, Facts, PlanFacts, Statement, Table
from dpformer.serving.packed import REPORT, Packed
from dpformer.serving.python_words import public
from dpformer.serving.ranking import Ranker
from dpformer.serving.rules import RuleBook, Rules, rule_book


@public
class _Model:
    """The common base: a config, a run once fitted, and a private folder for data given in memory."""

    _always: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        epsilon: float | None = 5.0,
        model: str = AUTO,
        *,
        ledger: Ledger | str | Path | None = None,
        **choices: Any,
    ) -> None:
        """
        Args:
            epsilon: total ε; None: this run's share of the plan in a ledger (`dpformer ledger plan`).
            model: auto (chosen from public numbers) or another value of `dpformer train --model`.
            ledger: counts this fit and further ones, of this and other models: a `dp.Ledger`, or the file of a budget
                (`dpformer ledger`), which refuses anything beyond it. Without a ledger a second fit is refused.
            choices: other options of `dpformer train`, by name: `delta`, `private_metrics`, `learning_rate`, …
        """
        shared = epsilon is None and isinstance(ledger, str | Path)
        if not shared and (isinstance(epsilon, bool) or not isinstance(epsilon, int | float | np.number)):
            raise DpformerError(
                f"epsilon is a {type(epsilon).__name__}; give a number, and pass the data to fit: "
                f"{type(self).__name__}(epsilon=5).fit(data)"
            )
        given = {} if epsilon is None else {"epsilon": float(epsilon)}
        self._choices = {**self._always, **given, "model": model, **choices}
        self._config(Path("data"))  # refuses invalid or contradictory options
        self.ledger = ledger
        self.run: Run | None = None
        self._private: tempfile.TemporaryDirectory[str] | None = None

    def plan(self, users: int, items: int | None = None) -> Facts:
        """Noise, ε, time and memory for a public number of users; no data is touched."""
        from dpformer.runs.estimate import dry_run

        return PlanFacts(dry_run(self._config(Path("data")), users, items))

    def _config(self, file: Path, **more: Any) -> Config:
        return Config.make(**{**self._choices, "file": file, **more})

    def _fit(self, file: Path, out: str | Path | None, source: dict[str, str] | None = None, **more: Any) -> None:
        if self.run is not None and self.ledger is None:
            raise DpformerError(
                "this model is already fitted, and a second fit spends budget again: create a new one for other "
                "users, or pass ledger=dp.Ledger(), or the file of a ledger, which counts both"
            )
        where = Path(out) if out is not None else Path(tempfile.mkdtemp(dir=self._folder())) / "run"
        ledger = Path(self.ledger) if isinstance(self.ledger, str) else self.ledger
        if "epsilon" not in self._choices and isinstance(ledger, Path) and read_budget(ledger).plan is None:
            raise DpformerError(NO_PLAN)
        self.run = train(self._config(file, **more), where, ledger=ledger, source=source)
        for name in ("_ranker", "_rule_books"):
            self.__dict__.pop(name, None)

    def _folder(self) -> Path:
        """A private folder, deleted with this object."""
        if self._private is None:
            self._private = tempfile.TemporaryDirectory(prefix="dpformer-")
        return Path(self._private.name)

    @property
    def _fitted(self) -> Run:
        if self.run is None:
            raise DpformerError("the model is not fitted yet: call fit first, or dp.load a run")
        return self.run

    @property
    def release(self) -> Release:
        """The released model with its vocabulary."""
        return self._fitted.release

    @property
    def statement(self) -> Statement:
        """What is promised about the data, how it is achieved, and what is not covered."""
        return Statement(self._fitted.statement)

    def _measure(
        self, data: Path | None, *, filter_seen: bool = True, reading: Mapping[str, Any] | None = None
    ) -> Facts:
        from dpformer.report.accuracy import measure  # which reads no file named by someone else's folder

        return ExactFacts(measure(self._fitted, data, filter_seen=filter_seen, reading=reading).to_dict())

    def report(
        self, path: str | Path | None = None, *, public: bool = False, catalog: str | Path | None = None
    ) -> Path:
        """Write the report, one HTML page; `public` omits everything that the guarantee does not cover."""
        from dpformer.report import write_report

        return write_report(self._fitted.folder, out=path, public=public, catalog=catalog)

    def card(
        self,
        path: str | Path | None = None,
        *,
        opendp: bool = False,
        dpia: bool = False,
        deployment: Mapping[str, Any] | None = None,
        ledger: str | Path | None = None,
    ) -> Card:
        """The model card for the Hugging Face hub, an entry for OpenDP's registry, or an impact-assessment page.

        Args:
            path: output file, if any.
            opendp: write the registry entry (YAML) instead.
            dpia: write the page for a data protection officer instead, with blanks.
            deployment: what only you can supply: name, curator, description, intended_use, …; see docs/guide/cards.md.
                By
                default the value of `Recommender(deployment={…})`.
            ledger: the ledger file that counts this run, to state the remaining budget.
        """
        from dpformer.files import write_text
        from dpformer.runs.ledger_file import budget_left
        from dpformer.statement.cards import CardSource, assessment, model_card, registry_entry
        from dpformer.statement.deployment import Deployment

        said = None if deployment is None else Deployment.of(dict(deployment))
        source = CardSource.of(self._fitted, said, "" if ledger is None else budget_left(ledger, self._fitted.folder))
        text = Card((registry_entry if opendp else assessment if dpia else model_card)(source))
        if path is not None:
            write_text(Path(path), text)
        return text

    def save(self, path: str | Path) -> Path:
        """Copy the entire run folder. Not all of it may be published: `metrics.jsonl`, `report.html` and `checkpoint/`
        are as private as the data, and `config.toml` names files and columns (see docs/privacy/threat-model.md)."""
        target = Path(path)
        if target.exists():
            raise DpformerError(f"{target} already exists: choose another folder")
        shutil.copytree(self._fitted.folder, target, ignore=shutil.ignore_patterns(".lock"))
        return target

    def _repr_html_(self) -> str:
        return f"<b>{type(self).__name__}</b>, not fitted" if self.run is None else self.statement._repr_html_()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'not fitted' if self.run is None else self.run.statement['headline']})"


@public
class Recommender(_Model):
    """A next-item recommender with user-level differential privacy.

    >>> import dpformer as dp
    >>> rec = dp.Recommender(epsilon=5)
    >>> rec.fit(df, items=catalog)  # doctest: +SKIP
    >>> rec.recommend({"ann": ["film-3", "film-9"]}, k=10)  # doctest: +SKIP
    """

    _backend: Any = None  # the library of the fitted data frame

    def fit(
        self,
        data: Any,
        items: Any = None,
        *,
        out: str | Path | None = None,
        order: str = "time",
        warm_start: str | Path | None = None,
        **columns: str,
    ) -> Recommender:
        """Train on interactions.

        Args:
            data: a frame of pandas, Polars, PyArrow or DuckDB with columns user_id, item_id, timestamp; or a path.
            items: the public catalogue, item_id and title: a frame or a path. Without it the item list is released
                within the budget.
            out: the run folder to create; by default a private one, deleted with this object (see `save`).
            order: "time", or "file" if rows are in order of time and there is no timestamp column.
            warm_start: the folder of an earlier run, whose released counts improve those of this one at no cost; the
                guarantee is then conditional on them (docs/guide/weekly.md).
            columns: other column names: user_column="customer", item_column=…, timestamp_column=…, rating_column=…
        """
        more: dict[str, Any] = {"order": order, **columns}
        if warm_start is not None:
            more["warm_start"] = Path(warm_start)
        if isinstance(data, str | Path):
            file = Path(data)
        else:
            frame, kind = Frame(data), type(data)
            file = self._log(frame, self._config(Path("frame.parquet"), **more))
            self._backend = frame.table.implementation
            more["source"] = {"source": kind.__name__, "format": kind.__module__.partition(".")[0].lstrip("_")}
        if items is not None:
            more["catalog"] = self._catalog(items)
        self._fit(file, out, **more)
        return self

    def _log(self, frame: Frame, config: Config) -> Path:
        """A frame as a file with the same column names."""
        path = Path(tempfile.mkdtemp(dir=self._folder())) / "frame.parquet"
        store_frame(frame.series(), path, config.log_columns(), config.reading(), config.filters())
        return path

    def _catalog(self, items: Any) -> Path:
        if isinstance(items, str | Path):
            return Path(items)
        path = Path(tempfile.mkdtemp(dir=self._folder())) / "items.jsonl"
        write_catalog(Frame(items), path)
        return path

    @property
    def ranker(self) -> Ranker:
        if "_ranker" not in self.__dict__:
            self.__dict__["_ranker"] = Ranker(self.release)
        return self.__dict__["_ranker"]

    def recommend(
        self,
        histories: Any,
        k: int = 10,
        *,
        filter_seen: bool = True,
        unknown: str = REPORT,
        order: str | None = None,
        reading: Mapping[str, Any] | None = None,
        items: Iterable[Any] | None = None,
        exclude: Iterable[Any] = (),
        where: Mapping[str, Any] | None = None,
        max_per: Mapping[str, int] | None = None,
        catalog: str | Path | None = None,
    ) -> Any:
        """The k best items for each user: a frame of user_id, item_id, (title,) score, rank.

        Args:
            histories: {user: [items, oldest first]}, or a frame or path of interactions; users may be new.
            k: items per user.
            filter_seen: exclude items of the history.
            unknown: how to treat items unknown to the model: ignore them with a warning ("report"), ignore them
                silently
                ("ignore"), or refuse them ("error"). If no item at all is known, that is an error too.
            order: order of a frame or file: "time" or "file" (default: as in `fit`).
            reading: other reading options of a frame or file, by name: {"user_column": "buyer"}. Defaults are those of
                `fit`.
            items: recommend only these.
            exclude: never recommend these.
            where: only items with these values in the catalogue: {"category": "Toys"}, a list for any of several
                values, {"price": {"min": 5, "max": 20}} for numbers.
            max_per: maximum number of items per value among the k: {"brand": 2}.
            catalog: catalogue with these columns (default: the catalogue of `fit`).

        Rules are applied before the choice of the k best items (`serving.rules`). The frame is of the same library as
        `histories`.
        """
        frame: Frame | None = None
        whole_users = whole_items = False
        if isinstance(histories, Mapping):
            found = histories_of(histories.items())
            whole_users = all(isinstance(user, int) for user in histories)
            whole_items = all(isinstance(item, int | np.integer) for items in histories.values() for item in items)
        else:
            given = {**(reading or {}), **({} if order is None else {"order": order})}
            if isinstance(histories, str | Path):
                found = read_histories(Path(histories), self._fitted.folder, **given)
            else:
                frame, config = Frame(histories), reading_config(self._fitted.folder, None, **given)
                found = read_log(self._log(frame, config), config)
                whole_users, whole_items = _whole(frame, config.log_columns())
        packed = Packed.of(found, self.release, unknown)
        if packed.note:
            warnings.warn(packed.note, stacklevel=2)
        rules = None
        if items is not None or exclude or where or max_per:
            asked = Rules(_listed(items), _listed(exclude) or (), where or {}, max_per or {})
            rules = self._rule_book(catalog).bind(asked)
        top = self.ranker.top(packed.items, packed.offsets, k, filter_seen=filter_seen, rules=rules)
        columns = self._columns(top, found.user_ids, whole_users, whole_items)
        return any_frame(columns, self._backend) if frame is None else frame.like(columns)

    def _rule_book(self, catalog: str | Path | None) -> RuleBook:
        books = self.__dict__.setdefault("_rule_books", {})
        if catalog not in books:
            books[catalog] = rule_book(self.release, self._fitted.folder, catalog)
        return cast(RuleBook, books[catalog])

    def _columns(self, top: Any, users: Any, whole_users: bool, whole_items: bool) -> dict[str, list[Any]]:
        there = top.items >= 0
        rows, places = np.nonzero(there)
        names = [int(users[row]) if whole_users else users[row] for row in rows.tolist()]
        items = self._items(top.items[there], whole_items)
        return {"user_id": names, **items, "score": top.scores[there].tolist(), "rank": (places + 1).tolist()}

    def _items(self, numbers: np.ndarray, whole: bool) -> dict[str, list[Any]]:
        """Columns of ids (integers if integers were given) and titles."""
        release, chosen = self.release, numbers.tolist()
        names = [release.vocabulary[item] for item in chosen]
        ids = {"item_id": [int(name) if whole else str(name) for name in names]}
        return ids if release.titles is None else {**ids, "title": [release.titles[item] for item in chosen]}

    def similar(self, item: Any, k: int = 10) -> Any:
        """The k items most similar to one: a frame of item_id, (title,) similarity, rank, like that of `recommend`."""
        (number,) = self.release.index([item])
        top = self.ranker.similar(int(number), k)
        return any_frame(
            {
                **self._items(top.items[0], isinstance(item, int | np.integer)),
                "similarity": top.scores[0].tolist(),
                "rank": [*range(1, top.items.shape[1] + 1)],
            },
            self._backend,
        )

    def explain(self, history: Iterable[Any], item: Any) -> Table:
        """The contribution of each item of a history to an item; for counts, the share of its popularity comes last.

        If a shared public attribute contributes more than transitions from the item, it is named.
        """
        numbers, wanted = self.release.index(history), self.release.index([item])
        added, popularity = self.ranker.contributions(numbers, wanted)
        behind = [name or "" for (name,) in self.ranker.attributes_behind(numbers, wanted)]
        named = [{"attribute": name} if any(behind) else {} for name in behind]
        rows = [
            {**self._named(number), **more, "contribution": float(value)}
            for number, more, value in zip(numbers.tolist(), named, added[:, 0], strict=True)
        ]
        if not np.isnan(popularity[0]):
            blank = {"item_id": "(popularity)", **({} if self.release.titles is None else {"title": ""})}
            rows.append({**blank, **({"attribute": ""} if any(behind) else {}), "contribution": float(popularity[0])})
        return Table(rows, f"Contribution: {self.ranker.method}.")

    def _named(self, item: int) -> dict[str, Any]:
        title = {} if self.release.titles is None else {"title": self.release.titles[item]}
        return {"item_id": self.release.vocabulary[item], **title}

    def evaluate(
        self,
        test: Any = None,
        *,
        exact: bool = False,
        filter_seen: bool = True,
        order: str | None = None,
        reading: Mapping[str, Any] | None = None,
    ) -> Facts:
        """Accuracy on held-out items, for recommendations with the same `filter_seen`.

        By default the values released with noise within ε, if `private_metrics=True` was set. `exact=True` measures
        without noise, on the training data's held-out items or on those of `test`: not covered by the guarantee. A
        frame or file is read as in `fit`, except for `order` and `reading` (see `recommend`).
        """
        if exact:
            given = {**(reading or {}), **({} if order is None else {"order": order})}
            if test is not None and not isinstance(test, str | Path):
                test = self._log(Frame(test), self._fitted.config.on_file(None, **given))
            return self._measure(test, filter_seen=filter_seen, reading=given)
        if not filter_seen and self._fitted.config.filter_seen:
            raise DpformerError(
                "noisy metrics were released with seen items excluded: give exact=True, or omit filter_seen"
            )
        released = self._fitted.statement.get("metrics")
        if test is not None or released is None:
            raise DpformerError(
                "there is no budget for noisy metrics here: set private_metrics=True before fit, for the training "
                "data's own held-out items; or exact=True, whose numbers the guarantee does not cover"
            )
        facts = Facts(released)
        facts.title = "Noisy, covered by ε"
        return facts


@public
class LanguageModel(_Model):
    """A language model with differential privacy for lines, documents or authors."""

    _always: ClassVar[dict[str, Any]] = {"task": "lm"}

    def __init__(self, epsilon: float = 5.0, model: str = AUTO, *, unit: str = "document", **choices: Any) -> None:
        """`unit` is the unit of privacy: "document", or "author" for texts by author; files also "line" or "chunk"."""
        super().__init__(epsilon, model, unit=unit, **choices)
        self.unit = unit

    def fit(self, texts: Any, *, out: str | Path | None = None) -> LanguageModel:
        """Train on a list of texts, each one document; on {author: [texts]}; on a data frame; or on a file or URL."""
        if isinstance(texts, str | Path):
            self._fit(Path(texts), out)
            return self
        if not isinstance(texts, list | tuple | Mapping):
            rows = self._rows_of_frame(texts)
            if rows is not None:
                return self._fit_rows(rows, out)
        by_author = isinstance(texts, Mapping)
        if by_author != (self.unit == "author") or self.unit not in ("author", "document"):
            raise DpformerError(
                f'unit is {self.unit!r}; a list of texts has unit="document", {{author: [texts]}} has unit="author"; '
                "lines and chunks need a file"
            )
        rows = (
            [{"author": str(name), "text": text} for name, written in texts.items() for text in written]
            if by_author
            else [{"text": text} for text in texts]
        )
        return self._fit_rows(rows, out)

    def _rows_of_frame(self, frame: Any) -> list[dict[str, str]] | None:
        from dpformer.data.text import text_columns
        from dpformer.data.text_table import frame_rows

        chosen = self._choices
        columns = [chosen.get(f"{name}_column") for name in ("user", "text", "timestamp")]
        return frame_rows(frame, text_columns(self.unit, columns[0], columns[1] or "text", columns[2]))  # type: ignore[arg-type]

    def _fit_rows(self, rows: list[dict[str, str]], out: str | Path | None) -> LanguageModel:
        path = Path(tempfile.mkdtemp(dir=self._folder())) / "texts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self._fit(path, out, timestamp_column=None)  # rows are in order
        return self

    def generate(
        self, prompt: str = "\n", length: int = 200, *, temperature: float = 1.0, seed: int | None = None
    ) -> str:
        """Text after a prompt. Generating spends no budget, however much is generated."""
        from dpformer.data.text import decoder
        from dpformer.evaluation.language import generate

        tokens, decode = decoder(self.release)
        start = tokens.encode(prompt or "\n").tolist()
        return decode(
            generate(self.release.model, start, length, temperature=temperature, never=tokens.unknown, seed=seed)
        )

    def evaluate(self, test: str | Path | None = None, *, exact: bool = False) -> Facts:
        """The loss on held-out text, or on that of another file; exact only, and not covered by the guarantee."""
        if not exact:
            raise DpformerError(
                "there are no noisy metrics for text: give exact=True, which the guarantee does not cover"
            )
        return self._measure(None if test is None else Path(test))


def load(path: str | Path) -> Recommender | LanguageModel:
    """Open a run folder made by `save` or `dpformer train`."""
    run = finished(path)
    made = LanguageModel(unit=run.config.unit or "document") if run.config.task == "lm" else Recommender()
    made.run = run
    return made


def _listed(ids: Any) -> Any:
    """Ids as a list; a string is left for `Rules` to refuse."""
    return ids if ids is None or isinstance(ids, str | bytes) else list(ids)


def _whole(frame: Frame, columns: Columns) -> tuple[bool, bool]:
    from dpformer.data.columns import usual

    names = list(frame.table.columns)
    found = [columns.user or usual(names, "user"), columns.item or usual(names, "item")]
    users, items = (name is not None and frame.whole_numbers(name) for name in found)
    return users, items
