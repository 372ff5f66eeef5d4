"""A data set as users: for each, the list of its examples. A user here is the unit that the guarantee protects."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dpformer.errors import DpformerError


class Users:
    """One list of examples per user, from any map-style data set.

    Args:
        dataset: anything with `len` and `[i]`: one user per item, which is one example or a list of them; or, with
            `by`, one example per item.
        by: the user of each example: the name of a column, or as many ids as there are items. All examples with one
            id are one user.
    """

    def __init__(self, dataset: Any, by: str | Sequence[Any] | None = None) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DpformerError(
                f"the training data is a {type(dataset).__name__}, which has no length or cannot be indexed: Poisson "
                "sampling draws users by number, so give a map-style data set"
            )
        self.dataset = dataset
        self._places = None if by is None else _places(_ids(dataset, by))
        if len(self) < 2:
            raise DpformerError(f"the training data has {len(self)} users, but at least 2 are needed")

    @property
    def grouped(self) -> bool:
        """Whether it is known whose example each item is."""
        return self._places is not None

    def __len__(self) -> int:
        return len(self.dataset) if self._places is None else len(self._places)

    def __getitem__(self, user: int) -> list[Any]:
        """The examples of a user, in the order of the data set."""
        if self._places is not None:
            return [self.dataset[place] for place in self._places[user]]
        item = self.dataset[user]
        return list(item) if isinstance(item, list | tuple) else [item]

    def digest(self) -> str:
        """SHA-256 of all examples. Computed from the data without noise: it stays with the keys."""
        digest = hashlib.sha256(b"dpformer users 1\n")
        for user in range(len(self)):
            for example in self[user]:
                _feed(digest, example)
            digest.update(b"\nuser\n")
        return digest.hexdigest()


def _ids(dataset: Any, by: str | Sequence[Any]) -> list[Any]:
    if not isinstance(by, str):
        ids = list(by)
    elif hasattr(dataset, "column_names"):  # datasets package: a whole column at once
        if by not in dataset.column_names:
            raise DpformerError(f"the training data has no column {by!r}, only {', '.join(dataset.column_names)}")
        ids = list(dataset[by])
    else:
        ids = [_id_of(dataset[place], by, place) for place in range(len(dataset))]
    if len(ids) != len(dataset):
        raise DpformerError(f"there are {len(ids)} user ids for {len(dataset)} examples: give one per example")
    for place, name in enumerate(ids):
        if name is None or name != name:  # NaN, which differs from itself: each would be another user
            raise DpformerError(f"example {place} has no user id ({name}), but every example needs one")
        if isinstance(name, float | np.floating) and abs(float(name)) >= 2.0 ** (np.finfo(type(name)).nmant + 1):
            raise DpformerError(f"the user id {name!r} of example {place} stands for several integers: give integers")
    return ids


def _id_of(example: Any, by: str, place: int) -> Any:
    if not isinstance(example, Mapping) or by not in example:
        raise DpformerError(f"example {place} has no {by!r}, but every example needs one")
    return example[by]


def _places(ids: Sequence[Any]) -> list[list[int]]:
    """The examples of each user; users in order of first appearance."""
    found: dict[Any, list[int]] = {}
    for place, name in enumerate(ids):
        found.setdefault(name.item() if isinstance(name, torch.Tensor | np.generic) else name, []).append(place)
    return list(found.values())


def _feed(digest: Any, value: Any) -> None:
    """Hash any value of an example unambiguously: types and lengths are included."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        digest.update(repr(("array", value.dtype.str, value.shape)).encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}".encode())
        for name in sorted(value):
            _feed(digest, name)
            _feed(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr((type(value).__name__, value)).encode("utf-8", "surrogatepass"))
