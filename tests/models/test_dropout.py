"""Our dropout: its rate, its mean, its independence, and that it does what torch's does."""

import math

import pytest
import torch
from torch import nn

from dpformer.models.dropout import Dropout, scaled_mask


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.9])
def test_rate_and_mean(p: float) -> None:
    torch.manual_seed(0)
    mask = scaled_mask(torch.empty(1000, 1003, dtype=torch.float64), p)
    n = mask.numel()
    zeros = float((mask == 0).double().mean())
    assert abs(zeros - p) < 5 * math.sqrt(p * (1 - p) / n) + 2**-16
    assert abs(float(mask.mean()) - 1) < 5 * float(mask.std()) / math.sqrt(n)
    assert mask.unique().numel() == 2


def test_elements_are_independent() -> None:
    """Also those of one 64-bit number, which are neighbours."""
    torch.manual_seed(1)
    mask = scaled_mask(torch.empty(4_000_000), 0.3).double() - 1
    for lag in (1, 2, 3, 4, 8):
        correlation = float((mask[:-lag] * mask[lag:]).mean() / mask.square().mean())
        assert abs(correlation) < 5 / math.sqrt(len(mask))
    for lane in range(4):
        assert abs(float((mask[lane::4] == -1).double().mean()) - 0.3) < 5 * math.sqrt(0.21 / 1e6) + 2**-16


def test_as_a_layer() -> None:
    layer, x = Dropout(0.25), torch.randn(7, 5, 3, requires_grad=True)
    assert isinstance(layer, nn.Dropout)
    torch.manual_seed(2)
    y = layer(x)
    torch.manual_seed(2)
    assert torch.equal(layer(x), y), "the seed fixes the mask"
    assert not torch.equal(layer(x), y)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad * x, y), "linear: the gradient is the mask"
    assert layer.eval()(x) is x
    assert Dropout(0.0)(x) is x
