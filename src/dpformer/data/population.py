"""How many users there are, N: a number that every statement publishes, so no user's behaviour may have a say in it.

Whoever a row of the log names is a user, even if all of that user's rows are filtered away: an empty history trains on
nothing and is sampled like any other. Or N is declared, and the log has no influence on it at all.
"""

from collections.abc import Sequence

import numpy as np

from dpformer.errors import DpformerError


def with_declared(
    ids: Sequence[str], offsets: np.ndarray, declared: int | None, plural: str = "users"
) -> tuple[Sequence[str], np.ndarray]:
    """(ids, offsets) of a declared number of users: the rest have no id and an empty history."""
    missing = check_declared(len(ids), declared, plural) - len(ids)
    if not missing:
        return ids, offsets
    return [*ids, *[""] * missing], np.concatenate([offsets, np.full(missing, offsets[-1])])


def check_declared(named: int, declared: int | None, plural: str = "users") -> int:
    """N, given how many the log names. A smaller declared number is refused: nothing is released then."""
    if declared is not None and declared < named:
        raise DpformerError(f"--users is {declared:,} and the log names {named:,} {plural}: declare at least as many")
    return named if declared is None else declared
