"""The audit of transition counts: tight on a correct release, and it accuses every fault put in."""

from typing import Any

import numpy as np
import pytest

from dpformer.engines import sums as counts_sums
from dpformer.engines.sums import GRID, WEIGHTS
from dpformer.noise.randomness import SecureRandom
from dpformer.queries.transitions import rounds as counts_release
from dpformer.queries.transitions.query import TRANSITIONS
from dpformer.queries.transitions.rounds import deviation_of
from dpformer.verification.audit import Audit, audit_query

CLAIM: dict[str, Any] = {"noise_multiplier": 0.8, "delta": 1e-3, "canaries": 2000, "seed": 0}


def accused(result: Audit) -> set[str]:
    return {check.name for check in result.checks if not check.passed}


def test_a_correct_release_shows_most_of_its_epsilon_and_no_more() -> None:
    result = audit_query(TRANSITIONS, **CLAIM)
    assert accused(result) == set() and result.passed
    assert 0.7 * result.epsilon_claimed < result.epsilon_lower <= result.epsilon_claimed
    assert "ε of transition counts" in result.verdict and result.to_dict()["of"] == "transition counts"


def test_no_noise_is_used_in_two_releases() -> None:
    """Under keys of the system, where each of the many other checks is wrong once in a million times."""
    result = audit_query(TRANSITIONS, **{**CLAIM, "seed": None, "canaries": 500})
    (check,) = [check for check in result.checks if check.name == "noise: of another run"]
    assert check.passed


def test_too_little_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_release, "deviation_of", lambda this, noise: 0.7 * deviation_of(this, noise))
    result = audit_query(TRANSITIONS, **CLAIM)
    assert {"canaries guessed wrong", "noise: standard deviation"} <= accused(result)
    assert result.epsilon_lower > 1.1 * result.epsilon_claimed


def test_too_little_noise_on_the_items_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the budget: canaries cannot see it at a tenth of its noise, the check of that round does."""

    def careless(this: Any, noise: float) -> float:
        return deviation_of(this, noise) * (0.1 if this == counts_release.ITEMS else 1)

    monkeypatch.setattr(counts_release, "deviation_of", careless)
    found = accused(audit_query(TRANSITIONS, **CLAIM))
    assert found == {"noise: round of items", "noise: round of items, released twice"}


def test_a_round_that_is_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round with the noise of the whole, as if each had the budget for itself."""
    monkeypatch.setattr(counts_release, "deviation_of", lambda this, noise: noise)
    assert {"canaries guessed wrong", "noise: standard deviation"} <= accused(audit_query(TRANSITIONS, **CLAIM))


def test_users_who_are_not_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user counts as much as the history is long."""
    quantised = counts_sums.quantised

    def loud(values: np.ndarray, squares: np.ndarray) -> np.ndarray:
        return quantised(values, squares) if values.dtype.kind == "f" else values * (GRID // 256)  # pairs, not items

    monkeypatch.setattr(counts_sums, "quantised", loud)
    assert {"canaries guessed wrong", "contribution of one user, in clip norms"} <= accused(
        audit_query(TRANSITIONS, **CLAIM)
    )


def test_duplicates_that_are_not_merged_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that occurs r times taken for r coordinates: norms are too small, and so is what divides."""

    def wrong(keys: np.ndarray, width: int, given: np.ndarray | None = None) -> Any:
        weights = np.array(WEIGHTS)[keys & 15]
        cells = (keys >> 4) & (1 << width.bit_length()) - 1
        users = keys >> 4 + width.bit_length()
        squares = np.bincount(users, weights=weights * weights).astype(np.int64)
        return cells, counts_sums.quantised(weights, squares[users])

    monkeypatch.setattr(counts_sums, "_vectors", wrong)
    assert "contribution of one user, in clip norms" in accused(audit_query(TRANSITIONS, **CLAIM))


def test_the_same_noise_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = counts_release._noisy
    monkeypatch.setattr(
        counts_release, "_noisy", lambda counts, deviation, random, step: noisy(counts, deviation, random, 1)
    )
    assert "noise: standard deviation" in accused(audit_query(TRANSITIONS, **CLAIM))


def test_the_same_noise_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts_release, "SecureRandom", lambda label, seed: SecureRandom(label, key=bytes(32)))
    assert "noise: of another run" in accused(audit_query(TRANSITIONS, **{**CLAIM, "seed": None}))


def test_bad_arguments_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="canaries is 10; fewer than 100 show nothing"):
        audit_query(TRANSITIONS, **{**CLAIM, "canaries": 10})
