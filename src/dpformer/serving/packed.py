"""Histories in the item numbers of a model, and the treatment of ids unknown to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpformer.data.histories import Histories
from dpformer.data.interactions import id_text
from dpformer.errors import DpformerError
from dpformer.runs.model_file import Release

REPORT, IGNORE, ERROR = POLICIES = ("report", "ignore", "error")
SHOWN = 3  # ids shown in a sentence


@dataclass(frozen=True)
class Packed:
    """Histories in item numbers: user u's are items[offsets[u]:offsets[u + 1]], without unknown items.

    Attributes:
        user_ids: ids of the users, in order.
        items: (n,) int64.
        offsets: (users + 1,) int64.
        unknown: number of interactions ignored.
        unknown_items: number of distinct items among them.
        note: a sentence about them; empty if there are none, or if they are to be ignored.
    """

    user_ids: Sequence[str]
    items: np.ndarray
    offsets: np.ndarray
    unknown: int
    unknown_items: int
    note: str

    @classmethod
    def of(cls, histories: Histories, release: Release, unknown: str = REPORT) -> Packed:
        """Look up ids.

        Args:
            histories: histories in ids of the log.
            release: the model.
            unknown: how to treat ids unknown to the model: ignore and report them ("report"), ignore them silently
                ("ignore"), or refuse them ("error"). Unless they are ignored silently, histories without any known id
                are refused, because then the ids must be something else.
        """
        if unknown not in POLICIES:
            raise DpformerError(f"unknown is {unknown!r}; it must be {', '.join(POLICIES[:-1])} or {POLICIES[-1]}")
        numbers = {id_text(name): number for number, name in enumerate(release.vocabulary)}
        of_code = np.fromiter((numbers.get(name, -1) for name in histories.item_ids), np.int64, len(histories.item_ids))
        items = of_code[histories.codes]
        known = items >= 0
        before = np.concatenate([[0], np.cumsum(known)])  # known ids before each position
        lost = np.unique(histories.codes[~known])
        packed = cls(histories.user_ids, items[known], before[histories.offsets], int((~known).sum()), len(lost), "")
        if not packed.unknown or unknown == IGNORE:
            return packed
        examples = ", ".join(repr(histories.item_ids[code]) for code in lost[:SHOWN].tolist())
        examples += ", …" if len(lost) > SHOWN else ""
        if unknown == ERROR or not len(packed.items):
            raise DpformerError(_refusal(packed, len(known), examples, release))
        emptied = int(((np.diff(histories.offsets) > 0) & (np.diff(packed.offsets) == 0)).sum())
        return cls(**{**packed.__dict__, "note": _note(packed, len(known), examples, emptied)})

    def __len__(self) -> int:
        return len(self.offsets) - 1


def _note(packed: Packed, interactions: int, examples: str, emptied: int) -> str:
    note = (
        f"{packed.unknown:,} of {interactions:,} interactions were ignored, because the model does not know their "
        f"{_items(packed.unknown_items)} ({examples})"
    )
    if emptied:
        note += f"; {_users(emptied)} of {len(packed):,} have no other interactions and receive popular items"
    return note


def _refusal(packed: Packed, interactions: int, examples: str, release: Release) -> str:
    if packed.unknown < interactions:
        return (
            f"the model does not know {_items(packed.unknown_items)} of the histories ({examples}), {packed.unknown:,} "
            f"of {interactions:,} interactions: ignore them with --unknown report"
        )
    return (
        f"the model knows none of the {_items(packed.unknown_items)} of the histories ({examples}); its own "
        f"{len(release.vocabulary):,} items have ids such as {release.vocabulary[0]!r}: check the item column, or give "
        "--unknown ignore, with which everyone receives popular items"
    )


def _items(count: int) -> str:
    return f"{count:,} item{'' if count == 1 else 's'}"


def _users(count: int) -> str:
    return f"{count:,} user{'' if count == 1 else 's'}"
