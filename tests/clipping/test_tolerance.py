"""How small a fault the proof sees: one thousandth of a gradient, in every precision but half."""

import pytest
import torch
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping import proof


class Mixed(nn.Module):
    """A part of the next user's loss is in each one's; and a layer may compute in float32, as norms of Llama do."""

    def __init__(self, mixed: float, single: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.mixed, self.single = mixed, single

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.single:
            hidden = (hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        each = self.last(hidden).square().sum((1, 2))
        return each + self.mixed * each.roll(1) if self.mixed else each


class Cancelling(nn.Module):
    """A gradient that is the small difference of large numbers: rounding of float32 is a part in a thousand of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        there, back = self.layer(x).sum((1, 2)), self.layer(x + 1e-3 * x.roll(1, -1)).sum((1, 2))
        return 1e3 * (there - back)


def run(model: nn.Module, dtype: torch.dtype, users: int = 8) -> None:
    torch.manual_seed(0)
    model = model.to(dtype)
    clipping = dp.PhantomClipping(model)
    with clipping.users(torch.randn(users, 5, 6, dtype=dtype)) as user:
        loss = model(user)
    clipping.backward(loss, dp.normalize(1.0))


@pytest.mark.parametrize(("dtype", "single"), [(torch.float32, False), (torch.float64, True), (torch.float64, False)])
def test_a_thousandth_of_another_user(dtype: torch.dtype, single: bool) -> None:
    run(Mixed(0.0, single), dtype)
    for _ in range(5):  # weights are random
        with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
            run(Mixed(1e-3, single), dtype)


def test_rounding_that_is_large_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(proof, "_ROUNDINGS", 0)
        with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
            for _ in range(20):
                run(Cancelling(), torch.float32)
    for _ in range(20):
        run(Cancelling(), torch.float32)
