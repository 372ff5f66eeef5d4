"""Every query of ours can be audited: canaries through it are seen with the noise that it claims, and no less."""

from typing import Any

import numpy as np
import pytest

from dpformer.noise.randomness import SecureRandom
from dpformer.queries.registry import all_queries, query_of
from dpformer.verification.audit import audit_query

CLAIM: dict[str, Any] = {"noise_multiplier": 2.0, "delta": 1e-3, "canaries": 1500, "seed": 0}
LABELS = [query.label for query in all_queries()]


@pytest.mark.parametrize("label", LABELS)
def test_the_claim_holds(label: str) -> None:
    query = query_of(label)
    assert query is not None
    result = audit_query(query, **CLAIM)
    assert result.passed and result.of == label, result.verdict
    assert 0.4 * result.epsilon_claimed < result.epsilon_lower < 1.4 * result.epsilon_claimed, "give or take chance"


@pytest.mark.parametrize("label", LABELS)
def test_half_of_the_noise_is_found(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = SecureRandom.normal
    monkeypatch.setattr(SecureRandom, "normal", lambda self, *given, **named: draw(self, *given, **named) / 2)
    query = query_of(label)
    assert query is not None
    assert not audit_query(query, **{**CLAIM, "canaries": 600}).passed


@pytest.mark.parametrize("label", ["items", "frequencies", "metrics"])
def test_a_user_who_counts_twice_is_found(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpformer.queries import frequencies, items, metrics

    counted, popular, values = frequencies.user_counts, items.exact_popularity, metrics.user_values
    monkeypatch.setattr(frequencies, "user_counts", lambda *given: 2 * counted(*given))
    monkeypatch.setattr(metrics, "user_values", lambda *given: 2 * values(*given))
    monkeypatch.setattr(items, "exact_popularity", lambda i, offsets, most: _last_twice(popular(i, offsets, most)))
    query = query_of(label)
    assert query is not None
    assert not audit_query(query, **CLAIM).passed


def _last_twice(counts: np.ndarray) -> np.ndarray:
    """Canaries are those above the smallest count, which is that of the others on each item."""
    return counts + (counts > counts.min() + 0.5)
