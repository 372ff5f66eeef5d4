"""The field's own benchmark, MovieLens-20M and -10M, as DPALS (arXiv 2107.09802) and arXiv 2302.07975 run it.

    python -m experiments.movielens ml-20m ml-20m/ratings.csv           Recall@20 and NDCG@20 for new users
    python -m experiments.movielens ml-10m ml-10M100K/ratings.dat       RMSE of ratings

MovieLens may not be passed on: get the files from grouplens.org. Both splits are theirs, row by row (the same calls of
NumPy's old generator, `dp_alternating_minimization/movielens/generate_movielens_data.py` in google-research):

ml-20m   Liang et al. 2018. Ratings of 4 and more count as interactions; users with five of them or more. 10,000 users
         are held out for validation and 10,000 for test, whole: a model has never met them. Of each, a fifth of the
         items, at random, is to be found among all items of the training users, given the others. Recall@k divides
         by min(k, items to be found).
ml-10m   Lee et al. 2013. 80% of all ratings for training, 10% for validation, 10% for test, at random. What is private
         are item means (`rating_means.py`): a user's own ratings correct them, and stay with that user.

Their δ is 1e-5 and the list of items is public, so these are the defaults here. `dpformer train` holds out the last
item of every user: that is one rating of each training user that ml-20m does not learn from.
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import torch
from experiments.rating_means import rmse_of_means

from dpformer.errors import DpformerError
from dpformer.runs import train
from dpformer.runs.config import Config

LIKED, FEWEST, HELD_OUT, SHARE = 4.0, 5, 10_000, 0.2
USERS_AT_ONCE, ROWS_AT_ONCE = 256, 1_000_000
COLUMNS = "{'user': 'BIGINT', 'item': 'BIGINT', 'rating': 'DOUBLE', 'time': 'BIGINT'}"
Score = Callable[[Sequence[np.ndarray]], torch.Tensor]  # histories of item numbers → (users, items)


@dataclass(frozen=True)
class Ratings:
    """Rows of a file, in its order."""

    users: np.ndarray  # (rows,) int64, as in the file
    items: np.ndarray  # (rows,) int64
    ratings: np.ndarray  # (rows,) float64
    times: np.ndarray  # (rows,) int64

    def __len__(self) -> int:
        return len(self.users)

    def keep(self, rows: np.ndarray) -> "Ratings":
        return Ratings(self.users[rows], self.items[rows], self.ratings[rows], self.times[rows])


@dataclass(frozen=True)
class Fold:
    """Users that no model has met: what is known of each, in the order of time, and what is to be found."""

    histories: list[np.ndarray]
    targets: list[np.ndarray]


@dataclass(frozen=True)
class NewUsers:
    """The split of ml-20m. Items are numbered 0, 1, … as they appear in the training rows."""

    train: Ratings
    items: np.ndarray  # (M,) their ids in the file
    validation: Fold
    test: Fold


def read_ratings(path: Path) -> Ratings:
    """`ratings.csv` (20M), `ratings.dat` (10M and 1M) or `u.data` (100K)."""
    if not path.exists():
        raise DpformerError(f"{path} is not there: get MovieLens from grouplens.org, and name its file of ratings")
    delimiter = {".csv": ",", ".dat": "::", ".data": "\t"}.get(path.suffix)
    if delimiter is None:
        raise DpformerError(f"{path.name} is not a file of ratings: give ratings.csv, ratings.dat or u.data")
    query = f"SELECT * FROM read_csv(?, delim = '{delimiter}', header = {delimiter == ','}, columns = {COLUMNS})"
    connection = duckdb.connect()
    connection.execute("SET preserve_insertion_order = true")
    found = connection.execute(query, [str(path)]).fetchnumpy()
    return Ratings(*(np.asarray(found[name]) for name in ("user", "item", "rating", "time")))


def new_users(log: Ratings, held_out: int = HELD_OUT) -> NewUsers:
    """The split of Liang et al., their random numbers included."""
    log = log.keep(log.ratings >= LIKED)
    ids, counts = np.unique(log.users, return_counts=True)
    ids = ids[counts >= FEWEST]
    if len(ids) <= 2 * held_out:
        raise DpformerError(
            f"{len(ids):,} users have {FEWEST} ratings of {LIKED:g} or more: too few to hold out {held_out:,}"
        )
    ids = ids[np.random.RandomState(98765).permutation(len(ids))]
    first, second = len(ids) - 2 * held_out, len(ids) - held_out
    train_rows = log.keep(np.isin(log.users, ids[:first]))
    known, place = np.unique(train_rows.items, return_index=True)
    items = known[np.argsort(place)]  # in the order in which they appear
    log = log.keep(np.isin(log.items, known))
    folds = (log.keep(np.isin(log.users, part)) for part in (ids[first:second], ids[second:]))
    return NewUsers(train_rows, items, *(_fold(part, items) for part in folds))


def _fold(log: Ratings, items: np.ndarray) -> Fold:
    """A fifth of what each user has, at random, is to be found; users with fewer than five items have none."""
    random, order = np.random.RandomState(98765), np.argsort(items)
    histories, targets = [], []
    rows_by_user = np.argsort(log.users, kind="stable")
    starts = np.flatnonzero(np.diff(log.users[rows_by_user], prepend=-1))
    for rows in np.split(rows_by_user, starts[1:]):
        if len(rows) < FEWEST:
            continue
        hidden = np.zeros(len(rows), dtype=bool)
        hidden[random.choice(len(rows), size=int(SHARE * len(rows)), replace=False)] = True
        numbers = order[np.searchsorted(items, log.items[rows], sorter=order)]
        in_time = np.argsort(log.times[rows], kind="stable")
        histories.append(numbers[in_time][~hidden[in_time]])
        targets.append(numbers[hidden])
    return Fold(histories, targets)


def metrics(score: Score, fold: Fold, ks: Sequence[int] = (20, 50, 100)) -> dict[str, float]:
    """Means over users of Recall@k and NDCG@k, items of the history left out."""
    sums: dict[str, float] = {}
    for start in range(0, len(fold.histories), USERS_AT_ONCE):
        histories, targets = (part[start : start + USERS_AT_ONCE] for part in (fold.histories, fold.targets))
        with torch.no_grad():
            scores = score(histories).clone()
        for row, history in zip(scores, histories, strict=True):
            row[torch.from_numpy(history)] = -torch.inf
        best = scores.topk(min(max(ks), scores.shape[1])).indices.numpy()
        for listed, wanted in zip(best, targets, strict=True):
            hits = np.isin(listed, wanted)
            for name, value in _metrics(hits, len(wanted), ks):
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / len(fold.histories) for name, value in sums.items()}


def _metrics(hits: np.ndarray, wanted: int, ks: Sequence[int]) -> Iterator[tuple[str, float]]:
    gains = 1 / np.log2(np.arange(2, len(hits) + 2))
    for k in ks:
        yield f"recall@{k}", hits[:k].sum() / min(k, wanted)
        yield f"ndcg@{k}", (hits[:k] * gains[:k]).sum() / gains[: min(k, wanted)].sum()


def recommend(split: NewUsers, choices: dict[str, Any], fold: Fold) -> dict[str, Any]:
    """Trains `dpformer` on the training users and measures it on a fold."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.csv"
        _write(split.train, file)
        run = train(Config.make(file=file, **choices), Path(folder) / "run")
        release = run.release
        number = release.index(split.items.tolist())  # the model numbers items in its own way

        def score(histories: Sequence[np.ndarray]) -> torch.Tensor:
            return torch.as_tensor(release.model.scores([number[history] for history in histories]))[:, number]

        return {
            **{name: run.statement[name] for name in ("epsilon", "delta", "noise_multiplier")},
            **metrics(score, fold),
        }


def _write(log: Ratings, file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(("user_id", "item_id", "timestamp"))
        for start in range(0, len(log), ROWS_AT_ONCE):
            part = (column[start : start + ROWS_AT_ONCE].tolist() for column in (log.users, log.items, log.times))
            writer.writerows(zip(*part, strict=True))


def popular(split: NewUsers, fold: Fold) -> dict[str, float]:
    """Items ranked by how many training users have them: the floor, not private."""
    order = np.argsort(split.items)
    numbers = order[np.searchsorted(split.items, split.train.items, sorter=order)]
    counts = torch.from_numpy(np.bincount(numbers, minlength=len(split.items))).float()
    return metrics(lambda histories: counts.expand(len(histories), -1), fold)


def rating_split(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows for training, validation and test: 80, 10 and 10%, as pandas' `sample(random_state=1234)` draws them."""
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.RandomState(1234).choice(count, size=round(0.8 * count), replace=False)] = True
    rest = np.flatnonzero(~chosen)
    first = np.zeros(len(rest), dtype=bool)
    first[np.random.RandomState(1234).choice(len(rest), size=round(0.5 * len(rest)), replace=False)] = True
    return np.flatnonzero(chosen), rest[first], rest[~first]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", choices=("ml-20m", "ml-10m"))
    parser.add_argument("file", type=Path, help="ratings.csv, ratings.dat or u.data")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 5.0, 20.0])
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--model", default="counts", help="of ml-20m: counts, transformer, gru, lstm")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="users of each fold of ml-20m")
    parser.add_argument("--seed", type=int, help="repeatable, and not private")
    parser.add_argument("--validation", action="store_true", help="measure on the validation fold")
    arguments = parser.parse_args()
    try:
        for line in _lines(arguments):
            print(json.dumps(line), flush=True)
    except DpformerError as error:
        raise SystemExit(f"error: {error}") from None


def _lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    log, name = read_ratings(arguments.file), "validation" if arguments.validation else "test"
    if arguments.benchmark == "ml-10m":
        rows = rating_split(len(log))
        for epsilon in arguments.epsilon:
            yield rmse_of_means(log.users, log.items, log.ratings, rows, epsilon, arguments.delta, arguments.seed)
        return
    split = new_users(log, arguments.held_out)
    fold = split.validation if arguments.validation else split.test
    facts = {"training users": len(np.unique(split.train.users)), "items": len(split.items), name: len(fold.targets)}
    yield {**facts, "model": "popularity, not private", **popular(split, fold)}
    for epsilon in arguments.epsilon:
        choices = {
            "model": arguments.model, "epsilon": epsilon, "delta": arguments.delta, "assume_items_public": True,
            "seed": arguments.seed,
        }  # fmt: skip
        yield {"model": arguments.model, **recommend(split, choices, fold)}


if __name__ == "__main__":
    main()
