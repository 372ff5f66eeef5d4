"""From a log to sequences: filter, fix the vocabulary, sort by time, split. Every choice lands in the statement."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.cache import load, save
from dpformer.data.dataset import MIN_TO_TEST, Dataset
from dpformer.data.interactions import Columns, Interactions, read
from dpformer.data.vocabulary import Vocabulary, canonical_order
from dpformer.errors import DpformerError
from dpformer.releases.vocabulary import SparseHistogram, sparse_histogram


@dataclass(frozen=True)
class PrivateVocabulary:
    """Asks for the vocabulary to be released from the data by `sparse_histogram`.

    The price belongs in the ledger: a Gaussian event of `noise_multiplier`, and `delta` taken off the total δ.
    """

    noise_multiplier: float
    delta: float
    max_items: int = 50


@dataclass(frozen=True)
class Filters:
    """What is left out. `min_user_actions` and `min_item_actions` are SASRec's: one pass over raw counts."""

    min_rating: float | None = None
    min_user_actions: int = 0
    min_item_actions: int = 0

    def apply(self, log: Interactions) -> Interactions:
        """The interactions that stay."""
        if self.min_rating is not None:
            if log.ratings is None:
                raise DpformerError("min_rating is given and the data has no ratings")
            log = log.keep(log.ratings >= self.min_rating)
        by_user, by_item = np.bincount(log.users), np.bincount(log.items)  # both before either filter: one pass
        enough = by_user[log.users] >= self.min_user_actions
        return log.keep(enough & (by_item[log.items] >= self.min_item_actions))


def prepare(
    source: str | Path | Interactions,
    *,
    columns: Columns | None = None,
    vocabulary: Vocabulary | PrivateVocabulary | None = None,
    drop_unknown_items: bool = False,
    filters: Filters | None = None,
    max_length: int | None = 200,
    validation: bool = False,
    cache: str | Path | None = None,
    normal: Callable[[int], np.ndarray] | None = None,
) -> Dataset:
    """Prepares a log for training: one user, one sequence; the last item held out.

    Args:
        source: a file (see `read`), or interactions.
        columns: names of columns that are not the usual ones.
        vocabulary: a public catalogue (`read_catalog`), or a `PrivateVocabulary` to be released, or None: the items
            that occur in the data are assumed public.
        drop_unknown_items: leave out items that the catalogue lacks; by default they are an error.
        filters: what to leave out first.
        max_length: how many items of a user, the last ones, are trained on; None: whole histories.
        validation: hold out a validation item before the test item.
        cache: a folder in which prepared data is kept, private, and found again while the file is unchanged. A
            `PrivateVocabulary` is never kept: a release belongs to one run and its ledger.
        normal: draws standard normal noise for a `PrivateVocabulary`; by default from the secure source.
    """
    filters = filters or Filters()
    assumed = vocabulary is None or (isinstance(vocabulary, Vocabulary) and vocabulary.policy == "assumed-public")
    if filters.min_item_actions > 1 and not assumed:
        raise DpformerError(
            f"min_item_actions={filters.min_item_actions} counts items over users, so one user can change what others "
            "train on; that is allowed only with a vocabulary assumed public: leave it out"
        )
    if isinstance(source, Interactions):
        return _prepare(source, "", vocabulary, drop_unknown_items, filters, max_length, validation, normal)
    path = Path(source)
    options = (columns, vocabulary, drop_unknown_items, filters, validation)
    if cache is None or isinstance(vocabulary, PrivateVocabulary):
        folder = None
    else:
        folder = Path(cache) / _cache_key(path, options)
    if folder is not None and folder.exists():
        return load(folder).with_max_length(max_length)
    log = read(path, columns, ratings=filters.min_rating is not None)
    dataset = _prepare(log, path.name, vocabulary, drop_unknown_items, filters, max_length, validation, normal)
    if folder is None:
        return dataset
    save(dataset, folder)
    return load(folder).with_max_length(max_length)


def _prepare(
    log: Interactions,
    name: str,
    vocabulary: Vocabulary | PrivateVocabulary | None,
    drop_unknown_items: bool,
    filters: Filters,
    max_length: int | None,
    validation: bool,
    normal: Callable[[int], np.ndarray] | None,
) -> Dataset:
    whole = log
    log = filters.apply(log)
    if not len(log):
        raise DpformerError(f"no interaction of {len(whole):,} is left after the filters: lower them")
    order = chronological(log)
    users, items = log.users[order], log.items[order]
    words, numbers, release = _vocabulary(log, users, items, vocabulary, normal)
    known = numbers[items] >= 0
    if isinstance(vocabulary, Vocabulary) and not drop_unknown_items and not known.all():
        _refuse_unknown(log, items[~known])
    last = np.flatnonzero(np.append(users[1:] != users[:-1], True))
    present, lengths = np.unique(users[known], return_counts=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    _refuse_useless(lengths)
    description = {
        "source": name,
        "format": log.format,
        "read": {"users": len(whole.user_ids), "items": len(whole.item_ids), "interactions": len(whole)},
        "filters": asdict(filters),
        "vocabulary": {
            "policy": words.policy,
            "interactions_dropped": int((~known).sum()),
            "last_items_dropped": int((~known[last]).sum()),
            "release": release,
        },
        **_times(log, order, users),
        **_sizes(lengths, len(words)),
        "split": {"rule": "leave-last-out", "validation": validation, **_split(lengths)},
        "max_length": max_length,
    }
    ids = [log.user_ids[user] for user in present]
    kept = numbers[items[known]].astype(np.int32)
    return Dataset(kept, offsets, ids, words, max_length, validation, description)


def chronological(log: Interactions) -> np.ndarray:
    """Rows by user, then time; rows of the same time stay in file order (almost half of ML-1M's tie)."""
    if log.timestamps is None:
        return np.argsort(log.users, kind="stable")
    return np.lexsort((log.timestamps, log.users))  # stable


def _vocabulary(
    log: Interactions,
    users: np.ndarray,
    items: np.ndarray,
    wanted: Vocabulary | PrivateVocabulary | None,
    normal: Callable[[int], np.ndarray] | None,
) -> tuple[Vocabulary, np.ndarray, dict[str, Any] | None]:
    """The vocabulary, the number in it of each item code of the log (-1: none), and what a DP release cost."""
    if isinstance(wanted, Vocabulary):
        return wanted, wanted.match(log.item_ids), None
    release = None
    if wanted is None:
        codes = np.flatnonzero(np.bincount(items, minlength=len(log.item_ids)))
    else:
        release = _release(users, items, wanted, normal)
        codes = release.items
    names = [log.item_ids[code] for code in codes.tolist()]
    order = canonical_order(names)
    policy = "assumed-public" if wanted is None else "dp"
    numbers = np.full(len(log.item_ids), -1, dtype=np.int64)
    numbers[codes[order]] = np.arange(len(codes))
    return Vocabulary([names[place] for place in order.tolist()], None, policy), numbers, _price(release)


def _release(
    users: np.ndarray, items: np.ndarray, wanted: PrivateVocabulary, normal: Callable[[int], np.ndarray] | None
) -> SparseHistogram:
    if normal is None:
        from dpformer.privacy import SecureNoise

        normal = SecureNoise().normal
    try:
        release = sparse_histogram(users, items, **asdict(wanted), normal=normal)
    except ValueError as error:
        raise DpformerError(str(error)) from None
    if not len(release.items):
        raise DpformerError(
            f"no item is common enough for the private vocabulary (threshold {release.threshold:.1f} at noise "
            f"multiplier {wanted.noise_multiplier:g}): give a public catalogue, more data, or less noise"
        )
    return release


def _price(release: SparseHistogram | None) -> dict[str, Any] | None:
    if release is None:
        return None
    facts = asdict(release)
    return {name: facts[name] for name in ("noise_multiplier", "delta", "threshold", "max_items")}


def _refuse_unknown(log: Interactions, unknown: np.ndarray) -> None:
    raise DpformerError(
        f"item {log.item_ids[unknown[0]]!r} and {len(np.unique(unknown)) - 1:,} other items are not in the catalogue "
        f"({len(unknown):,} of {len(log):,} interactions); complete it, or drop them with --drop-unknown-items"
    )


def _refuse_useless(lengths: np.ndarray) -> None:
    if len(lengths) < 2:
        raise DpformerError(f"{len(lengths)} user is left: user-level privacy needs many users; check the user column")
    if lengths.max() < 2:
        raise DpformerError(f"none of {len(lengths):,} users has two items: there is no next item to learn")


def _times(log: Interactions, order: np.ndarray, users: np.ndarray) -> dict[str, Any]:
    if log.timestamps is None:
        return {"order": "file", "time_range": None, "tied_share": None}
    times = log.timestamps[order]
    same = (users[1:] == users[:-1]) & (times[1:] == times[:-1])
    tied = np.append(same, False) | np.insert(same, 0, False)
    ends = [times.min().item(), times.max().item()]
    return {"order": "timestamp", "time_range": ends, "tied_share": round(float(tied.mean()), 4)}


def _sizes(lengths: np.ndarray, num_items: int) -> dict[str, Any]:
    spread = {"min": int(lengths.min()), "median": float(np.median(lengths)), "mean": round(float(lengths.mean()), 2)}
    return {
        "users": len(lengths),
        "items": num_items,
        "interactions": int(lengths.sum()),
        "lengths": {**spread, "max": int(lengths.max())},
    }


def _split(lengths: np.ndarray) -> dict[str, int]:
    short = int((lengths < MIN_TO_TEST).sum())
    return {"test_users": len(lengths) - short, "train_only_users": short}


def _cache_key(path: Path, options: tuple[Any, ...]) -> str:
    try:
        stat = path.stat()
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
    columns, vocabulary, *rest = options
    words = vocabulary.to_json() if isinstance(vocabulary, Vocabulary) else repr(vocabulary)
    facts = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, repr(columns or Columns()), words, repr(rest)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
