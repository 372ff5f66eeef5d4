"""Inside `clipping.users` one user exists: whatever a loss does, it is exact, or refused in the batch it is done in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from tests.clipping.naive import clipped_sum, norms_of, relative_error, sums

B, T, D = 4, 4, 4  # as many users as positions and columns, so that nothing is told apart by its size

Loss = Callable[[nn.Module, Tensor], Tensor]
CASES: dict[str, Loss] = {}
REFUSED: dict[str, Loss] = {}


def case(function: Loss) -> Loss:
    CASES[function.__name__] = function
    return function


def refused(function: Loss) -> Loss:
    REFUSED[function.__name__] = function
    return function


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.w = nn.Parameter(torch.randn(D, D))
        self.register_buffer("scale", torch.rand(D) + 0.5)
        self.kept: list[Any] = []
        self.cache: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


EVERYBODY = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def total(t: Tensor) -> Tensor:
    return t.square().sum() + t.sin().sum()


# -- functions that bring rows together: there is one user, so they cannot ----------------------------------------------


@case
def solve(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(torch.linalg.solve(h.mT @ h + torch.eye(D, dtype=h.dtype), model.b(h).mT))


@case
def solve_over_users(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x).flatten(1)
    return total(torch.linalg.solve(h @ h.T + torch.eye(len(h), dtype=h.dtype), h))


@case
def one_hot_product(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    which = F.one_hot(torch.arange(len(h)).roll(1), len(h)).to(h.dtype)
    return total(torch.einsum("ij,jtd->itd", which, h))


@case
def broadcast_over_users(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total((h[:, None] - h[None]).sum(1) + h)


@case
def products_of_users(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x).flatten(1)
    return torch.logsumexp(h @ h.T, 1).sum() + total(model.w @ h.view(T, D))


@case
def cumulated_over_users(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x).cumsum(0))


@case
def sorted_over_users(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x).sort(0).values * torch.arange(1.0, T + 1)[:, None])


@case
def rolled_over_users(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(h + 0.5 * h.roll(1, 0) + h.flip(0))


@case
def standardised_over_users(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total((h - h.mean(0)) / (h.var(0, unbiased=False) + 1.0) + model.w)


@case
def median_over_users(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(h - h.detach().median(0).values + model.w)


@case
def detached_negatives(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x).mean(1)
    return torch.logsumexp(h @ model.b(h).detach().T, 1).sum()


@case
def softmax_over_users(model: nn.Module, x: Tensor) -> Tensor:
    return total(torch.softmax(model(x).mean(1), 0) + model.a.weight)


@case
def attention_over_users(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x).transpose(0, 1).unsqueeze(0)  # (1, T, users, D)
    return total(F.scaled_dot_product_attention(h, h, h))


@case
def fourier_over_users(model: nn.Module, x: Tensor) -> Tensor:
    return total(torch.fft.fft(model(x), dim=0).real)


@case
def distances(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x).flatten(1)
    return total(torch.cdist(h, h + 1.0)) + total(model.b(h.view(T, D)))


@case
def viewed_as_time(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x).reshape(-1, T, D).cumsum(0).transpose(0, 1).reshape(-1, D) @ model.w)


@case
def gathered(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(h[torch.zeros(3, dtype=torch.long)]) + total(torch.index_select(h, 0, torch.tensor(0).view(1)))


@case
def folded_convolution(model: nn.Module, x: Tensor) -> Tensor:
    return total(F.conv1d(model(x).transpose(0, 2), model.w[:, :, None]))


@case
def strided(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(torch.cat([h, h[:, :1]], 1).unfold(1, 2, 1)) + total(h.roll(1, 0).diagonal(dim1=1, dim2=2))


@case
def shuffled_by_random_numbers(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(h[torch.randperm(len(h))])


@case
def kronecker(model: nn.Module, x: Tensor) -> Tensor:
    return total(torch.kron(model(x)[0], model.w))


# -- data-dependent control and values that leave torch: one user at a time ----------------------------------------------


class Inner(nn.Module):
    """Calls a function on what it is given: so that there is a module to compute again."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@case
def number_of_the_user(model: nn.Module, x: Tensor) -> Tensor:
    return total(Inner(lambda h: h * h.mean().item())(model(x)))


@case
def through_numpy_and_back_as_a_number(model: nn.Module, x: Tensor) -> Tensor:
    return total(Inner(lambda h: h * float(np.median(h.detach().numpy())))(model(x)))


@case
def branch(model: nn.Module, x: Tensor) -> Tensor:
    return total(Inner(lambda h: h * 2 if h.sum() > 0 else h.exp())(model(x)))


@case
def branch_that_all_take(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(h * 2 if (h.abs() < 2).all() else h)


@case
def boolean_index(model: nn.Module, x: Tensor) -> Tensor:
    return Inner(lambda h: total(model.b(h)[h > 0]))(model(x))


@case
def nonzero(model: nn.Module, x: Tensor) -> Tensor:
    return Inner(lambda h: total(h.flatten()[h.detach().flatten().nonzero()[:2, 0]] @ model.w[:2, :2]))(model(x))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return 2 * g @ w.mT, 2 * (x.mT @ g).sum(0)


@case
def autograd_function(model: nn.Module, x: Tensor) -> Tensor:
    return total(Doubled.apply(model(x), model.w))


@case
def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return total(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))


@case
def vmapped_inside(model: nn.Module, x: Tensor) -> Tensor:
    return total(torch.func.vmap(lambda h: h.cumsum(0) * model.scale)(model(x)))


@case
def vmapped_parameter_inside(model: nn.Module, x: Tensor) -> Tensor:
    return total(Inner(torch.func.vmap(lambda h: torch.tanh(h @ model.w)))(model(x)))


@case
def derivative_inside(model: nn.Module, x: Tensor) -> Tensor:
    return total(torch.func.grad(lambda h: h.pow(3).sum())(model(x)))


# -- other users' data, past `clipping.users` -----------------------------------------------------------------------------


@refused
def closure(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) - EVERYBODY.mean(0))


@refused
def closure_of_a_number(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) * EVERYBODY.mean())


@refused
def closure_into_a_parameter(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x)) + total(model.b(EVERYBODY))


@refused
def closure_picks_rows(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x)) + total(model.w[EVERYBODY[:, 0, 0].long().abs() % D])


@refused
def closure_in_place(model: nn.Module, x: Tensor) -> Tensor:
    h = torch.zeros(1, T, D, dtype=x.dtype)
    h += EVERYBODY[:1]
    return total(model(x) + h)


@refused
def list_of_python(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) * torch.tensor(EVERYBODY.mean((0, 1)).tolist(), dtype=x.dtype))


@refused
def array_of_numpy(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) * torch.from_numpy(EVERYBODY.numpy().mean((0, 1))))


@refused
def new_tensor(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) * model.scale.new_tensor(EVERYBODY.mean((0, 1)).tolist()))


@refused
def differentiable_stranger(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) * nn.Parameter(torch.ones(D, dtype=x.dtype)))


@refused
def batch_statistics(model: nn.Module, x: Tensor) -> Tensor:
    return total(F.batch_norm(model(x), None, None, training=True))


@refused
def writes_a_buffer(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    model.scale.copy_(h[0, 0].detach())
    return total(h * model.scale)


@refused
def backward_inside(model: nn.Module, x: Tensor) -> Tensor:
    loss = total(model(x))
    loss.backward()
    return loss


@refused
def out_of_sight(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    with torch._C.DisableTorchFunction():
        h = h.cumsum(0)
    return total(h)


@refused
def parameter_out_of_sight(model: nn.Module, x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        h = x @ model.w
    return total(model(x)) + total(h)


@refused
def hidden_gradient(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = model.b(x)
    return total(model(x) + h)


def naive(model: nn.Module, loss: Loss, data: Tensor) -> list[list[Tensor]]:
    parameters = list(model.parameters())
    out = []
    for user in range(len(data)):
        found = torch.autograd.grad(loss(model, data[user : user + 1]), parameters, allow_unused=True)
        out.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)])
    return out


def with_block(clipping: dp.PhantomClipping, loss: Callable[[Tensor], Tensor], data: Tensor) -> Tensor:
    with clipping.users(data) as user:
        one = loss(user)
    return clipping.backward(one, dp.normalize(1.0))


def with_function(clipping: dp.PhantomClipping, loss: Callable[[Tensor], Tensor], data: Tensor) -> Tensor:
    return clipping.accumulate(loss, data, dp.normalize(1.0))


def alone(clipping: dp.PhantomClipping, loss: Callable[[Tensor], Tensor], data: Tensor) -> Tensor:
    """One user at a time from the first operation on."""

    def whole(user: Tensor) -> Tensor:
        user.sum().item()
        return loss(user)

    return clipping.accumulate(whole, data, dp.normalize(1.0))


FORMS = [with_block, with_function, alone]


def make() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(B, T, D, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_exact(name: str, form: Any) -> None:
    model, data = make()
    truth = naive(model, CASES[name], data)
    norms = form(dp.PhantomClipping(model), lambda x: CASES[name](model, x), data)
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, form: Any) -> None:
    model, data = make()
    with pytest.raises(dp.UnsupportedUse):
        form(dp.PhantomClipping(model), lambda x: REFUSED[name](model, x), data)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


# -- what a model keeps ---------------------------------------------------------------------------------------------------


class Keeps(Net):
    """Keeps something of its users in a list, an attribute or a buffer, and uses it later."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.number = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.how == "list":
            out = h + sum(self.kept, torch.zeros((), dtype=h.dtype))
            self.kept.append(h.detach())
        elif self.how == "attribute":
            out = h if self.cache is None else h + self.cache
            self.cache = h.detach().clone()
        elif self.how == "new buffer":
            out = h
            self.register_buffer("more", h.detach())
        elif self.how == "replaced buffer":
            out = h * self.scale
            self.scale = h.detach()[0, 0]
        elif self.how == "number":
            out = h + self.number
            self.number = self.number + h.mean().item()
        else:
            out = h + sum(self.kept)
            self.kept.append(h.mean().item())
        return total(out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["list", "attribute", "new buffer", "replaced buffer", "number", "list of numbers"])
def test_a_model_that_keeps_users_is_refused(how: str, form: Any) -> None:
    torch.manual_seed(0)
    model, data = Keeps(how).double(), torch.randn(B, T, D, dtype=torch.float64)
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse):
        for _ in range(2):  # in the first batch there may be nobody to remember
            form(clipping, model, data)
