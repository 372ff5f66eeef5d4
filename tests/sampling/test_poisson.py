"""Poisson batches: inclusion is independent over users and steps at the accounted rate, and resumes exactly."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpformer.noise import SecureRandom
from dpformer.sampling import PoissonBatches

N, STEPS = 400, 2000


@pytest.fixture(scope="module", params=[0.03, 0.5, 0.9])
def drawn(request: pytest.FixtureRequest) -> tuple[float, np.ndarray]:
    """q and (steps, users) of who is in."""
    batches = PoissonBatches(N, request.param, STEPS, seed=7)
    table = np.zeros((STEPS, N), dtype=bool)
    for step, batch in enumerate(batches):
        table[step, batch.users] = True
    return request.param, table


def test_rate(drawn: tuple[float, np.ndarray]) -> None:
    q, table = drawn
    assert stats.binomtest(int(table.sum()), table.size, q).pvalue > 1e-3  # q × 1.25 or × 2: caught


def test_every_user_has_the_same_rate(drawn: tuple[float, np.ndarray]) -> None:
    q, table = drawn
    for counts, trials in ((table.sum(0), STEPS), (table.sum(1), N)):
        z2 = ((counts - q * trials) ** 2 / (q * (1 - q) * trials)).sum()
        assert 1e-3 < stats.chi2.sf(z2, len(counts)) < 1 - 1e-3


def test_batch_sizes_are_binomial(drawn: tuple[float, np.ndarray]) -> None:
    """A fixed size, or a count drawn from anything else, is not Poisson sampling: the variance shows it."""
    q, table = drawn
    sizes = table.sum(1)
    assert sizes.var() == pytest.approx(N * q * (1 - q), rel=0.15)
    assert stats.kstest(sizes + np.random.default_rng(0).uniform(-0.5, 0.5, STEPS), _binomial_cdf(q)).pvalue > 1e-3


def _binomial_cdf(q: float) -> object:
    def cdf(x: np.ndarray) -> np.ndarray:  # of the binomial, spread evenly over ±1/2
        k = np.floor(x + 0.5)
        return stats.binom.cdf(k - 1, N, q) + (x + 0.5 - k) * stats.binom.pmf(k, N, q)

    return cdf


def test_inclusion_is_independent(drawn: tuple[float, np.ndarray]) -> None:
    """Over users and over steps. Shuffling would never include a user twice in an epoch: negative at short lags."""
    q, table = drawn
    centred = (table - q) / math.sqrt(q * (1 - q))
    for lag in (1, 2, 3, 10, 33):
        assert abs((centred[:-lag] * centred[lag:]).sum()) / math.sqrt((STEPS - lag) * N) < 4, "steps"
        assert abs((centred[:, :-lag] * centred[:, lag:]).sum()) / math.sqrt(STEPS * (N - lag)) < 4, "users"
    pairs = centred.T @ centred / math.sqrt(STEPS)  # every pair of users
    off = pairs[np.triu_indices(N, 1)]
    assert off.std() == pytest.approx(1, abs=0.02) and np.abs(off).max() < 9  # rare pairs are skewed


@settings(max_examples=30)
@given(n=st.integers(1, 3000), q=st.floats(1e-4, 1), step=st.integers(0, 9))
def test_naive_twin(n: int, q: float, step: int) -> None:
    """User i is in if its own 64-bit number is below q·2⁶⁴."""
    batches = PoissonBatches(n, q, 10, seed=3)
    words = SecureRandom(f"Poisson batches of {n} users at {q!r}", seed=3).words(n, step=step)
    wanted = [user for user in range(n) if int(words[user]) / 2**64 < q or q == 1]
    users = batches.draw(step)
    assert users.dtype == np.int64 and users.tolist() == wanted


def test_a_million_users_in_chunks() -> None:
    n, q = 1_000_001, 0.01
    users = PoissonBatches(n, q, 1, seed=0).draw(0)
    assert stats.binomtest(len(users), n, q).pvalue > 1e-3
    assert (np.diff(users) > 0).all() and users[0] >= 0 and users[-1] < n
    quarters = np.histogram(users, bins=8, range=(0, n))[0]
    assert stats.chisquare(quarters).pvalue > 1e-3
    words = SecureRandom(f"Poisson batches of {n} users at {q!r}", seed=0).words(n, step=0)
    np.testing.assert_array_equal(users, np.flatnonzero(words < np.uint64(int(q * 2**64))))


def test_everyone_at_rate_one_and_empty_batches_at_tiny_rates() -> None:
    assert PoissonBatches(5, 1.0, 2).batch(1).users.tolist() == [0, 1, 2, 3, 4]
    assert [len(batch) for batch in PoissonBatches(3, 1e-15, 4)] == [0, 0, 0, 0]  # steps like any other
    assert PoissonBatches(3, 1e-15, 4).draw(0).dtype == np.int64


def test_no_rounding_up_of_the_rate() -> None:
    for q in (1 / 3, 1024 / 6040, 1e-7, 1e-18, 1 - 2**-53):
        assert PoissonBatches(1, q, 1)._threshold / 2**64 <= q


@pytest.mark.parametrize("n", [93, 99, 105, 6040])
def test_expected_batch_size_is_not_floored(n: int) -> None:
    """int(1 / (1 / n)) is not n for these: dividing by a floored size is noise for another mean."""
    assert PoissonBatches(n, 1 / n, 1).expected_batch_size == pytest.approx(1, abs=1e-15)
    assert PoissonBatches(n, 0.1234, 1).expected_batch_size == n * 0.1234


def test_iterating_goes_on_where_it_stopped() -> None:
    whole = [batch.users.tolist() for batch in PoissonBatches(50, 0.2, 8, seed=1)]
    batches = PoissonBatches(50, 0.2, 8, seed=1)
    seen = []
    for batch in batches:
        seen.append(batch.users.tolist())
        if len(seen) == 3:
            break
    assert batches.step == 3 and len(batches) == 8
    seen += [batch.users.tolist() for batch in batches]
    assert seen == whole and list(batches) == []
    assert len(whole) == 8 and [batches.batch(step).users.tolist() for step in range(8)] == whole


@pytest.mark.parametrize("seed", [None, 4])
def test_resume_is_exact(seed: int | None) -> None:
    """Saved in the loop's body after the step: the next batch is the next step, under the same secret key."""
    batches = PoissonBatches(50, 0.2, 8, seed=seed)
    for _ in batches:
        if batches.step == 5:
            break
    state = json.loads(json.dumps(batches.state_dict()))
    again = PoissonBatches(50, 0.2, 8)
    again.load_state_dict(state)
    assert [batch.users.tolist() for batch in again] == [batches.draw(step).tolist() for step in (5, 6, 7)]
    assert again.private == (seed is None)


def test_restart_draws_other_batches() -> None:
    one, two = PoissonBatches(1000, 0.5, 1).draw(0), PoissonBatches(1000, 0.5, 1).draw(0)
    assert not np.array_equal(one, two)
    key = bytes(32)
    shared = [PoissonBatches(1000, 0.5, 1, key=key).draw(0) for _ in range(2)]
    np.testing.assert_array_equal(*shared)  # every rank sees the same global batch
    other = PoissonBatches(1001, 0.5, 1, key=key).draw(0)
    assert not np.array_equal(shared[0], other[other < 1000])  # other data: other batches


@pytest.mark.parametrize("change", [{"n": 51}, {"sample_rate": 0.3}, {"steps": 9}, {"step": 9}, {"step": -1}, {"x": 1}])
def test_a_state_of_another_plan_is_refused(change: dict) -> None:
    batches = PoissonBatches(50, 0.2, 8)
    with pytest.raises(ValueError, match=next(iter(change))):
        batches.load_state_dict(batches.state_dict() | change)


def test_a_batch_that_was_not_stepped_on_comes_again() -> None:
    """Saved in the loop's body before the step."""
    batches = PoissonBatches(50, 0.2, 8)
    for batch in batches:
        if batches.step == 5:
            break
        batch.consume()
    again = PoissonBatches(50, 0.2, 8)
    again.load_state_dict(batches.state_dict())
    resumed = next(iter(again))
    assert resumed.step == 4
    resumed.consume()


def test_an_origin_is_the_same_for_the_same_sampler_alone() -> None:
    one = PoissonBatches(50, 0.2, 8)
    again = PoissonBatches(50, 0.2, 8)
    again.load_state_dict(one.state_dict())
    assert again.origin == one.origin and one.origin.identity not in repr(one.state_dict())
    key = bytes(32)
    others = [(50, 0.2, 8), (51, 0.2, 8), (50, 0.3, 8), (50, 0.2, 9)]
    assert len({PoissonBatches(*plan, key=key).origin.identity for plan in others} | {one.origin.identity}) == 5
    assert not PoissonBatches(50, 0.2, 8, seed=0).origin.private


def test_seeds_are_marked() -> None:
    seeded = PoissonBatches(5, 0.5, 1, seed=1)
    assert not seeded.private and "NOT private" in seeded.description
    assert PoissonBatches(5, 0.5, 1).private


@pytest.mark.parametrize(
    "arguments",
    [(0, 0.1, 1), (-1, 0.1, 1), (1.5, 0.1, 1), (5, 0, 1), (5, 1.1, 1), (5, math.nan, 1), (5, 0.1, 0), (5, 0.1, 1.0)],
)
def test_bad_plans_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError):
        PoissonBatches(*arguments)
    with pytest.raises(ValueError, match=r"0\.\.9"):
        PoissonBatches(5, 0.1, 10).batch(10)
