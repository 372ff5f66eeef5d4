"""From a log to sequences: filter, fix the vocabulary, sort by time, split. Every choice appears in the statement."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.cache import FORMAT, load, save
from dpformer.data.columns import Columns
from dpformer.data.dataset import MIN_TO_TEST, Dataset
from dpformer.data.filters import Filters
from dpformer.data.histories import Histories, read
from dpformer.data.interactions import Interactions
from dpformer.data.population import with_declared
from dpformer.data.reading import Reading
from dpformer.data.sources.elsewhere import source_of, state_of
from dpformer.data.sources.files import files_of
from dpformer.data.time_split import TimeSplitDataset
from dpformer.data.vocabulary import Vocabulary, canonical_order
from dpformer.errors import DpformerError


def prepare(
    source: str | Path | Interactions,
    *,
    columns: Columns | None = None,
    reading: Reading | None = None,
    vocabulary: Vocabulary | None = None,
    drop_unknown_items: bool = False,
    filters: Filters | None = None,
    max_length: int | None = 200,
    validation: bool = False,
    users: int | None = None,
    split_at: str | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """Prepare a log for training: one sequence per user; the last item held out, or everything after a cut.

    Args:
        source: a log (see `read`), or interactions (`from_frame`).
        columns: names of columns, if they are not the usual ones.
        reading: other reading options: format, order, encoding, …
        vocabulary: a public catalogue (`read_catalog`), or None: all items that occur in the data. Which items occur is
            private: they must be released (`release_items`, `restrict_to_vocabulary`), or assumed public.
        drop_unknown_items: drop items missing in the catalogue; by default they are an error.
        filters: which interactions to use.
        max_length: use only a user's last items for training; None: whole histories.
        validation: hold out a validation item before the test item.
        split_at: train on what is before this date (or number) and test on what comes after; by default the last item
            of each user is held out.
        users: the declared number of users; by default they are counted in the log, before any filter.
        cache: a private folder for prepared data, reused while the files are unchanged. Released values are never
            cached: a release belongs to one run and its ledger.
    """
    filters, reading = filters or Filters(), reading or Reading()
    options = (vocabulary, drop_unknown_items, filters, max_length, validation, users)
    if isinstance(source, Interactions):
        if split_at is not None:
            raise DpformerError("split_at applies to files, and to frames given to Recommender.fit")
        return from_histories(source.histories(filters), "", *options)
    path = Path(source)
    folder = None
    if cache is not None:
        rest = (drop_unknown_items, filters, validation, users, split_at)
        folder = Path(cache) / _cache_key(path, columns, reading, vocabulary, *rest)
    if folder is not None and folder.exists():
        return load(folder).with_max_length(max_length)
    dataset = from_histories(read(path, columns, reading, filters, split_at), path.name, *options, split_at)
    if folder is None:
        return dataset
    save(dataset, folder)
    return load(folder).with_max_length(max_length)


def from_histories(
    log: Histories,
    name: str,
    vocabulary: Vocabulary | None,
    drop_unknown_items: bool,
    filters: Filters,
    max_length: int | None,
    validation: bool,
    users: int | None,
    split_at: str | None = None,
) -> Dataset:
    """Prepare histories for training; `name` is the source of the log, other arguments are those of `prepare`."""
    words, numbers = _vocabulary(log, vocabulary)
    known = numbers[log.codes] >= 0
    if isinstance(vocabulary, Vocabulary) and not drop_unknown_items and not known.all():
        _refuse_unknown(log, log.codes[~known])
    lengths = np.diff(log.offsets)
    present = lengths > 0
    dropped, last_dropped = int((~known).sum()), int((~known[log.offsets[1:][present] - 1]).sum())
    items = numbers[log.codes[known] if dropped else log.codes]
    weights, sessions = (of if of is None or not dropped else of[known] for of in (log.weights, log.sessions))
    lengths[present] = np.add.reduceat(known, log.offsets[:-1][present], dtype=np.int64)
    _refuse_useless(lengths)
    cuts = None if log.cuts is None else _cuts(log.offsets, log.cuts, known, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids, offsets = with_declared(log.user_ids, offsets, users)
    description = {
        "source": name,
        "filters": asdict(filters),
        "vocabulary": {
            "policy": words.policy,
            "interactions_dropped": dropped,
            "last_items_dropped": last_dropped,
        },
        **log.facts,
        **_sizes(lengths, len(words)),
        "users": len(ids),
        "users_declared": users is not None,
        "split": _split(lengths, validation) if cuts is None else _split_by_time(lengths, cuts, split_at),
        "max_length": max_length,
    }
    given = (items, offsets, ids, words, max_length, validation, description, None, weights, sessions)
    return Dataset(*given) if cuts is None else TimeSplitDataset(*given, cuts=cuts)


def _cuts(offsets: np.ndarray, cuts: np.ndarray, known: np.ndarray, users: int | None) -> np.ndarray:
    """The cuts among the known items of each user; declared users without an id have none."""
    before = np.concatenate([[0], np.cumsum(known)])
    found = before[offsets[:-1] + cuts] - before[offsets[:-1]]
    return np.pad(found, (0, max(0, (users or 0) - len(found))))


def _vocabulary(log: Histories, wanted: Vocabulary | None) -> tuple[Vocabulary, np.ndarray]:
    """The vocabulary, and the number in it of each item code of the log (-1 if missing)."""
    if wanted is not None:
        return wanted, wanted.match(log.item_ids).astype(np.int32)
    codes = np.flatnonzero(np.bincount(log.codes, minlength=len(log.item_ids)))
    names = [log.item_ids[code] for code in codes.tolist()]
    order = canonical_order(names)
    numbers = np.full(len(log.item_ids), -1, dtype=np.int32)
    numbers[codes[order]] = np.arange(len(codes))
    return Vocabulary([names[place] for place in order.tolist()]), numbers


def _refuse_unknown(log: Histories, unknown: np.ndarray) -> None:
    raise DpformerError(
        f"item {log.item_ids[unknown[0]]!r} and {len(np.unique(unknown)) - 1:,} other items are not in the catalogue "
        f"({len(unknown):,} of {len(log.codes):,} interactions); complete it, or drop them with --drop-unknown-items"
    )


def _refuse_useless(lengths: np.ndarray) -> None:
    left = int((lengths > 0).sum())
    if left < 2:
        raise DpformerError(f"only {left} user remains, but user-level privacy needs many: check the user column")
    if lengths.max() < 2:
        raise DpformerError(f"none of the {left:,} users has two items, so there is no next item to predict")


def _sizes(lengths: np.ndarray, num_items: int) -> dict[str, Any]:
    spread = {"min": int(lengths.min()), "median": float(np.median(lengths)), "mean": round(float(lengths.mean()), 2)}
    return {
        "items": num_items,
        "interactions": int(lengths.sum()),
        "lengths": {**spread, "max": int(lengths.max())},
    }


def _split(lengths: np.ndarray, validation: bool) -> dict[str, Any]:
    short = int((lengths < MIN_TO_TEST).sum())
    sizes = {"test_users": len(lengths) - short, "train_only_users": short}
    return {"rule": "leave-last-out", "validation": validation, **sizes}


def _split_by_time(lengths: np.ndarray, cuts: np.ndarray, split_at: str | None) -> dict[str, Any]:
    cuts = cuts[: len(lengths)]
    if not cuts.any() or (cuts == lengths).all():
        side = "comes after" if cuts.any() else "is before"
        raise DpformerError(f"no interaction {side} --until {split_at}: give a time within the range of the log")
    later = lengths > cuts
    cold = int((later & (cuts == 0)).sum())
    sizes = {"test_users": int(later.sum()) - cold, "cold_users": cold, "train_only_users": int((~later).sum())}
    return {"rule": "time", "until": split_at, "validation": False, **sizes}


def _cache_key(path: Path, columns: Columns | None, reading: Reading, vocabulary: Any, *rest: Any) -> str:
    if path.name == "-":
        raise DpformerError("standard input can be read only once: omit --cache, or give a file")
    elsewhere = source_of(path)
    try:
        files: object
        if elsewhere is None:
            files = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(path)]
        else:
            files = [str(elsewhere[1]), state_of(*elsewhere)]
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
    words = vocabulary.to_json() if isinstance(vocabulary, Vocabulary) else repr(vocabulary)
    facts = [FORMAT, files, repr(columns or Columns()), repr(replace(reading, memory=None)), words, repr(rest)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
