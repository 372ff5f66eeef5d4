"""How small a fault the self-check sees, and how large a rounding it lets pass, in each precision."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

import dpformer as dp
from dpformer import compat
from dpformer.clipping import self_check
from dpformer.clipping.parameter_norms import ParameterUses


class Model(nn.Module):
    """One layer may compute in float32 while others are in float64, as norms of Llama do."""

    def __init__(self, single: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.single = nn.Linear(6, 8), nn.Linear(8, 1), single

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if self.single:
            hidden = (hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return self.last(hidden).to(self.first.weight.dtype).square().sum((1, 2))


class Cancelling(nn.Module):
    """A gradient that is the small difference of large numbers: rounding of float32 is a part in a thousand of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        there, back = self.layer(x).sum((1, 2)), self.layer(x + 1e-3 * x.roll(1, -1)).sum((1, 2))
        return 1e3 * (there - back)


def autocast(half: bool) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if half else nullcontext()


def run(model: nn.Module, dtype: torch.dtype, half: bool = False, users: int = 8) -> None:
    torch.manual_seed(0)
    model = model.to(dtype)
    clipping = dp.PhantomClipping(model)
    with clipping.users(torch.randn(users, 5, 6, dtype=dtype)) as user, autocast(half):
        loss = model(user)
    clipping.backward(loss, dp.normalize(1.0))


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """The engine's sums are too long by this share."""
    weighted_sum = ParameterUses.weighted_sum

    def by(share: float) -> None:
        monkeypatch.setattr(ParameterUses, "weighted_sum", lambda self, c: weighted_sum(self, c) * (1 + share))

    return by


LIMITS = {  # what passes, what is caught: of one user, whose gradient cannot cancel that of others
    "float64": (torch.float64, False, False, 0.5e-8, 2e-8),
    "float32": (torch.float32, False, False, 1e-5, 4e-5),
    "float64 with a layer in float32": (torch.float64, True, False, 1e-5, 4e-5),
    "bfloat16 under autocast": (torch.float32, False, True, 2e-3, 7e-2),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_wrong_gradient_is_caught_above_the_tolerance_and_rounding_passes_below(
    case: str, wrong: Callable[[float], None]
) -> None:
    dtype, single, half, passes, caught = LIMITS[case]
    for _ in range(5):  # weights are random
        run(Model(single), dtype, half, users=1)
        wrong(passes)
        run(Model(single), dtype, half, users=1)
        wrong(caught)
        with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
            run(Model(single), dtype, half, users=1)
        wrong(0)


def test_rounding_that_is_large_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "_ROUNDINGS", 0)
        with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
            for _ in range(20):
                run(Cancelling(), torch.float32)
    for _ in range(20):
        run(Cancelling(), torch.float32)


ALONE = {
    "float64": (torch.float64, False, 0.5e-9, 2e-9),
    "float32": (torch.float32, False, 0.5e-4, 2e-4),
    "bfloat16 under autocast": (torch.float32, True, 0.01, 0.07),
}


@pytest.mark.parametrize("case", ALONE)
def test_users_alone_may_differ_by_rounding_only(case: str) -> None:
    """A loss that is larger outside of the engine, by a share."""
    dtype, half, passes, caught = ALONE[case]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x = torch.randn(4, 5, 6, dtype=dtype)

    def accumulate(share: float) -> None:
        def loss_of(user: Tensor) -> Tensor:
            with autocast(half):
                loss = model(user).to(dtype).square().sum((1, 2))
            return loss * (1.0 if compat.is_batchedtensor(user) else 1 + share)

        dp.PhantomClipping(model).accumulate(loss_of, x, dp.clip(1.0))

    for _ in range(3):
        accumulate(passes)
        with pytest.raises(dp.UnsupportedUse, match="alone and outside of it"):
            accumulate(caught)
