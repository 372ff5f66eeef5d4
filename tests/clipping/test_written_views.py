"""Outputs that a model writes into afterwards, or views in another shape: the gradient at the output still arrives.

An output that is itself a view of something inside torch (einsum permutes a product) loses its place in the graph once
a view of it is written to: nothing came to the engine, and the parameter was left out without a word.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dpformer as dp

Write = Callable[[Tensor], Tensor]


def whole(t: Tensor) -> Tensor:
    t *= torch.linspace(0.5, 1.5, t.shape[-1], dtype=t.dtype)
    return t


def a_view(t: Tensor) -> Tensor:
    """As Funnel does with its positions."""
    view = t[..., :2]
    view *= 3.0
    return view


class Writes(nn.Module):
    """einsum, with users' data that needs a gradient and a parameter or an expression of one."""

    def __init__(self, equation: str, write: Write, expression: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.w = nn.Linear(4, 4).double(), nn.Parameter(torch.randn(5, 3, 4, dtype=torch.float64))
        self.equation, self.write, self.expression = equation, write, expression

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh().unsqueeze(2).expand(-1, -1, 3, -1)  # (B, L, 3, 4)
        out = torch.einsum(self.equation, hidden, self.w * 2 if self.expression else self.w)
        return self.write(out).cos().flatten(1).sum(1)


@pytest.mark.parametrize("expression", [False, True])
@pytest.mark.parametrize("write", [whole, a_view])
@pytest.mark.parametrize("equation", ["binh,tnh->bnit", "binh,tnh->bitn", "binh,tnh->bin", "binh,tnh->bit"])
def test_writing_into_a_result_loses_no_gradient(equation: str, write: Write, expression: bool) -> None:
    agrees(Writes(equation, write, expression), torch.randn(3, 6, 4, dtype=torch.float64))


def agrees(model: nn.Module, x: Tensor) -> None:
    """Norms and the clipped sum are those of one user at a time."""
    truth = [torch.autograd.grad(model(x[u : u + 1])[0], list(model.parameters())) for u in range(3)]
    norms = torch.stack([torch.stack([g.square().sum() for g in user]).sum().sqrt() for user in truth])
    clip, clipping = dp.clip(0.5 * float(norms.median())), dp.PhantomClipping(model)
    with clipping.users(x) as user:
        loss = model(user)
    found = clipping.backward(loss, clip)
    torch.testing.assert_close(found, norms)
    for n, p in enumerate(model.parameters()):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, sum(c * user[n] for c, user in zip(clip(norms), truth, strict=True)))


class TimeFirst(nn.Module):
    """Turned time first, and the heads split off by `view`, which asks for the layout that torch's own result has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.w = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        users, steps, _ = x.shape
        heads = self.w(self.first(x).transpose(0, 1)).view(steps, users * 2, 2)
        return heads.tanh().view(steps, users, 4).sum((0, 2))


def test_results_on_data_that_is_time_first_can_be_viewed() -> None:
    agrees(TimeFirst(), torch.randn(3, 6, 4, dtype=torch.float64))
