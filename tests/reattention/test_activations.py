"""ReLU and GELU moments: against sampling, against quadrature (the naive twin), against the paper's table."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwAD
from scipy.special import ndtr
from torch.fx.experimental.proxy_tensor import make_fx

from dpformer.kernels import native
from dpformer.reattention import Gaussian, compiled, gelu, relu

RULES = {
    "relu": (relu, lambda x: np.maximum(x, 0)),
    "gelu": (gelu, lambda x: x * ndtr(x)),
}
DEVIATIONS = [1e-6, 1e-3, 0.01, 0.1, 1.0, 3.0, 10.0, 1e3]


def by_quadrature(function: Callable, mean: float, deviation: float) -> tuple[float, float]:
    """Mean and variance of function(N(mean, deviation²)) by 60-point Gauss rules between the places where it bends."""
    bends = (np.array([-8, -3, -1, 0, 1, 3, 8]) - mean) / deviation
    edges = np.unique(np.clip([*np.arange(-12, 13, 2), *bends], -12, 12))
    node, weight = np.polynomial.legendre.leggauss(60)
    half = np.diff(edges)[:, None] / 2
    z = edges[:-1, None] + half * (1 + node)
    w = half * weight * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    y = function(mean + deviation * z) - function(mean)  # differences: a nearly constant function keeps its digits
    shift = (w * y).sum()
    return function(mean) + shift, (w * (y - shift) ** 2).sum()


def moments(rule: Callable, mean: float, deviation: float, dtype: torch.dtype) -> tuple[float, float]:
    y = rule(Gaussian(torch.tensor([mean], dtype=dtype), torch.tensor([deviation**2], dtype=dtype)))
    return y.mean.item(), y.var.item()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("deviation", DEVIATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_quadrature(name: str, deviation: float, dtype: torch.dtype) -> None:
    rule, function = RULES[name]
    for mean in [0.0, 1.0, 3.0, -1.0, -0.75, -2.5, 30.0, *(deviation * np.array([-3, -1, -0.3, 0.5, 2, 8]))]:
        if mean < -3 * max(deviation, 1):  # what is left of the tail is below float32's reach
            continue
        if name == "relu" and mean < -4 * deviation:
            continue
        want_mean, want_var = by_quadrature(function, mean, deviation)
        got_mean, got_var = moments(rule, mean, deviation, dtype)
        assert got_var == pytest.approx(want_var, rel=0.02 if dtype == torch.float32 else 2e-4), (mean, deviation)
        assert got_mean == pytest.approx(want_mean, rel=1e-5, abs=1e-5 * deviation), (mean, deviation)


@pytest.mark.parametrize("name", RULES)
def test_against_sampling(name: str) -> None:
    rule, function = RULES[name]
    z = np.random.default_rng(0).standard_normal(400_000)
    for deviation in [1e-3, 0.1, 1.0, 20.0]:
        for mean in [0.0, 0.5, 4.0, -deviation, 5 * deviation]:
            if name == "relu" and mean < -2 * deviation:
                continue
            sampled = function(mean + deviation * z)
            got_mean, got_var = moments(rule, mean, deviation, torch.float64)
            assert got_var == pytest.approx(sampled.var(), rel=0.02), (mean, deviation)
            assert abs(got_mean - sampled.mean()) < 0.01 * sampled.std()


def test_the_papers_table() -> None:
    """N(0, 0.01) etc. are deviations; the analytic ReLU column, and GELU's own, which the paper only sampled."""
    for deviation, for_relu, for_gelu in [(0.01, 3.40e-5, 2.50e-5), (0.1, 0.0034, 0.0025), (1.0, 0.3408, 0.3456)]:
        assert moments(relu, 0.0, deviation, torch.float64)[1] == pytest.approx(for_relu, rel=0.005)
        assert moments(gelu, 0.0, deviation, torch.float64)[1] == pytest.approx(for_gelu, rel=0.02)
    x = Gaussian(torch.zeros(1), torch.full((1,), 0.01))
    assert torch.equal(gelu(x, approximation="relu").var, relu(x).var)
    with pytest.raises(ValueError, match="approximation is 'tanh'"):
        gelu(x, approximation="tanh")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes(name: str, dtype: torch.dtype) -> None:
    rule, function = RULES[name]
    mean = torch.tensor([0.0, 1e-30, -1e-30, 5.0, -5.0, 1e15, -1e15], dtype=dtype)
    for var in [0.0, 1e-38, 1e-12, 1.0, 1e12, 1e36]:
        y = rule(Gaussian(mean, torch.full_like(mean, var)))
        assert y.mean.isfinite().all() and y.var.isfinite().all() and (y.var >= 0).all()
        assert y.var.dtype == dtype
        if var == 0:
            assert not y.var.any()
            np.testing.assert_allclose(y.mean.numpy(), function(mean.numpy().astype(float)), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(native.kernels is None, reason="nothing was compiled")
def test_compiled_relu_against_its_twin_in_float64() -> None:
    """Means from nothing to a thousand deviations away, whatever the variance, and what is not a number."""
    mean = torch.cat([torch.randn(20_000) * size for size in (1e-3, 0.1, 1.0, 10.0, 1000.0)])
    var = torch.rand(100_000) ** 8 * torch.tensor([1e-12, 1e-6, 1e-3, 1.0, 100.0]).repeat(20_000) + 1e-30
    assert compiled.can_read(Gaussian(mean, var)) and not compiled.can_read(
        Gaussian(mean.clone().requires_grad_(), var)
    )
    exact = relu(Gaussian(mean.double(), var.double()), mean=mean).var
    error = (relu(Gaussian(mean, var), mean=mean).var - exact).abs() / var
    assert float(error.max()) < 4e-6  # a few roundings of a mean that is some deviations away
    assert float(error[mean.abs() < 2 * var.sqrt()].max()) < 1e-6
    broad = relu(Gaussian(mean.view(-1, 10), var[:10_000, None]), mean=mean.view(-1, 10)).var
    assert torch.equal(broad[:, 3], relu(Gaussian(mean[3::10], var[:10_000]), mean=mean[3::10]).var)
    nan, inf = float("nan"), float("inf")
    odd = Gaussian(
        torch.tensor([0.0, nan, inf, -inf, 0.0, 1.0, -1.0, 1.0]), torch.tensor([0.0, 1, 1, 1, nan, 0, 0, inf])
    )
    found = relu(odd, mean=odd.mean).var
    torch.testing.assert_close(
        found, torch.tensor([0.0, nan, 1, 0, nan, 0, 0, inf]), equal_nan=True, rtol=0, atol=1e-30
    )


def test_whoever_follows_torch_sees_all_of_a_relu() -> None:
    """Traced, or with a tangent: compiled code would leave a hole."""
    mean, var = torch.randn(4, 3), torch.rand(3)
    expected = relu(Gaussian(mean, var), mean=mean).var

    def variance(m: torch.Tensor) -> torch.Tensor:
        return relu(Gaussian(m, var), mean=m).var

    for traced in (torch.jit.trace(variance, (mean,)), make_fx(variance)(mean)):
        torch.testing.assert_close(traced(mean), expected)
    with fwAD.dual_level():
        assert fwAD.unpack_dual(variance(fwAD.make_dual(mean, torch.ones_like(mean)))).tangent is not None


def test_means_that_are_broadcast() -> None:
    mean, var = torch.randn(3), torch.rand(4, 3) + 0.1
    found = relu(Gaussian(mean, var), mean=mean).var
    torch.testing.assert_close(found, relu(Gaussian(mean.expand(4, 3).double(), var.double())).var.float())
    assert relu(Gaussian(torch.tensor([-3e38]), torch.tensor([3e38])), mean=mean).var.item() == 0
