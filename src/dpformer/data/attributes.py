"""Public facts about items: which attributes (category, brand, genre, a word of the title) each item has.

They must be public: supplied by the shop, never derived from users' actions. Nothing here reads user data.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

Name = tuple[str, str]  # (column, value): ("genre", "Comedy")
MIN_ITEMS = 2  # an attribute of a single item says nothing about others
WORDS = "title"  # the column of the words of titles
NEAR_BY = "near by "  # how the columns of attributes begin that stand for vectors
MOST_PAIRED = 12  # maximum number of an item's attributes for which pairs are formed


@dataclass(frozen=True)
class Attributes:
    """The attributes of items 0 … M−1: those of item i are links[offsets[i]:offsets[i + 1]], ascending and distinct."""

    names: Sequence[Name]  # (G,)
    offsets: np.ndarray  # (M + 1,) int64
    links: np.ndarray  # (n,) int64 in 0 … G−1

    def __post_init__(self) -> None:
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.links) or (np.diff(self.offsets) < 0).any():
            raise ValueError("offsets do not cut the links into items")
        if len(self.links) and not 0 <= self.links.min() <= self.links.max() < len(self.names):
            raise ValueError(f"a link points outside the {len(self.names)} attributes")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_items(self) -> int:
        return len(self.offsets) - 1

    @property
    def origins(self) -> np.ndarray:  # (n,) int64
        """The item of each link."""
        return np.repeat(np.arange(self.num_items), np.diff(self.offsets))

    @classmethod
    def of_items(cls, facts: Sequence[Iterable[Name]]) -> "Attributes":
        """From the facts about each item; attributes of fewer than two items are dropped.

        >>> some = Attributes.of_items([[("genre", "Comedy")], [("genre", "Comedy"), ("year", "1995")]])
        >>> some.names, some.links.tolist()
        ([('genre', 'Comedy')], [0, 0])
        """
        sets = [set(names) for names in facts]
        counts = Counter(name for names in sets for name in names)
        names = sorted(name for name, count in counts.items() if count >= MIN_ITEMS)
        numbers = {name: number for number, name in enumerate(names)}
        rows = [sorted(numbers[name] for name in names if name in numbers) for names in sets]
        offsets = np.cumsum([0, *map(len, rows)]).astype(np.int64)
        return cls(names, offsets, np.array([link for row in rows for link in row], dtype=np.int64))

    def with_pairs(self) -> "Attributes":
        """These attributes plus every pair of an item's attributes (a comedy of 1995), except words of titles and
        vectors.

        Pairs shared by fewer than two items are dropped, as are those of items with more than 12 attributes.
        """
        facts: list[list[Name]] = []
        for start, stop in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True):
            names = [self.names[link] for link in self.links[start:stop].tolist()]
            paired = [name for name in names if name[0] != WORDS and not name[0].startswith(NEAR_BY)]
            pairs = combinations(paired, 2) if len(paired) <= MOST_PAIRED else ()
            facts.append([*names, *((f"{a[0]} and {b[0]}", f"{a[1]} and {b[1]}") for a, b in pairs)])
        return Attributes.of_items(facts)

    def kept(self, chosen: np.ndarray) -> "Attributes":
        """Only the chosen attributes, (G,) bool, renumbered."""
        numbers = np.cumsum(chosen) - 1
        stay = chosen[self.links]
        lengths = np.bincount(self.origins[stay], minlength=self.num_items)
        names = [name for name, wanted in zip(self.names, chosen.tolist(), strict=True) if wanted]
        return Attributes(names, np.concatenate([[0], np.cumsum(lengths)]), numbers[self.links[stay]])

    def of_rows(self, rows: np.ndarray) -> "Attributes":
        """The attributes of other items: item i has those of item rows[i] here, none if that is negative."""
        starts, lengths = self.offsets[rows], np.where(rows < 0, 0, self.offsets[rows + 1] - self.offsets[rows])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Attributes(self.names, offsets, self.links[places])
