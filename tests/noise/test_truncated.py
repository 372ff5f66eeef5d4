"""Truncated Poisson batches: who is in them, by sampling; what they cost, against the exact game; a run; an audit."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare, norm

import dpformer as dp
from dpformer.accounting import Ledger, PoissonGaussian, epsilon_of
from dpformer.accounting.events import Event
from dpformer.noise import Truncated
from dpformer.noise.mechanisms import TruncatedGaussian, noise_of
from dpformer.runs import Config, train
from dpformer.sampling import PoissonBatches
from dpformer.verification import standalone
from dpformer.verification.audit import audit
from dpformer.verification.verify import verify
from tests.noise.truncated_accountant import TruncatedEvent
from tests.noise.truncated_accountant import epsilon_of as epsilon_by_another
from tests.training.conftest import tiny_config
from tests.training.logs import write_log

N, Q, MOST, STEPS = 40, 0.25, 11, 4000


def event(sigma: float, q: float, steps: int, most: int, users: int) -> TruncatedGaussian:
    return TruncatedGaussian(sigma, q, steps, max_batch_size=most, population=users)


# Who is in a batch.


def test_batches_are_random_subsets_of_poisson_batches() -> None:
    """Of a Poisson batch that is too large, every user is kept with the same probability, in every pair."""
    plain = PoissonBatches(N, Q, STEPS, seed=1)
    batches = PoissonBatches(N, Q, STEPS, noise=Truncated(MOST, N), seed=1)
    taken, pairs, kept = np.zeros(N), np.zeros((N, N)), 0
    for step in range(STEPS):
        drawn, found = plain.draw(step), batches.draw(step)
        assert len(found) == min(len(drawn), MOST) and set(found) <= set(drawn) and (np.diff(found) > 0).all()
        if len(drawn) <= MOST:
            continue
        taken[found] += 1
        pairs[np.ix_(found, found)] += 1
        kept += 1
    assert 0.2 * STEPS < kept < 0.5 * STEPS, "chance decides whether a batch is truncated"
    assert chisquare(taken).pvalue > 1e-3
    together = pairs[np.triu_indices(N, 1)]
    expected = kept * MOST * (MOST - 1) / (N * (N - 1))
    assert abs(together - expected).max() < 6 * math.sqrt(expected) and abs(together.mean() - expected) < 1e-9
    sizes = np.array([len(batches.draw(step)) for step in range(STEPS)])
    full = binom.sf(MOST - 1, N, Q)
    assert abs((sizes == MOST).mean() - full) < 5 * math.sqrt(full * (1 - full) / STEPS)


def test_places_in_a_batch_say_nothing() -> None:
    """Neither the first users nor the last are kept more often: the rank in a drawn batch is uniform."""
    plain = PoissonBatches(N, Q, STEPS, seed=2)
    batches = PoissonBatches(N, Q, STEPS, noise=Truncated(MOST, N), seed=2)
    counts = np.zeros(MOST + 2)
    for step in range(STEPS):
        drawn = plain.draw(step)
        if len(drawn) == MOST + 2:
            counts += np.isin(drawn, batches.draw(step))
    assert counts.sum() > 1000 and chisquare(counts).pvalue > 1e-3


def test_all_users_at_once() -> None:
    batches = PoissonBatches(N, 1.0, 400, noise=Truncated(10, N), seed=0)
    counts = sum(np.bincount(batches.draw(step), minlength=N) for step in range(400))
    assert counts.sum() == 4000 and chisquare(counts).pvalue > 1e-3


def test_bad_choices_are_refused() -> None:
    with pytest.raises(ValueError, match="truncated for 50 users, but there are 40"):
        PoissonBatches(40, 0.1, 3, noise=Truncated(10, 50))
    with pytest.raises(ValueError, match="max_batch_size"):
        Truncated(0, 50)
    with pytest.raises(ValueError, match="population"):
        event(1.0, 0.1, 3, 5, 0)


# Cost.


@cache
def worlds(sigma: float, q: float, most: int, users: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Densities of one step where one user gives 1 and all others −1: with that user's data, and with zeros instead."""
    x = np.linspace(-users - 12 * sigma, users + 12 * sigma, 50_001)
    with_user, without = np.zeros_like(x), np.zeros_like(x)
    for others in range(users):  # drawn besides the user
        chance = binom.pmf(others, users - 1, q)
        kept = q * min(1.0, most / (others + 1))
        for part, probability in ((True, chance * kept), (False, chance * (1 - kept))):
            # Not kept: `most` of the others, or all of them; kept: one less, if the batch is full.
            rest = min(others, most - 1) if part else min(others, most)
            with_user += probability * norm.pdf(x, part - rest, sigma)
            without += probability * norm.pdf(x, -rest, sigma)
    return with_user, without, float(x[1] - x[0])


def exact_delta(sigma: float, q: float, most: int, users: int, epsilon: float, removed: bool) -> float:
    """δ(ε) of that step."""
    with_user, without, width = worlds(sigma, q, most, users)
    one, other = (with_user, without) if removed else (without, with_user)
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum() * width)


GAMES = [(0.7, 0.1, 1, 10), (1.0, 0.3, 4, 10), (0.7, 0.2, 2, 10), (2.0, 0.5, 3, 12), (0.5, 1.0, 3, 8)]


@pytest.mark.parametrize(("sigma", "q", "most", "users"), GAMES)
@pytest.mark.parametrize("removed", [True, False])
def test_no_attack_on_one_step_succeeds_more_often(
    sigma: float, q: float, most: int, users: int, removed: bool
) -> None:
    once = event(sigma, q, 1, most, users)
    for delta in (1e-2, 1e-4):
        for accountant in ("pld", "rdp"):
            epsilon = epsilon_of([once], delta, accountant)
            assert exact_delta(sigma, q, most, users, epsilon, removed) <= delta * (1 + 1e-3) + 1e-9
        epsilon = epsilon_by_another(TruncatedEvent(sigma, q, 1, most, users), delta)
        assert exact_delta(sigma, q, most, users, epsilon, removed) <= delta * (1 + 1e-3) + 1e-9


def test_poisson_accounting_would_understate_it() -> None:
    """With it, the attack above succeeds more often than stated: the event is needed."""
    sigma, q, most, users, delta = 0.7, 0.1, 1, 10, 1e-4
    epsilon = epsilon_of([PoissonGaussian(sigma, q, 1)], delta)
    assert exact_delta(sigma, q, most, users, epsilon, removed=True) > 1.5 * delta


LARGE = [(1.5, 1024 / 6040, 60, most, 6040) for most in (1200, 1060, 1024, 500, 50)]
COSTS = [*LARGE, (2.0, 1.0, 5, 20, 100), (1.1, 1 / 3, 3, 24, 60)]


@pytest.mark.parametrize(("sigma", "q", "steps", "most", "users"), COSTS)
def test_two_accountants_agree(sigma: float, q: float, steps: int, most: int, users: int) -> None:
    once = event(sigma, q, steps, most, users)
    own = TruncatedEvent(sigma, q, steps, most, users)
    epsilon = epsilon_by_another(own, 1e-5)
    assert epsilon == pytest.approx(epsilon_of([once], 1e-5), rel=5e-3)
    theirs = epsilon_of([once], 1e-5, "rdp")
    ours = standalone.epsilon_by_renyi([steps * own.renyi(a) for a in standalone.ORDERS], 1e-5)
    assert theirs == pytest.approx(ours, rel=0.02) and theirs >= epsilon * (1 - 5e-3) > 0


def test_what_is_never_truncated_costs_what_poisson_costs() -> None:
    plain = epsilon_of([PoissonGaussian(1.0, 0.1, 10)], 1e-5)
    assert epsilon_of([event(1.0, 0.1, 10, 100, 100)], 1e-5) == plain
    users, q = 100_000, 0.01
    rarely = Truncated.for_rate(users, q)
    assert binom.sf(rarely.max_batch_size, users, q) < 1e-8
    found = epsilon_of([event(1.0, q, 100, rarely.max_batch_size, users)], 1e-6)
    many = epsilon_of([PoissonGaussian(1.0, q, 100)], 1e-6)
    assert many <= found * (1 + 1e-6) and found < 1.001 * many


# Optimizer, ledger, run, audit.


def test_steps_are_counted_as_truncated() -> None:
    noise = Truncated(3, 20)
    batches = PoissonBatches(20, 0.2, 5, noise=noise)
    model = torch.nn.Linear(2, 1)
    made: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 4}
    optimizer = dp.PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **made, noise=noise)
    clipping, data = dp.PhantomClipping(model), torch.randn(20, 2)
    for batch in batches:
        assert len(batch) <= 3
        for part in batch.split(2):
            with clipping.users(data[part.users], part) as user:
                loss = model(user).square().sum(1)
            clipping.backward(loss, dp.clip(1.0))
        optimizer.step(batch)
        optimizer.zero_grad()
    label = "training"
    assert optimizer.events() == (TruncatedGaussian(1.0, 0.2, 5, max_batch_size=3, population=20, label=label),)
    again = dp.PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **made, noise=noise)
    again.load_state_dict(optimizer.state_dict())
    assert again.events() == optimizer.events()
    facts = Ledger(again.events()).events[0].to_dict()
    assert Event.from_dict(json.loads(json.dumps(facts))) == again.event()
    plain = dp.PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **made)
    with pytest.raises(ValueError, match="the same noise"):
        plain.step(next(iter(PoissonBatches(20, 0.2, 5, noise=noise))))


def test_a_run_from_training_to_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = write_log(tmp_path / "log.csv")
    plain = train(tiny_config(log, seed=None, epochs=1), tmp_path / "plain").folder
    users = json.loads((plain / "privacy.json").read_text())["users"]
    monkeypatch.setattr(Config, "noise", property(lambda self: Truncated(24, users)))
    run = train(tiny_config(log, seed=None, epochs=1), tmp_path / "run").folder
    result = verify(run)
    assert result.passed, result
    facts = json.loads((run / "privacy.json").read_text())
    assert facts["sampler"] == "Poisson, truncated at random to 24" and noise_of(facts) == Truncated(24, users)
    assert any("if more than 24 were drawn" in sentence for sentence in facts["words"])
    assert standalone.main([str(run)]) == 2, "the standalone verifier says that it cannot check this event"


def test_its_audit() -> None:
    claim: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 20, "delta": 1e-3}
    result = audit(**claim, noise=Truncated.for_rate(726, 0.1), canaries=1500, seed=0)  # 726 are members
    assert result.passed, result.verdict
    assert 0.3 * result.epsilon_claimed < result.epsilon_lower < 1.4 * result.epsilon_claimed
