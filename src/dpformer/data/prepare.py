"""From a log to sequences: filter, fix the vocabulary, sort by time, split. Every choice lands in the statement."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.cache import load, save
from dpformer.data.columns import Columns
from dpformer.data.dataset import MIN_TO_TEST, Dataset
from dpformer.data.files import files_of
from dpformer.data.histories import Histories, read
from dpformer.data.interactions import Interactions
from dpformer.data.reading import Reading
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
    """What is left out: a matter of each user's own rows."""

    min_rating: float | None = None
    min_user_actions: int = 0


def prepare(
    source: str | Path | Interactions,
    *,
    columns: Columns | None = None,
    reading: Reading | None = None,
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
        source: a log (see `read`), or interactions (`from_frame`).
        columns: names of columns that are not the usual ones.
        reading: what else is declared about the log: format, order, encoding, …
        vocabulary: a public catalogue (`read_catalog`), or a `PrivateVocabulary` to be released, or None: the items
            that occur in the data are assumed public.
        drop_unknown_items: leave out items that the catalogue lacks; by default they are an error.
        filters: what to leave out first.
        max_length: how many items of a user, the last ones, are trained on; None: whole histories.
        validation: hold out a validation item before the test item.
        cache: a folder in which prepared data is kept, private, and found again while the files are unchanged. A
            `PrivateVocabulary` is never kept: a release belongs to one run and its ledger.
        normal: draws standard normal noise for a `PrivateVocabulary`; by default from the secure source.
    """
    filters, reading = filters or Filters(), reading or Reading()
    options = (vocabulary, drop_unknown_items, filters, max_length, validation, normal)
    if isinstance(source, Interactions):
        return _prepare(source.histories(**asdict(filters)), "", *options)
    path = Path(source)
    folder = None
    if cache is not None and not isinstance(vocabulary, PrivateVocabulary):
        folder = Path(cache) / _cache_key(path, columns, reading, vocabulary, drop_unknown_items, filters, validation)
    if folder is not None and folder.exists():
        return load(folder).with_max_length(max_length)
    dataset = _prepare(read(path, columns, reading, **asdict(filters)), path.name, *options)
    if folder is None:
        return dataset
    save(dataset, folder)
    return load(folder).with_max_length(max_length)


def _prepare(
    log: Histories,
    name: str,
    vocabulary: Vocabulary | PrivateVocabulary | None,
    drop_unknown_items: bool,
    filters: Filters,
    max_length: int | None,
    validation: bool,
    normal: Callable[[int], np.ndarray] | None,
) -> Dataset:
    words, numbers, release = _vocabulary(log, vocabulary, normal)
    known = numbers[log.codes] >= 0
    if isinstance(vocabulary, Vocabulary) and not drop_unknown_items and not known.all():
        _refuse_unknown(log, log.codes[~known])
    last = log.offsets[1:] - 1
    dropped, last_dropped = int((~known).sum()), int((~known[last]).sum())
    lengths = np.add.reduceat(known, log.offsets[:-1], dtype=np.int64)  # every user has rows
    items = numbers[log.codes[known] if dropped else log.codes]
    users = np.flatnonzero(lengths)
    ids = log.user_ids if len(users) == len(log) else [log.user_ids[user] for user in users.tolist()]
    lengths = lengths[users]
    _refuse_useless(lengths)
    description = {
        "source": name,
        "filters": asdict(filters),
        "vocabulary": {
            "policy": words.policy,
            "interactions_dropped": dropped,
            "last_items_dropped": last_dropped,
            "release": release,
        },
        **log.facts,
        **_sizes(lengths, len(words)),
        "split": {"rule": "leave-last-out", "validation": validation, **_split(lengths)},
        "max_length": max_length,
    }
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Dataset(items, offsets, ids, words, max_length, validation, description)


def _vocabulary(
    log: Histories, wanted: Vocabulary | PrivateVocabulary | None, normal: Callable[[int], np.ndarray] | None
) -> tuple[Vocabulary, np.ndarray, dict[str, Any] | None]:
    """The vocabulary, the number in it of each item code of the log (-1: none), and what a DP release cost."""
    if isinstance(wanted, Vocabulary):
        return wanted, wanted.match(log.item_ids).astype(np.int32), None
    release = None
    if wanted is None:
        codes = np.flatnonzero(np.bincount(log.codes, minlength=len(log.item_ids)))
    else:
        users = np.repeat(np.arange(len(log)), np.diff(log.offsets))
        release = _release(users, log.codes, wanted, normal)
        codes = release.items
    names = [log.item_ids[code] for code in codes.tolist()]
    order = canonical_order(names)
    policy = "assumed-public" if wanted is None else "dp"
    numbers = np.full(len(log.item_ids), -1, dtype=np.int32)
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


def _refuse_unknown(log: Histories, unknown: np.ndarray) -> None:
    raise DpformerError(
        f"item {log.item_ids[unknown[0]]!r} and {len(np.unique(unknown)) - 1:,} other items are not in the catalogue "
        f"({len(unknown):,} of {len(log.codes):,} interactions); complete it, or drop them with --drop-unknown-items"
    )


def _refuse_useless(lengths: np.ndarray) -> None:
    if len(lengths) < 2:
        raise DpformerError(f"{len(lengths)} user is left: user-level privacy needs many users; check the user column")
    if lengths.max() < 2:
        raise DpformerError(f"none of {len(lengths):,} users has two items: there is no next item to learn")


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


def _cache_key(path: Path, columns: Columns | None, reading: Reading, vocabulary: Any, *rest: Any) -> str:
    if path.name == "-":
        raise DpformerError("standard input can be read once only: leave --cache out, or give a file")
    try:
        files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(path)]
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
    words = vocabulary.to_json() if isinstance(vocabulary, Vocabulary) else repr(vocabulary)
    facts = [files, repr(columns or Columns()), repr(replace(reading, memory=None)), words, repr(rest)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
