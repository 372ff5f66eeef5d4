"""Banded noise: C·y is independent noise, users take part in turn, and ε is that of a round of steps."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpformer.accounting import Event, Gaussian, Ledger, PoissonGaussian, calibrate
from dpformer.noise import Banded, BandedGaussian, Independent, Noise, SecureRandom
from dpformer.noise.mechanisms import noise_of
from dpformer.sampling import PoissonBatches
from dpformer.training.optimizer import PrivateOptimizer


def optimizer(bands: int, size: int = 4, **choices: Any) -> tuple[torch.nn.Parameter, PrivateOptimizer]:
    """Unit noise, unchanged, in `p.grad`."""
    p = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
    inner = torch.optim.SGD([p], lr=1.0)
    settings = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 1.0, "seed": 0, **choices}
    return p, PrivateOptimizer(inner, noise=noise_over(bands), **settings)


def noise_over(bands: int) -> Noise:
    return noise_of({"bands": bands})


def sampler(bands: int, steps: int = 10) -> PoissonBatches:
    """Of which all batches are empty."""
    return PoissonBatches(100, 1e-9, steps, noise=noise_over(bands), seed=0)


def coefficients(bands: int) -> np.ndarray:
    return noise_over(bands).coefficients()


def released(
    p: torch.nn.Parameter, private: PrivateOptimizer, steps: int, batches: PoissonBatches | None = None
) -> np.ndarray:
    """(steps, size): what each step adds to a gradient of zero."""
    rows = []
    for _ in range(steps):
        p.grad = None
        private.step(None if batches is None else batches.batch(private.steps))
        assert p.grad is not None
        rows.append(p.grad.clone())
    return torch.stack(rows).numpy()


def banded(bands: int, steps: int) -> np.ndarray:
    """C as a matrix."""
    c = coefficients(bands)
    return np.array([[c[t - s] if 0 <= t - s < bands else 0.0 for s in range(steps)] for t in range(steps)])


@given(st.integers(1, 40))
def test_nobody_adds_more_than_one(bands: int) -> None:
    c = coefficients(bands)
    assert len(c) == bands and (c > 0).all() and 1 - 1e-11 < np.linalg.norm(c) <= 1
    if bands > 2:
        assert c[1] / c[0] == pytest.approx(1 / 2) and c[2] / c[0] == pytest.approx(3 / 8)


@pytest.mark.parametrize("bands", [1, 2, 3, 7, 12])
def test_the_noise_solves_the_banded_system(bands: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: all steps at once, by a dense solver, from the same independent numbers."""
    drawn: list[np.ndarray] = []
    fill = SecureRandom.fill_normal

    def recorded(self: SecureRandom, out: torch.Tensor, **address: int) -> None:
        fill(self, out, **address)
        drawn.append(out.numpy().copy())

    monkeypatch.setattr(SecureRandom, "fill_normal", recorded)
    found = released(*optimizer(bands), 10)
    expected = np.linalg.solve(banded(bands, 10), np.stack(drawn))
    np.testing.assert_allclose(found, expected, atol=2**-10)  # the public grid


def test_sums_of_steps_hold_less_of_it_and_no_combination_tells_more() -> None:
    """By sampling: C·y has the covariance of independent noise, prefix sums have less than 40 of it after 40 steps."""
    steps, size = 40, 20_000
    noise = released(*optimizer(8, size), steps)
    white = banded(8, steps) @ noise
    np.testing.assert_allclose(white @ white.T / size, np.eye(steps), atol=9 / size**0.5)
    assert np.square(noise.sum(0)).mean() < 0.4 * steps


@pytest.mark.parametrize(("bands", "steps"), [(1, 9), (2, 1), (4, 3), (5, 30)])
def test_how_much_is_left_in_the_sum(bands: int, steps: int) -> None:
    exact = np.linalg.norm(np.linalg.inv(banded(bands, steps)).sum(0))
    assert noise_over(bands).sum_deviation(steps) == pytest.approx(exact, rel=1e-9)
    assert Independent().sum_deviation(steps) == pytest.approx(steps**0.5)
    assert noise_over(bands).step_deviation(steps) == pytest.approx(exact / steps**0.5, rel=1e-9)
    assert Independent().step_deviation(steps) == 1, "not a bit is rounded"


def test_users_take_turns() -> None:
    n, bands, rate, steps = 4000, 5, 0.1, 200
    batches = PoissonBatches(n, rate, steps, noise=Banded(bands), seed=1)
    groups = batches.groups(0, n)
    taken = np.zeros((steps, n), dtype=bool)
    for step, batch in enumerate(batches):
        taken[step, batch.users] = True
        assert (groups[batch.users] == step % bands).all()
    for start in range(steps - bands + 1):
        assert taken[start : start + bands].sum(0).max() <= 1, "more than once in a row of bands"
    assert abs(taken.mean() - rate) < 4 * (rate / (n * steps)) ** 0.5 + 0.002
    assert abs(np.bincount(groups) - n / bands).max() < 5 * (n / bands) ** 0.5
    rounds = taken.reshape(-1, bands, n).any(1).mean(0)  # of each user, p = bands·q
    assert abs(rounds.mean() - 0.5) < 0.01 and abs(rounds.var() - 0.25 / 40) < 0.001
    np.testing.assert_array_equal(batches.groups(2, 10), groups[2:12])


def test_one_band_is_what_it_was() -> None:
    one, plain = (PoissonBatches(500, 0.1, 3, seed=1, **noise) for noise in ({"noise": noise_over(1)}, {}))
    assert all(torch.equal(*(batch.users for batch in pair)) for pair in zip(one, plain, strict=True))
    assert one.state_dict() == plain.state_dict()


def test_everybody_in_their_turn() -> None:
    batches = PoissonBatches(100, 0.25, 8, noise=Banded(4), seed=0)
    assert sorted(np.concatenate([batches.draw(step) for step in range(4)])) == list(range(100))


@given(st.integers(1, 12), st.integers(1, 60), st.floats(0.001, 1 / 12), st.floats(0.6, 5))
def test_the_price_is_that_of_rounds(bands: int, steps: int, rate: float, sigma: float) -> None:
    event = BandedGaussian(sigma, rate, steps, bands)
    rounds = -(-steps // bands)
    assert event.compositions == rounds and event.rate == pytest.approx(bands * rate)
    same = PoissonGaussian(sigma, event.rate, rounds)
    assert event.once() == same.once()
    assert Event.from_dict(event.to_dict()) == event


def test_the_price_in_numbers() -> None:
    banded_price = Ledger([BandedGaussian(2.0, 0.1, 81, 4)]).epsilon(1e-3)
    assert banded_price == Ledger([PoissonGaussian(2.0, 0.4, 21)]).epsilon(1e-3)
    sigma = calibrate(epsilon=10, delta=1 / 6040, sample_rate=512 / 6040, steps=236, noise=Banded(8))
    assert sigma == calibrate(epsilon=10, delta=1 / 6040, sample_rate=8 * (512 / 6040), steps=30)
    assert Ledger([BandedGaussian(sigma, 512 / 6040, 236, 8)]).epsilon(1 / 6040) <= 10


def test_runs_are_not_added_up_to_one() -> None:
    """Two runs of one step each may both hold a user: two compositions, where one run of two steps is one."""
    ledger = Ledger([BandedGaussian(2.0, 0.1, 1, 4), BandedGaussian(2.0, 0.1, 1, 4)])
    assert len(ledger) == 2 and sum(event.compositions for event in ledger) == 2


def test_a_resumed_optimizer_takes_back_what_the_other_added() -> None:
    p, private = optimizer(4)
    whole = released(p, private, 9, sampler(4))
    (p, private), batches, after = optimizer(4), sampler(4), sampler(4)
    first = released(p, private, 5, batches)
    again, other = optimizer(4)
    with torch.no_grad():
        again.copy_(p)
    other.load_state_dict(private.state_dict())
    after.load_state_dict(batches.state_dict())
    np.testing.assert_array_equal(np.concatenate([first, released(again, other, 4, after)]), whole)
    assert other.event() == BandedGaussian(1.0, 1e-9, 9, 4, label="training", private=False)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 groups of users at sample rate 0\.3 are 1\.2 of all users per step"):
        BandedGaussian(1.0, 0.3, 10, 4)
    with pytest.raises(ValueError, match=r"4 groups of users at sample rate 0\.3"):
        PoissonBatches(100, 0.3, 10, noise=Banded(4))
    with pytest.raises(ValueError, match=r"4 groups of users at sample rate 0\.3"):
        calibrate(epsilon=5, delta=1e-3, sample_rate=0.3, steps=10, noise=Banded(4))
    with pytest.raises(ValueError, match="bands is 2, but there is no noise"):
        optimizer(2, noise_multiplier=0.0)
    for other in (1, 4):
        with pytest.raises(
            ValueError, match=r"have noise correlated over 3 steps, but users were drawn for (indep|noise corr)"
        ):
            optimizer(3)[1].step(sampler(other).batch(0))
    with pytest.raises(ValueError, match="have independent noise, but users were drawn for noise correlated over 4"):
        optimizer(1)[1].step(sampler(4).batch(0))
    p, private = optimizer(3)
    released(p, private, 2)
    state = private.state_dict()
    with pytest.raises(ValueError, match="a private optimizer's state has the keys"):
        optimizer(1)[1].load_state_dict(state)
    with pytest.raises(ValueError, match="bands was 3 when this state was saved, now it is 4"):
        optimizer(4)[1].load_state_dict(state)
    bad = [[torch.full((4,), float("nan"))], state["past"][1]]
    with pytest.raises(ValueError, match="saved noise of past steps is not finite"):
        optimizer(3)[1].load_state_dict({**state, "past": bad})
    with pytest.raises(ValueError, match="does not have the same shapes in every step"):
        optimizer(3)[1].load_state_dict({**state, "past": [state["past"][0], [torch.zeros(1)]]})
    wide, other = optimizer(3)
    other.load_state_dict({**state, "past": [[torch.zeros(1)], [torch.zeros(1)]]})
    with pytest.raises(ValueError, match="with noise correlated over 3 steps the same parameters must be trained"):
        other.step()
    assert wide.grad is None and other.steps == 2, "nothing was released"
    with pytest.raises(ValueError, match="after 2 steps with noise correlated over 3 steps, noise of 1 steps"):
        optimizer(3)[1].load_state_dict({**state, "past": state["past"][:1]})
    private.zero_grad()
    private.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="with noise correlated over 3 steps the same parameters must be trained"):
        private.step()
    assert private.steps == 2 and len(private._past) == 2
    batches = PoissonBatches(100, 0.1, 10, noise=Banded(3))
    with pytest.raises(ValueError, match="bands was 3 when this state was saved, now it is 2"):
        PoissonBatches(100, 0.1, 10, noise=Banded(2)).load_state_dict(batches.state_dict())


def test_every_step_is_a_batch_and_every_batch_a_step() -> None:
    """A sampler an epoch, a batch that is skipped, a step without one: users of one group came closer than bands."""
    p, private = optimizer(3)
    batches = sampler(3, 4)
    for batch in batches:
        private.step(batch)
        p.grad = None
        assert private.event() == BandedGaussian(1.0, 1e-9, batches.step, 3, label="training", private=False)
    with pytest.raises(ValueError, match="one PoissonBatches must be used for all of training"):
        private.step(sampler(3, 5).batch(0))
    released(p, private, 1)
    with pytest.raises(ValueError, match="1 steps were taken without a batch, but noise correlated over 3 steps"):
        private.event()
    with pytest.raises(ValueError, match="1 steps were taken without a batch"):
        private.event(0.1)
    p, private = optimizer(3)
    released(p, private, 1)
    with pytest.raises(ValueError, match="one PoissonBatches must be used for all of training"):
        private.step(sampler(3).batch(0))


def test_several_parameters_each_take_back_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise made ahead on its thread, of all shapes: C·y is white for each of them, and for none another's."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((), (300, 4), (0, 3), (7,))]
    inner = torch.optim.SGD(parameters, lr=0.1)
    sizes = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 1.0}
    private = PrivateOptimizer(inner, **sizes, noise=Banded(4), seed=0)
    rows = []
    for _ in range(30):
        private.zero_grad()
        private.step()
        rows.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double())
    white = banded(4, 30) @ torch.stack(rows).numpy()
    np.testing.assert_allclose(white @ white.T / white.shape[1], np.eye(30), atol=9 / white.shape[1] ** 0.5)
    columns = np.corrcoef(white[:, :50].T)
    assert abs(columns - np.eye(50)).max() < 0.9


@pytest.mark.parametrize(
    "facts",
    [
        {"bands": 10**400},
        {"bands": 2**21, "sample_rate": 1e-9},
        {"steps": 10, "noise_multiplier": 10**400},
        {"kind": []},
        {"bands": 2.0},
    ],
)
def test_strange_events_are_one_sentence(facts: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as error:
        Event.from_dict({**BandedGaussian(1.0, 0.1, 9, 4).to_dict(), **facts})
    assert len(str(error.value)) < 600


def test_everybody_in_turn_is_a_plain_gaussian() -> None:
    """b·q = 1: no sampling is left to amplify, and four rounds of σ = 2 are one release of σ = 1."""
    assert Ledger([BandedGaussian(2.0, 0.25, 16, 4)]).epsilon(1e-3) == Ledger([Gaussian(1.0)]).epsilon(1e-3)
