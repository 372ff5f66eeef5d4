"""The number of users, N: every statement publishes it, so no user's actions may influence it.

Anyone named by a row of the log is a user, even if all rows of that user are filtered out: an empty history adds
nothing to training and is sampled like any other. Alternatively N is declared and does not depend on the log at all.
"""

from collections.abc import Sequence

import numpy as np

from dpformer.errors import DpformerError


def with_declared(
    ids: Sequence[str], offsets: np.ndarray, declared: int | None, plural: str = "users"
) -> tuple[Sequence[str], np.ndarray]:
    """(ids, offsets) for a declared number of users: additional users have no id and an empty history."""
    missing = check_declared(len(ids), declared, plural) - len(ids)
    if not missing:
        return ids, offsets
    return [*ids, *[""] * missing], np.concatenate([offsets, np.full(missing, offsets[-1])])


def check_declared(named: int, declared: int | None, plural: str = "users") -> int:
    """N, given the number of users in the log. A smaller declared number is refused before anything is released."""
    if declared is not None and declared < named:
        raise DpformerError(f"--users is {declared:,}, but the log names {named:,} {plural}: declare at least as many")
    return named if declared is None else declared
