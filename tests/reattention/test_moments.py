"""Every rule against sampling, over a grid that includes the extremes; nothing is ever NaN."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpformer.reattention import Gaussian, add, average, dropout, embedding, layer_norm, linear

SAMPLES = 200_000  # relative deviation of a sampled Gaussian variance: √(2/n) = 0.3%


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def draw(x: Gaussian, samples: int, seed: int) -> Tensor:
    """(samples, *mean.shape)"""
    return x.mean + x.var.sqrt() * normal(samples, *x.mean.shape, seed=seed)


def assert_moments(y: Gaussian, sampled: Tensor, relative: float = 0.02) -> None:
    var = sampled.var(0)
    scale = var.sqrt() + 1e-12
    assert ((y.mean - sampled.mean(0)).abs() / scale).max() < 0.02
    assert (y.var.expand_as(var) / var - 1).abs().max() < relative


@pytest.mark.parametrize("deviation", [1e-4, 0.1, 3.0])
@pytest.mark.parametrize("weight_deviation", [0.0, 0.01, 2.0])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_linear(deviation: float, weight_deviation: float, offset: float) -> None:
    x = Gaussian(normal(3) + offset, (deviation * (1 + torch.arange(3, dtype=torch.float64))).square())
    weight = Gaussian(normal(2, 3, seed=1), torch.tensor(weight_deviation**2, dtype=torch.float64))
    bias = Gaussian(normal(2, seed=2), torch.tensor([0.04, 0.0], dtype=torch.float64))
    w = draw(weight, SAMPLES, 3)
    y = (w @ draw(x, SAMPLES, 4)[..., None])[..., 0] + draw(bias, SAMPLES, 5)
    assert_moments(linear(x, weight, bias), y)


@given(st.data())
@settings(max_examples=30)
def test_linear_forms_agree(data: st.DataObject) -> None:
    """One variance for all coordinates, one for all weights, or each its own: the same numbers; bias optional."""
    rows, inputs, outputs = (data.draw(st.integers(1, 5)) for _ in range(3))
    v, w = normal(rows, 1, seed=1).square(), normal(seed=2).square()
    mean, matrix = normal(rows, inputs, seed=3), normal(outputs, inputs, seed=4)
    short = linear(Gaussian(mean, v), Gaussian(matrix, w))
    full = linear(Gaussian(mean, v.expand(rows, inputs).clone()), Gaussian(matrix, w.expand(outputs, inputs).clone()))
    by_hand = torch.zeros(rows, outputs, dtype=torch.float64)
    for b, k, j in itertools.product(range(rows), range(outputs), range(inputs)):
        by_hand[b, k] += v[b, 0] * w + v[b, 0] * matrix[k, j] ** 2 + w * mean[b, j] ** 2
    torch.testing.assert_close(short.var, by_hand)
    torch.testing.assert_close(full.var, by_hand)
    torch.testing.assert_close(short.mean, mean @ matrix.T)


@pytest.mark.parametrize(
    ("d", "equal", "each"), [(64, True, 0.04), (64, False, 0.24), (8, True, 0.22), (8, False, 0.43)]
)
@pytest.mark.parametrize("deviation", [0.01, 0.3, 1.0, 3.0, 30.0])
def test_layer_norm_within_its_stated_error(d: int, equal: bool, each: float, deviation: float) -> None:
    spread = torch.ones(d, dtype=torch.float64) if equal else normal(d, seed=7).square().clamp(0.1, 3)
    x = Gaussian(normal(d) + 5, deviation**2 * spread)
    y = layer_norm(x, *_affine(d, 0.0))
    sampled = torch.nn.functional.layer_norm(draw(x, 60_000, 8), (d,))
    ratio = y.var / sampled.var(0)
    assert (ratio - 1).abs().max() < each + 0.005
    assert abs(y.var.sum() / sampled.var(0).sum() - 1) < (0.011 if d == 64 else 0.092)
    assert (y.mean - sampled.mean(0)).abs().max() < (0.024 if d == 64 else 0.11)


def test_layer_norm_with_uncertain_weights() -> None:
    x = Gaussian(normal(64), torch.tensor(0.01, dtype=torch.float64))
    weight, bias = _affine(64, 0.3)
    y = layer_norm(x, weight, bias)
    sampled = torch.nn.functional.layer_norm(draw(x, 60_000, 9), (64,))
    assert_moments(y, sampled * draw(weight, 60_000, 10) + draw(bias, 60_000, 11), relative=0.06)


def _affine(d: int, deviation: float) -> tuple[Gaussian, Gaussian]:
    var = torch.tensor(deviation**2, dtype=torch.float64)
    return Gaussian(torch.ones(d, dtype=torch.float64), var), Gaussian(torch.zeros(d, dtype=torch.float64), var)


def test_add() -> None:
    x, y = (Gaussian(normal(4, seed=s), normal(4, seed=s + 1).square()) for s in (0, 2))
    assert_moments(add(x, y), draw(x, SAMPLES, 4) + draw(y, SAMPLES, 5))


def test_average_at_fixed_weights() -> None:
    weights = torch.softmax(2 * normal(3, 5), -1)
    values = Gaussian(normal(5, 2, seed=1), normal(5, 2, seed=2).square())
    assert_moments(average(weights, values), weights @ draw(values, SAMPLES, 3))


@pytest.mark.parametrize(("deviation", "low"), [(0.1, 0.006), (0.3, 0.06), (1.0, 0.38)])
def test_average_with_noisy_keys_within_its_stated_error(deviation: float, low: float) -> None:
    """Noisy scores move S too; the values are as noisy as their means are spread."""
    scores = Gaussian(normal(1, 8), torch.tensor(deviation**2, dtype=torch.float64))
    values = Gaussian(normal(8, 8, seed=1), torch.tensor(1.0, dtype=torch.float64))
    weights = torch.softmax(draw(scores, 100_000, 2), -1)
    sampled = (weights @ draw(values, 100_000, 3)).var(0)
    ratio = average(torch.softmax(scores.mean, -1), values).var / sampled
    assert ratio.mean() == pytest.approx(1 - low, abs=0.01)


def test_embedding_plus_position() -> None:
    items = torch.tensor([[2, 0, 2]])
    table = Gaussian(normal(3, 4), torch.tensor([[0.5], [0.1], [2.0]], dtype=torch.float64))
    positions = Gaussian(normal(5, 4, seed=1), torch.tensor(0.09, dtype=torch.float64))
    y = embedding(items, table, positions, scale=2.0)
    rows, places = draw(table, SAMPLES, 2), draw(positions, SAMPLES, 3)
    assert_moments(y, 2 * rows[:, items] + places[:, :3][:, None])
    per_row = Gaussian(positions.mean, torch.full((5, 1), 0.09, dtype=torch.float64))
    torch.testing.assert_close(embedding(items, table, per_row, scale=2.0).var, y.var)


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5])
def test_dropout(rate: float) -> None:
    x = Gaussian(normal(4), normal(4, seed=1).square())
    assert_moments(dropout(x, rate), torch.nn.functional.dropout(draw(x, SAMPLES, 2), rate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("var", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("mean", [0.0, -3.0, 1e4])
def test_extremes_are_finite_and_zero_stays_zero(dtype: torch.dtype, var: float, mean: float) -> None:
    x = Gaussian(torch.full((2, 4), mean, dtype=dtype), torch.full((2, 4), var, dtype=dtype))
    zero = torch.zeros((), dtype=dtype)
    one = Gaussian(torch.ones(4, dtype=dtype), zero)
    outputs = [
        linear(x, Gaussian(torch.ones(3, 4, dtype=dtype), zero)),
        layer_norm(x, one, one),
        add(x, x),
        average(torch.full((2, 2), 0.5, dtype=dtype), x),
    ]
    for y in outputs:
        assert y.mean.isfinite().all() and y.var.isfinite().all() and (y.var >= 0).all()
        assert y.var.dtype == dtype
        if var == 0:
            assert not y.var.any()


def test_a_known_mean_is_used_as_it_is() -> None:
    x, known = Gaussian(normal(2, 3), torch.tensor(0.1, dtype=torch.float64)), normal(2, 3, seed=9)
    assert layer_norm(x, *_affine(3, 0.1), mean=known).mean is known
    assert linear(x, Gaussian(normal(3, 3), torch.tensor(math.e)), mean=known).mean is known
