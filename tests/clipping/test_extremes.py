"""Users made to break the bound: parts that cancel, numbers that vanish or overflow, sums rounded to half precision.

Each moved the sum by more than C, or stopped the run, before it was bounded.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping import parameter_norms
from dpformer.clipping.bounded_sum import sum_of
from tests.clipping import naive
from tests.clipping.test_rounding import Product

CLIPS = pytest.mark.parametrize("clip", [dp.clip(0.01), dp.normalize(1.0)], ids=["clip", "normalize"])


def total(model: nn.Module, *batch: Tensor, clip: dp.clipping.ClipFunction, self_check: bool = False) -> Tensor:
    for parameter in model.parameters():
        parameter.grad = None
    clipping = dp.PhantomClipping(model, self_check=self_check)
    with clipping.users(batch) as user:
        losses = model(*user)
    clipping.backward(losses, clip)
    return torch.cat([s.double().flatten() for p in model.parameters() if (s := sum_of(p)) is not None])


def moved(model: nn.Module, *batch: Tensor, clip: dp.clipping.ClipFunction, self_check: bool = False) -> float:
    """By how many C the sum moves when the first user leaves."""
    change = total(model, *batch, clip=clip, self_check=self_check) - total(
        model, *(part[1:] for part in batch), clip=clip
    )
    return float(change.norm()) / clip.clip_norm


class Merged(nn.Module):
    """A weight that is an expression of bfloat16 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Parameter((torch.randn(width, 4) / 2).bfloat16())
        self.b = nn.Parameter((torch.randn(4, width) / width**0.5).bfloat16())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (F.linear(x.bfloat16(), self.a @ self.b).float() * y).sum((1, 2))


def test_the_sum_over_users_is_not_rounded_in_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    """600 users alike, ordinary ones: the sum was rounded to 8 bits, and one user moved it by 2.5 C."""
    monkeypatch.setattr(parameter_norms, "KEEP", 64 * 64 * 16)
    torch.manual_seed(0)
    model, width, users = Merged(64), 64, 600
    x = torch.randn(1, 2, width) + 0.3 * torch.randn(users, 2, width)
    y = torch.randn(1, 2, width) + 0.3 * torch.randn(users, 2, width)
    assert moved(model, x, y, clip=dp.clip(0.1)) <= 1.001


class Twice(nn.Module):
    """Positions that are added at two places."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return ((x + self.positions) * y).sum((1, 2)) - ((x + self.positions) * z).sum((1, 2))


@CLIPS
@pytest.mark.parametrize("size", [1e2, 1e6])
def test_two_written_out_parts_that_cancel(
    clip: dp.clipping.ClipFunction, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined before their lengths were seen, and added one by one: 15 C."""
    monkeypatch.setattr(parameter_norms, "KEEP", 0)  # nothing is kept
    torch.manual_seed(0)
    users, shape = 20, (32, 64)
    x, y, z = torch.randn(3, users, *shape)
    y[0] *= size
    z[0] = y[0]
    z[0, 0, 0] = torch.nextafter(y[0, 0, 0], torch.tensor(torch.inf))
    assert moved(Twice(shape), x, y, z, clip=clip) <= 1.001


@CLIPS
@pytest.mark.parametrize("rows", [4, 60])
@pytest.mark.parametrize("scale", [(1e-24, 1e24), (1e24, 1e-24), (1e17, 1e-23), (3e-23, 1e20)])
def test_rows_that_vanish_or_overflow(
    clip: dp.clipping.ClipFunction, rows: int, scale: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum was NaN, or the norm was 0 and the user contributed 63 C."""
    monkeypatch.setattr(parameter_norms, "KEEP", 0)
    torch.manual_seed(0)
    x, y = torch.randn(10, rows, 32), torch.randn(10, rows, 32)
    x[0] *= scale[0]
    y[0] *= scale[1]
    model = Product(32)
    with torch.no_grad():
        model.layer.weight.zero_()
    assert torch.isfinite(total(model, x, y, clip=clip)).all()
    assert moved(model, x, y, clip=clip) <= 1.001


@pytest.mark.parametrize("scale", [(1e-10, 1e20), (1e20, 1e-20), (1e-22, 1e22)])
def test_nobody_appears_because_of_another(scale: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """50 users overflowed in products of rows and were skipped; a long history made them count: 6.7 C."""
    torch.manual_seed(0)
    short, long, width = 4, 200, 16
    x, y = torch.randn(50, short, width) * scale[0], torch.randn(50, short, width) * scale[1]
    model = Product(width)
    alone = total(model, x, y, clip=dp.clip(1.0))
    newcomer = torch.full((1, long, width), 1e-6)
    x, y = (torch.cat([newcomer, F.pad(part, (0, 0, 0, long - short))]) for part in (x, y))
    with_one = total(model, x, y, clip=dp.clip(1.0))
    assert float(alone.norm()) > 1
    assert float((with_one - alone).norm()) <= 1e-3


@pytest.mark.parametrize("factor", [3e38, 1e37])
def test_a_row_without_a_gradient_overflows_when_it_is_scaled(factor: float) -> None:
    """c is above 1 for a small gradient, and c times the input was infinite, times 0: the sum was NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(5, 3, 8)
    x[0] = factor
    y = torch.randn(5, 3, 1)
    y[0] = model(x[0]).detach() + 1e-3

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.model(x) - y).square().mean((1, 2))

    assert moved(Squared(), x, y, clip=dp.normalize(1.0)) <= 1.001


@CLIPS
@pytest.mark.parametrize("self_check", [False, True])
def test_rows_that_overflow_and_cancel_among_kept_gradients(clip: dp.clipping.ClipFunction, self_check: bool) -> None:
    """Its norm was found in float64, but what had overflowed was multiplied by 0: the sum was NaN."""
    torch.manual_seed(0)
    x, y = torch.randn(10, 200, 16), torch.randn(10, 200, 16)
    x[0], y[0] = 0, 0
    x[0, 0], x[0, 1], y[0, :2] = 1e30, -1e30, 1e30
    x[0, 2], y[0, 2] = 0.1, 0.1
    model = Product(16)
    with torch.no_grad():
        model.layer.weight.zero_()
    assert moved(model, x, y, clip=clip, self_check=self_check) <= 1.001


@pytest.mark.parametrize("keep", [0, parameter_norms.KEEP])
def test_rows_that_vanish_when_they_are_scaled(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """9 times the smallest number, times 0.725, is 7 times it: 1.07 C with inputs as large as numbers are."""
    monkeypatch.setattr(parameter_norms, "KEEP", keep)
    width, rows = 512, 200
    x, y = torch.full((2, rows, width + 1), 3e38), torch.full((2, rows, width), 9 * 2.0**-149)
    x[1], y[1] = 1e-3, 1e-3
    layer = nn.Linear(width + 1, width, bias=False)
    nn.init.zeros_(layer.weight)
    model = Product(1)
    model.layer = layer
    length = rows * (width * (width + 1)) ** 0.5 * 3e38 * 9 * 2.0**-149
    assert moved(model, x, y, clip=dp.clip(length * 0.725)) <= 1.001


class Turned(nn.Module):
    """A function without a rule of its own: gradients are taken user by user."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose1d(24, 24, 3, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(x) * y).flatten(1).sum(1)


@CLIPS
def test_rows_that_cancel_in_a_function_without_a_rule(
    clip: dp.clipping.ClipFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and sum came from different calls of autograd: 1.5 C."""
    monkeypatch.setattr(parameter_norms, "KEEP", 0)
    torch.manual_seed(0)
    x = torch.randint(-3, 4, (6, 24, 44)).float()
    y = torch.randint(-3, 4, (6, 24, 46)).float()
    x[0, :, 20:24], y[0, :, 20:24] = 0, 0
    x[0, :, 24:] = -x[0, :, :20]  # the second half takes back all of the first
    y[0, :, 24:44], y[0, :, 44:] = y[0, :, :20], 0
    x[0] *= 100_000
    x[0, 0, 0] += 0.25  # but for a little
    assert moved(Turned(), x, y, clip=clip) <= 1.001


def test_a_factor_that_float32_has_no_room_for_is_refused() -> None:
    with pytest.raises(ValueError, match="clip_norm / gamma is 1e\\+30"):
        dp.normalize(1.0, gamma=1e-30)


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e-20, 1e20, 1e30])
def test_norms_whose_squares_float32_has_no_room_for(scale: float) -> None:
    """They were 0, or infinite, and then the user was left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    data, clip = torch.randn(3, 2, 5), dp.clip(1.0)
    clipping = dp.PhantomClipping(model)
    norms = clipping.accumulate(lambda user: model(user).square().mean() * scale, data, clip)
    sums = naive.sums(model)
    exact = copy.deepcopy(model).double()
    parameters = list(exact.parameters())
    losses = [exact(one[None].double()).square().mean() * scale for one in data]
    gradients = [list(torch.autograd.grad(loss, parameters)) for loss in losses]
    torch.testing.assert_close(norms.double(), naive.norms_of(gradients), rtol=1e-5, atol=0)
    for got, want in zip(sums, naive.clipped_sum(gradients, clip), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * float(want.abs().max()))
    assert clipping.skipped_users == 0
