"""QLoRA: a frozen base of 4 or 8 bits with trainable adapters is exact, however the quantised weight is kept."""

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from tests.clipping import naive

SIZE, USERS = 6, 5


@dataclass
class Scales:
    """What is needed to read a quantised weight."""

    each: Tensor
    of_scales: "Scales | None" = None  # scales may be quantised too

    def read(self, codes: Tensor) -> Tensor:
        each = self.each if self.of_scales is None else self.of_scales.read(self.each)
        return codes.to(torch.float64) * each


def quantised(weight: Tensor, bits: int) -> tuple[Tensor, Scales]:
    most = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(1, keepdim=True) / most
    return (weight / scale).round().to(torch.int8), Scales(
        (scale * 1e6).round().to(torch.int32), Scales(torch.tensor(1e-6))
    )


class InBuffers(nn.Module):
    """As torchao, and as one would write it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        codes, scales = quantised(weight, 8)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales.each * 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scales)


class Matmul(torch.autograd.Function):
    """As bitsandbytes: nothing says that it can be batched."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        return x @ weight.scales.read(weight.data).T  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ ctx.weight.scales.read(ctx.weight.data), None


class OnTheParameter(nn.Module):
    """As bitsandbytes: scales in an object that is an attribute of the parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        codes, scales = quantised(weight, 4)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight.scales = scales  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return Matmul.apply(x, self.weight)  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen base and a trainable product of low rank."""

    def __init__(self, base: type[nn.Module]) -> None:
        super().__init__()
        self.base = base(torch.randn(SIZE, SIZE, dtype=torch.float64))
        self.first, self.last = nn.Linear(SIZE, 2, bias=False), nn.Linear(2, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.last(self.first(x))


class Model(nn.Module):
    """Two such layers; the loss of each user."""

    def __init__(self, base: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(Adapted(base), nn.GELU(), Adapted(base)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean((1, 2))


@pytest.mark.parametrize("base, one_at_a_time", [(InBuffers, False), (OnTheParameter, True)])
def test_adapters_of_a_quantised_base_are_exact(base: type[nn.Module], one_at_a_time: bool) -> None:
    torch.manual_seed(0)
    model, data = Model(base), torch.randn(USERS, 3, SIZE, dtype=torch.float64)
    gradients = naive.one_at_a_time(model, (data,))
    expected = naive.norms_of(gradients)
    clip = dp.clip(float(expected.median()))
    clipping = dp.PhantomClipping(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is slow
        norms = clipping.accumulate(lambda user: model(user).sum(), data, clip)
    torch.testing.assert_close(norms, expected)
    for got, want in zip(naive.sums(model), naive.clipped_sum(gradients, clip), strict=True):
        torch.testing.assert_close(got, want)
    assert bool(clipping.fallbacks) == one_at_a_time
