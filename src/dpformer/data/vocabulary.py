"""The vocabulary: which items exist, visible in the model and to everyone who gets it.

Which items occur in private data is itself private: a rare item in a released vocabulary reveals that someone had it.
So there are three policies, and the privacy statement names the one used:

- `catalog`: a public file lists the items; the data has no influence.
- `dp`: the items are released from the data with differential privacy (`release_items`); the ledger holds the cost.
- `assumed-public`: the items that occur in the data; the guarantee does not cover which ones they are.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from dpformer.data.attributes import Attributes
from dpformer.data.interactions import id_text
from dpformer.errors import DpformerError


@dataclass(frozen=True)
class Vocabulary:
    """Items: position i holds the id of item i in the log, and its title if a catalogue provides one."""

    ids: Sequence[str]
    titles: Sequence[str] | None = None
    policy: str = "assumed-public"
    attributes: Attributes | None = None  # public attributes of the items, from a catalogue

    def __post_init__(self) -> None:
        if self.policy not in ("catalog", "dp", "assumed-public"):
            raise ValueError(f"vocabulary policy {self.policy!r} is not one of catalog, dp, assumed-public")
        if len(self._numbers) != len(self.ids):
            raise ValueError("a vocabulary contains an id twice")
        if self.titles is not None and len(self.titles) != len(self.ids):
            raise ValueError(f"{len(self.titles)} titles for {len(self.ids)} items")
        if self.attributes is not None and self.attributes.num_items != len(self.ids):
            raise ValueError(f"attributes of {self.attributes.num_items} items for {len(self.ids)} items")

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.ids)}

    def index(self, ids: Iterable[Any]) -> np.ndarray:
        """Item numbers of ids in the log; an unknown id is an error."""
        names = [id_text(name) for name in ids]
        unknown = [name for name in names if name not in self._numbers]
        if unknown:
            raise DpformerError(f"item {unknown[0]!r} is not in the vocabulary of {len(self):,} items")
        return np.array([self._numbers[name] for name in names], dtype=np.int64)

    def match(self, ids: Sequence[str]) -> np.ndarray:
        """Item numbers of ids, -1 for those not in the vocabulary."""
        return np.fromiter((self._numbers.get(name, -1) for name in ids), np.int64, len(ids))

    def title(self, item: int) -> str:
        """An item's title, or its id if it has none."""
        return (self.titles[item] if self.titles is not None else "") or self.ids[item]

    def to_json(self) -> str:
        """Ids, titles and policy as text, to be stored with prepared data; attributes are read from their own file."""
        titles = None if self.titles is None else list(self.titles)
        return json.dumps({"policy": self.policy, "ids": list(self.ids), "titles": titles})

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        """The inverse of `to_json`."""
        try:
            fields = json.loads(text)
            ids, titles = fields["ids"], fields["titles"]
            if not all(isinstance(name, str) for name in chain(ids, titles or ())):
                raise ValueError("an id or title is not text")
            return cls(ids, titles, fields["policy"])
        except (ValueError, KeyError, TypeError) as error:
            raise DpformerError(f"this is not a stored vocabulary: {error}") from None


def canonical_order(ids: Sequence[str]) -> np.ndarray:
    """The order in which released items are numbered: a function of the *set* of ids alone.

    Order of appearance in the data would reveal whose came first. Integers are sorted by value, before other text.
    """

    def key(number: int) -> tuple[bool, int, str, str]:
        name = ids[number]
        if name.isascii() and name.isdecimal():
            digits = name.lstrip("0")
            return (False, len(digits), digits, name)
        return (True, 0, name, name)

    return np.array(sorted(range(len(ids)), key=key), dtype=np.int64)
