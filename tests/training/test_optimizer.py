"""The noisy step: the formula, the noise, once per logical step; resume; refusals; schedulers."""

import copy
import io
import math
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from dpformer.accounting import Gaussian, Ledger, PoissonGaussian
from dpformer.accounting.events import ASSUMED_ONCE, ASSUMED_RATE
from dpformer.clipping import PhantomClipping, normalize
from dpformer.noise import SecureRandom
from dpformer.noise.fingerprint import Fingerprint
from dpformer.noise.mechanisms import Banded
from dpformer.noise.noisy_sums import in_turn
from dpformer.noise.randomness import public_grid
from dpformer.sampling import PoissonBatches
from dpformer.training import PrivateOptimizer

KEY = bytes(range(32))


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def private(
    weights: list[nn.Parameter], inner: type = torch.optim.SGD, lr: float = 1.0, **options: object
) -> PrivateOptimizer:
    settings = {"noise_multiplier": 2.0, "clip_norm": 0.5, "expected_batch_size": 10.5, "key": KEY}
    settings |= {"assume_clipped": True} | options  # gradients come from nowhere here; tests/clipping has the marks
    if "seed" in options:
        del settings["key"]
    return PrivateOptimizer(inner(weights, lr=lr), **settings)  # type: ignore[arg-type]


def released(weights: list[nn.Parameter], gradients: list[Tensor | None], **options: object) -> list[Tensor]:
    """What a step hands to the inner optimizer."""
    optimizer = private(weights, **options)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = None if gradient is None else gradient.clone()
    optimizer.step()
    return [weight.grad.clone() for weight in weights]  # type: ignore[union-attr]


def total_noise(count: int, **options: object) -> Tensor:
    """The noise on a sum of zeros, times B: what was added, over `count` coordinates."""
    b = options.get("expected_batch_size", 10.5)
    return released([nn.Parameter(torch.zeros(count))], [None], **options)[0].double() * b


# The formula.


def test_formula_against_a_naive_twin() -> None:
    """(g + σC·z) / B in float64, rounded to the public grid; z of the weights' address, one after the other."""
    weights, gradients = parameters((3, 4), (5,), dtype=torch.float64), parameters((3, 4), (5,), dtype=torch.float64)
    optimizer = private(weights)
    random = optimizer._random.within(Fingerprint(optimizer._random)(weights))
    wanted = []
    for start, gradient in zip((0, 12), gradients, strict=True):
        noise = torch.from_numpy(random.normal(gradient.numel(), step=0, start=start)).view(gradient.shape)
        grid = public_grid(1.0)
        wanted.append(torch.round((gradient.detach() + 2.0 * 0.5 * noise) / grid) * grid / 10.5)
    got = released(weights, [gradient.detach() for gradient in gradients])
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-14, atol=0)


def test_the_inner_optimizer_sees_the_noisy_mean() -> None:
    (weight,) = parameters((4,))
    before = weight.detach().clone()
    (gradient,) = released([weight], [torch.ones(4)])
    torch.testing.assert_close(weight.detach(), before - gradient)  # SGD at rate 1


@pytest.mark.parametrize("batch", [1.0, 7.25, 1024 / 3, 0.5])
def test_divides_by_the_expected_batch_size_as_it_is(batch: float) -> None:
    """Never floored, never the realised size (which nothing here even knows)."""
    (gradient,) = released(parameters((3,)), [torch.full((3,), 8.0)], noise_multiplier=0.0, expected_batch_size=batch)
    torch.testing.assert_close(gradient, torch.full((3,), 8.0 / batch))


def test_two_backwards_before_a_step_accumulate() -> None:
    """Nothing is dropped, and the noise is added once, however many parts a batch has."""
    parts = [torch.full((50_000,), value) for value in (1.0, 2.0, 4.0)]
    weight = nn.Parameter(torch.zeros(50_000))
    for part in parts:
        (weight * part).sum().backward()
    optimizer = private([weight])
    optimizer.step()
    total = weight.grad.double() * 10.5  # type: ignore[union-attr]
    assert float(total.mean()) == pytest.approx(7.0, abs=0.03)
    assert float(total.std()) == pytest.approx(1.0, rel=0.02)


# The noise.


def test_noise_has_deviation_sigma_times_clip_norm_on_the_sum() -> None:
    """Noise × 0.9, noise on the mean, noise per part, a forgotten clip norm: all caught."""
    for sigma, c, b in ((2.0, 0.5, 10.5), (1.3, 4.0, 256.0), (0.7, 1.0, 1.0)):
        noise = total_noise(200_000, noise_multiplier=sigma, clip_norm=c, expected_batch_size=b).numpy()
        assert noise.std() == pytest.approx(sigma * c, rel=0.01)
        assert abs(noise.mean()) < 0.02 * sigma * c
        assert stats.kstest(noise / (sigma * c), "norm").pvalue > 1e-3


def test_noise_is_fresh_in_every_step_and_parameter() -> None:
    """Reused noise passes tests of its deviation; correlation between steps shows it."""
    weights = [nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(20_000))]
    optimizer = private(weights, lr=0.0)  # the weights stay: the step alone must change the noise
    series = []
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.step()
        series += [weight.grad.double().numpy() for weight in weights]  # type: ignore[union-attr]
    correlations = np.corrcoef(series)[np.triu_indices(8, 1)] * math.sqrt(20_000)
    assert np.abs(correlations).max() < 4.5
    for one in series:
        assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) * math.sqrt(20_000) < 4


def test_parameters_without_a_gradient_get_noise() -> None:
    """An empty batch is a step of pure noise, counted; and a parameter no user touched is as noisy as any."""
    weights = parameters((20_000,), (20_000,))
    optimizer = private(weights)
    weights[0].grad = torch.zeros(20_000)
    optimizer.step()
    for weight in weights:
        assert float(weight.grad.std()) * 10.5 == pytest.approx(1.0, rel=0.03)  # type: ignore[union-attr]
    optimizer.zero_grad()
    before = [weight.detach().clone() for weight in weights]
    optimizer.step()
    assert optimizer.steps == 2
    assert all(not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_frozen_parameters_stay_unless_they_have_a_gradient() -> None:
    weights = parameters((100,), (100,), (100,))
    weights[1].requires_grad_(False)
    weights[2].grad = torch.zeros(100)
    weights[2].requires_grad_(False)  # frozen after backward: torch would still move it
    before = weights[1].detach().clone()
    private(weights).step()
    assert weights[1].grad is None and torch.equal(weights[1], before)
    assert float(weights[2].grad.std()) > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(20_000, dtype=dtype))
    (gradient,) = released([weight], [torch.full((20_000,), 3.0, dtype=dtype)])
    assert gradient.dtype == dtype
    assert float(gradient.double().mean()) * 10.5 == pytest.approx(3.0, abs=0.05)
    assert float(gradient.double().std()) * 10.5 == pytest.approx(1.0, rel=0.03)


def test_released_sums_lie_on_a_public_grid() -> None:
    """No last bits from which to tell the summand, not even where sum and noise nearly cancel."""
    gradient = torch.randn(10_000, dtype=torch.float64) * 3
    (mean,) = released([nn.Parameter(torch.zeros(10_000, dtype=torch.float64))], [gradient], expected_batch_size=1.0)
    cells = mean / public_grid(1.0)
    assert torch.equal(cells, cells.round())
    # ... without a bias
    assert float((mean - gradient).mean()) == pytest.approx(0, abs=0.05)


# Once per instance, exactly again on resume.


def run(optimizer: PrivateOptimizer, weights: list[nn.Parameter], steps: int, data: float = 1.0) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for weight in weights:
            weight.grad = data * weight.detach().sin()
        optimizer.step()


@pytest.mark.parametrize("inner", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("seed", [None, 3])
def test_resume_is_exact_through_a_file(inner: type, seed: int | None) -> None:
    whole = parameters((30,), (4, 5))
    optimizer = (
        private(whole, inner, lr=0.1, key=None, seed=seed) if seed is None else private(whole, inner, lr=0.1, seed=seed)
    )
    run(optimizer, whole, 3)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weights": whole}, file)
    run(optimizer, whole, 4)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(weight.detach().clone()) for weight in saved["weights"]]
    resumed = private(again, inner, lr=0.1, key=None)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.steps == 3 and resumed.private == (seed is None)  # no step is lost, nor the mark
    run(resumed, again, 4)
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one, other)
    assert resumed.steps == optimizer.steps == 7


def noise_after(total: Tensor | None = None, at: float = 0.0, **options: object) -> np.ndarray:
    """The third step's noise (times B) on a sum, at some weights, resumed from the same two steps."""
    weights = [nn.Parameter(torch.zeros(5000))]
    optimizer = private(weights)
    for _ in range(2):
        optimizer.step()
    again = [nn.Parameter(weights[0].detach().clone() + at)]
    resumed = private(again, **options)
    resumed.load_state_dict(optimizer.state_dict())
    resumed.zero_grad()
    total = torch.zeros(5000) if total is None else total
    again[0].grad = total.clone()
    resumed.step()
    return (again[0].grad.double() * 10.5 - total).numpy()


def test_no_noise_is_on_two_sums() -> None:
    """Noise used twice with other data can be subtracted: of another sum, were it one bit, there is other noise."""
    total = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    one_bit = total.clone()
    one_bit.view(torch.int32)[4999] ^= 1
    same = noise_after(total)
    np.testing.assert_array_equal(same, noise_after(total, at=1e-3))  # the same release once more tells nothing new
    changed = {
        "sum": noise_after(one_bit),
        "no user": noise_after(),
        "context": noise_after(total, context="other data"),
        "rate": noise_after(total, lr=0.5),
    }
    for name, noise in changed.items():
        assert abs(np.corrcoef(same, noise)[0, 1]) * math.sqrt(5000) < 4, name


def test_a_user_who_is_deleted_before_a_resume_does_not_show() -> None:
    """One state, continued with a user and without: the two models differed by that user's gradient, and no noise."""
    torch.manual_seed(0)
    data, models = torch.randn(20, 500), []
    for left in (slice(0, 20), slice(1, 20)):
        model = nn.Linear(500, 1, bias=False)
        nn.init.zeros_(model.weight)
        clipping = PhantomClipping(model)
        optimizer = private([model.weight], assume_clipped=False, expected_batch_size=1.0)
        with clipping.users(data[left]) as user:
            loss = model(user).sum(1)
        clipping.backward(loss, normalize(0.5))
        optimizer.step()
        models.append(-model.weight.detach()[0])
    user = nn.functional.normalize(data[0], dim=0)
    seen = float((models[0] - models[1]) @ user) / 0.5  # was 1 to seven digits
    assert abs(seen - 1) > 0.01
    rest = models[0] - models[1] - 0.5 * user
    assert float(rest.std()) == pytest.approx(2**0.5, rel=0.15), "two independent noises of deviation σC = 1"


def test_a_restart_has_other_noise() -> None:
    found = np.corrcoef(total_noise(5000, key=None), total_noise(5000, key=None))[0, 1]
    assert abs(found) * math.sqrt(5000) < 6  # of two fresh keys: five are passed once in a million times
    assert torch.equal(total_noise(50), total_noise(50))  # shared key: processes that step alike


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_step_after_a_fork() -> None:
    weights = [nn.Parameter(torch.zeros(500_000))]
    optimizer = private(weights)
    optimizer.step()
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0 if optimizer.steps == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_copies_are_refused() -> None:
    optimizer = private(parameters((2,)))
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="noise twice"):
            copying(optimizer)  # type: ignore[operator]


@pytest.mark.parametrize("change", [{"noise_multiplier": 1.0}, {"clip_norm": 1.0}, {"expected_batch_size": 10.0}])
def test_a_state_of_another_mechanism_is_refused(change: dict) -> None:
    optimizer, other = private(parameters((2,))), private(parameters((2,)), **change)
    with pytest.raises(ValueError, match=next(iter(change))):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="keys"):
        optimizer.load_state_dict(optimizer.inner.state_dict())


def test_a_release_counts_even_if_the_inner_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = parameters((2,))
    optimizer = private(weights)

    def fail() -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(optimizer.inner, "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert optimizer.steps == 1  # the gradient has been seen with its noise, which must not come again


# What it tells.


def test_steps_go_into_a_ledger() -> None:
    weights = parameters((2,))
    optimizer = private(weights, assume_clipped=False)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.event() == Gaussian(2.0, 3, label=f"training ({ASSUMED_ONCE})")
    assert optimizer.event(0.1) == PoissonGaussian(2.0, 0.1, 3, label=f"training ({ASSUMED_RATE})")
    batches = PoissonBatches(10, 1e-9, 9)
    for batch in batches:
        optimizer.step(batch)
        optimizer.zero_grad()
    sampled = PoissonGaussian(2.0, 1e-9, 9, label="training")
    assert optimizer.events() == (sampled, Gaussian(2.0, 3, label=f"training ({ASSUMED_ONCE})"))
    with pytest.raises(ValueError, match="12 steps are 2 events, not one"):
        optimizer.event()
    seeded = private(parameters((2,)))
    seeded.step(PoissonBatches(10, 1e-9, 9, seed=0).batch(0))
    assert not seeded.event().private


def test_what_is_not_private_says_so() -> None:
    seeded, without = private(parameters((2,)), seed=1), private(parameters((2,)), noise_multiplier=0.0)
    for optimizer in (seeded, without):
        assert not optimizer.private and "NOT private" in optimizer.description
        optimizer.step()
        assert not optimizer.event().private and not Ledger(optimizer.events()).private
    assert private(parameters((2,))).private
    assert Ledger(without.events()).epsilon(1e-5) == math.inf


def test_without_noise_it_is_the_plain_mean() -> None:
    (gradient,) = released(parameters((3,)), [torch.tensor([1.0, 2.0, 4.0])], noise_multiplier=0.0)
    torch.testing.assert_close(gradient, torch.tensor([1.0, 2.0, 4.0]) / 10.5)


# Refusals.


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(value: float) -> None:
    weights = parameters((3,), (2, 2))
    optimizer = private(weights)
    weights[0].grad = torch.ones(3)
    weights[1].grad = torch.tensor([[1.0, value], [0.0, 0.0]])
    before = [weight.detach().clone() for weight in weights]
    with pytest.raises(ValueError, match=r"\(2, 2\) is not finite"):
        optimizer.step()
    assert optimizer.steps == 0 and torch.equal(weights[0].grad, torch.ones(3))
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


@pytest.mark.parametrize("bands", [1, 3])
def test_complex_parameters(bands: int) -> None:
    """Noise of σC on both parts of each number: a complex parameter is a real one of twice the size."""
    shape, gradient = (40, 50), torch.randn(40, 50, dtype=torch.complex64)
    noise = {} if bands == 1 else {"noise": Banded(bands)}
    (found,) = released([nn.Parameter(torch.zeros(shape, dtype=torch.complex64))], [gradient.clone()], **noise)
    assert found.dtype == torch.complex64
    added = torch.view_as_real(found * 10.5 - gradient).double()  # B
    parts = added.flatten(0, 1).T  # (2, n): real and imaginary
    if bands == 1:  # σC = 1
        assert torch.allclose(parts.std(1), torch.ones(2, dtype=torch.float64), rtol=0.08)
    assert abs(float(torch.corrcoef(parts)[0, 1])) < 0.1
    twin = nn.Parameter(torch.zeros(*shape, 2))
    (as_real,) = released([twin], [torch.view_as_real(gradient).clone()], **noise)
    torch.testing.assert_close(torch.view_as_real(found), as_real)


def test_closures_and_double_noise_are_refused() -> None:
    optimizer = private(parameters((2,)))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="already private"):
        PrivateOptimizer(optimizer, noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=1.0)


@pytest.mark.parametrize(
    "bad",
    [
        *[{"noise_multiplier": value} for value in (-1.0, math.nan, math.inf, None)],
        *[{"clip_norm": value} for value in (0.0, -1.0, math.nan, math.inf)],
        *[{"expected_batch_size": value} for value in (0, -1.0, math.nan, math.inf)],
    ],
)
def test_bad_values_are_refused_by_name(bad: dict) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(bad))}.*{next(iter(bad.values()))}"):
        private(parameters((2,)), **bad)


def test_sparse_gradients_are_refused() -> None:
    """Which rows they hold says which items the users have; the noise must be on all rows."""
    embedding = nn.Embedding(50, 8, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        private([embedding.weight]).step()


# An optimizer in all else.


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
    ],
)
@pytest.mark.filterwarnings("error")
def test_schedulers_work_on_it(schedule: object) -> None:
    """The same rates as on the bare optimizer, in effect on the weights, with no complaint about the order of calls."""
    plain_weights, weights = parameters((3,)), parameters((3,))
    plain = torch.optim.Adam(plain_weights, lr=0.05)
    optimizer = private(weights, torch.optim.Adam, lr=0.05, noise_multiplier=0.0, expected_batch_size=1.0)
    schedulers = [schedule(plain), schedule(optimizer)]  # type: ignore[operator]
    for _ in range(4):
        for weight in (plain_weights[0], weights[0]):
            weight.grad = torch.ones(3)
        plain.step()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        torch.testing.assert_close(plain_weights[0], weights[0])


def test_groups_state_and_hooks_are_the_inner_ones() -> None:
    weights = parameters((2,), (3,))
    optimizer = private(weights[:1], torch.optim.Adam, lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.add_param_group({"params": weights[1:], "lr": 0.2})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    calls = []
    optimizer.register_step_post_hook(lambda *arguments: calls.append(1))
    optimizer.step()
    assert calls == [1]
    assert optimizer.state is optimizer.inner.state and len(optimizer.state) == 2
    optimizer.zero_grad()
    assert weights[0].grad is None
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(weights[0].grad, torch.zeros(2))
    assert "noise_multiplier=2" in repr(optimizer) and "Adam" in repr(optimizer)
    with pytest.raises(AttributeError, match="no_such"):
        optimizer.no_such  # noqa: B018


def test_state_keys_are_pinned() -> None:
    state = private(parameters((2,))).state_dict()
    settings = {"noise_multiplier", "clip_norm", "expected_batch_size"}
    assert set(state) == {"inner", *settings, "steps", "sampled", "unsampled", "random", "addressing"}
    assert set(state["random"]) == set(SecureRandom().state_dict()) == {"key", "private"}


def test_many_small_sums_are_one_long_one() -> None:
    """In float32, small parameters and one that has a piece of its own: the numbers of one stream, none twice."""
    shapes = [(3, 4), (5,), (1,), (700,), (300, 1000), (600,)]
    weights, gradients = parameters(*shapes), parameters(*shapes)
    optimizer = private(weights)
    random = optimizer._random.within(Fingerprint(optimizer._random)([one.detach() for one in gradients]))
    noise = torch.from_numpy(random.normal(sum(weight.numel() for weight in weights), step=0))
    sums = torch.cat([gradient.detach().flatten() for gradient in gradients]).double()
    grid = public_grid(1.0)
    wanted = torch.round((sums + 2.0 * 0.5 * noise) / grid) * grid / 10.5
    got = torch.cat([one.flatten() for one in released(weights, [gradient.detach() for gradient in gradients])])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("change", [lambda state: state.pop("addressing"), lambda state: state.update(addressing=2)])
def test_a_state_of_a_version_with_other_noise_is_refused(change: Callable[[dict[str, Any]], Any]) -> None:
    """A step taken again must have its noise again."""
    state = private(parameters((3,))).state_dict()
    change(state)
    with pytest.raises(ValueError, match="another version"):
        private(parameters((3,))).load_state_dict(state)


def test_an_expanded_gradient() -> None:
    """One place in memory for many numbers: the step ended in an error after other sums had been released."""
    (got,) = released(parameters((3, 4)), [torch.ones(4).expand(3, 4)], noise_multiplier=0.0)
    torch.testing.assert_close(got, torch.full((3, 4), 1 / 10.5))
    weights = parameters((5,), (3, 4))
    optimizer = private(weights)
    weights[0].grad, weights[1].grad = torch.ones(5), torch.ones(1).expand(3, 4)
    optimizer.step()
    assert optimizer.steps == 1 and len(set(weights[1].grad.flatten().tolist())) == 12  # type: ignore[union-attr]


def test_sums_beyond_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is used twice where a stream ends."""
    monkeypatch.setattr("dpformer.noise.noisy_sums.MOST_NUMBERS", 1000)
    places = [(n.stream, n.start) for n in in_turn(SecureRandom(seed=0), 0, [600, 400, 1, 999, 5])]
    assert places == [(0, 0), (0, 600), (1, 0), (1, 1), (2, 0)]
