"""Inside `clipping.users` one user exists: whatever a loss does, it is exact, or refused in the batch it is done in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from tests.clipping.naive import clipped_sum, norms_of, one_at_a_time, relative_error, sums
from tests.clipping.problems import PROBLEMS, Problem

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


# -- functions that bring rows together: there is one user, so they cannot --------------------------------------------


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


# -- data-dependent control and values that leave torch: one user at a time -------------------------------------------


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
def printed(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(h * (1 + 0 * len(f"{h.detach()!r}"))) + total(h)


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


# -- other users' data, past `clipping.users` -------------------------------------------------------------------------


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


def total_of(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x))


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


# -- what a model keeps -----------------------------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_every_rule(problem: Problem) -> None:
    torch.manual_seed(0)
    model = problem.make().double()
    batch = tuple(t.double() if t.is_floating_point() else t for t in problem.batch())
    truth = one_at_a_time(model, batch)
    clipping = dp.PhantomClipping(model)
    with clipping.users(batch) as user:
        loss = model(*user)
    norms = clipping.backward(loss, dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=1e-12)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


# -- one user at a time, and what is said of it -----------------------------------------------------------------------


class Picky(Net):
    """A layer that looks at numbers, inside a model that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(lambda h: h[:, h[0].sum(-1) > 0].sum(1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        return total(self.b(self.inner(torch.tanh(self.a(x)))))


def picky() -> tuple[Picky, Tensor]:
    torch.manual_seed(0)
    return Picky().double(), torch.randn(B, T, D, dtype=torch.float64)


def test_the_innermost_module_is_computed_alone_and_said_once() -> None:
    model, data = picky()
    clipping = dp.PhantomClipping(model)
    truth = naive(model, lambda m, x: m(x), data)
    with pytest.warns(UserWarning, match="Inner is computed one user at a time") as said:
        for _ in range(2):
            model.zero_grad()
            norms = with_block(clipping, model, data)
    assert len([w for w in said if "one user at a time" in str(w.message)]) == 1
    assert clipping.fallbacks == {"Inner": 2}
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


def test_speed_or_nothing() -> None:
    model, data = picky()
    clipping = dp.PhantomClipping(model, fallback="error")
    with pytest.raises(dp.UnsupportedUse, match="Inner cannot be computed for all users together"):
        with_block(clipping, model, data)
    with pytest.raises(dp.UnsupportedUse, match="Inner cannot be computed for all users together"):
        with_function(clipping, model, data)
    with pytest.raises(ValueError, match="fallback is 'no'"):
        dp.PhantomClipping(model, fallback="no")  # type: ignore[arg-type]


def test_a_block_names_the_function_form() -> None:
    model, data = make()
    with pytest.raises(dp.UnsupportedUse, match=r"clipping.accumulate"):
        with_block(dp.PhantomClipping(model), lambda x: total(model(x)) * model(x).mean().item(), data)


def test_an_error_of_the_model_stays_its_own() -> None:
    model, data = make()
    with pytest.raises(IndexError, match="out of bounds"):
        with_function(dp.PhantomClipping(model), lambda x: total(model(x)[:, 99]), data)


def test_batches_after_each_other_and_several_contexts() -> None:
    model, data = make()
    truth = naive(model, lambda m, x: total(m(x)), data)
    clipping = dp.PhantomClipping(model)
    losses = []
    for part in (data[:3], data[3:]):
        with clipping.users(part) as user:
            losses.append(total(model(user)))
    norms = torch.cat([clipping.backward(loss, dp.clip(0.5)) for loss in losses])
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.clip(0.5))) < 1e-9
    with pytest.raises(dp.UnsupportedUse, match="called for it before"):
        clipping.backward(losses[0], dp.clip(0.5))


def test_users_without_finite_gradients_are_left_out_and_counted() -> None:
    for form in FORMS:
        model, data = make()
        data[1] = float("nan")
        clipping = dp.PhantomClipping(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            norms = form(clipping, partial(total_of, model), data)
        assert clipping.skipped_users == 1
        assert norms.isnan().tolist() == [False, True, False, False]
        keep = torch.tensor([0, 2, 3])
        truth = naive(model, lambda m, x: total(m(x)), data[keep])
        assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


@pytest.mark.parametrize("form", FORMS[:2])
def test_every_user_of_a_part_counts_once(form: Any) -> None:
    model, data = make()
    clipping = dp.PhantomClipping(model)
    batch = next(batch for batch in dp.PoissonBatches(B, sample_rate=0.9, steps=9, seed=0) if len(batch) == B)
    part = batch[:]
    with pytest.raises(ValueError, match="the part has 4 users, but the data have 3"):
        clipping.accumulate(lambda x: total(model(x)), data[:3], dp.clip(1.0), part)
    clipping.accumulate(lambda x: total(model(x)), data, dp.clip(1.0), part)
    with pytest.raises(ValueError, match="already"):
        with clipping.users(data, part) as user:
            loss = total(model(user))
        clipping.backward(loss, dp.clip(1.0))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((torch.zeros(3, 2), torch.zeros(4, 2)), "tensors of \\[3, 4\\] rows"),
        (torch.zeros(()), "without dimensions"),
        (np.zeros((3, 2)), "torch.from_numpy"),
        ({"x": torch.zeros(3, 2), "lengths": [3, 4, 5]}, "a list of 3 Python values, as many as users"),
        ("text", "hold no tensor, got str"),
        (torch.zeros(0, 2), "there are no users"),
    ],
)
def test_data_of_other_forms(data: Any, words: str) -> None:
    model, _ = make()
    with pytest.raises(ValueError, match=words), dp.PhantomClipping(model).users(data):
        pass


def test_trees_of_tensors() -> None:
    model, data = make()
    truth = naive(model, lambda m, x: total(m(x)), data)
    tree = {"x": data, "more": [(data * 0, None), 3]}
    clipping = dp.PhantomClipping(model)
    with clipping.users(tree) as user:
        assert user["x"].shape == (1, T, D) and user["more"][0][1] is None and user["more"][1] == 3
        loss = total(model(user["x"] + user["more"][0][0]))
    norms = clipping.backward(loss, dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)


def test_what_is_declared_public_may_meet_users() -> None:
    model, data = make()
    weights, teacher = torch.rand(D, dtype=torch.float64), nn.Linear(D, D).double().requires_grad_(False)

    def loss(x: Tensor) -> Tensor:
        return total(model(x) * weights + teacher(x))

    truth = naive(model, lambda m, x: loss(x), data)
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse, match=r"clipping.public"):
        with_block(clipping, loss, data)
    clipping.public(weights, teacher)
    torch.testing.assert_close(with_block(clipping, loss, data), norms_of(truth), rtol=1e-9, atol=0)
    weights.mul_(2)  # no longer what was declared
    with pytest.raises(dp.UnsupportedUse, match=r"clipping.public"):
        with_block(clipping, loss, data)
    with pytest.raises(ValueError, match="must not require a gradient"):
        clipping.public(nn.Linear(2, 2))


def test_losses_of_other_shapes_and_origins() -> None:
    model, data = make()
    clipping = dp.PhantomClipping(model)
    with clipping.users(data) as user:
        h = model(user)
    with pytest.raises(ValueError, match=r"one user's loss must be one number, got shape \(1, 4, 4\)"):
        clipping.backward(h, dp.clip(1.0))
    with dp.PhantomClipping(model).users(data) as user:
        loss = total(model(user))
    with pytest.raises(dp.UnsupportedUse, match="of this engine"):
        clipping.backward(loss, dp.clip(1.0))
    with pytest.raises(ValueError, match="one user's loss must be one number"):
        alone(clipping, model, data)


@pytest.mark.filterwarnings("ignore")
def test_gradient_penalties_are_exact_one_user_at_a_time() -> None:
    model, data = make()

    def loss(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = total(model(x))
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    truth = naive(model, lambda m, x: loss(x), data)
    norms = with_function(dp.PhantomClipping(model), loss, data)
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


def test_nothing_stays_behind() -> None:
    """Whatever happens inside, torch and the engine are as before."""
    model, data = make()
    clipping = dp.PhantomClipping(model)
    call, apply = nn.Module.__call__, torch.autograd.Function.apply
    for error in (RuntimeError("own"), KeyboardInterrupt()):
        with pytest.raises(type(error)), clipping.users(data):
            raise error
    assert nn.Module.__call__ is call and torch.autograd.Function.apply == apply
    assert torch._C._functorch.maybe_current_level() is None
    truth = naive(model, lambda m, x: total(m(x)), data)
    norms = with_block(clipping, lambda x: total(model(x)), data)
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)


def test_a_print_shows_no_numbers() -> None:
    """torch would print those of all users."""
    model, data = make()
    with dp.PhantomClipping(model).users(data) as user:
        assert repr(user) == str(user) == "one user's tensor of shape (1, 4, 4), torch.float64"
