"""Two threads with an engine each are right; two threads at one model are refused; modes of others are refused."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dpformer as dp
from tests.clipping.naive import clipped_sum, norms_of, one_at_a_time, relative_error, sums

USERS, D = 5, 6


class Model(nn.Module):
    """With all that the engine replaces in torch: a checkpoint, an autograd function, a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x, use_reentrant=False).tanh()
        h = torch.func.vmap(torch.sin)(Double.apply(h))
        return self.last(h).square().sum((1, 2))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 2 * grad


def in_threads(*work: Callable[[], None]) -> None:
    """Runs all at once; raises what one of them raises."""
    errors: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


PATCHED = (
    (nn.Module, "__call__"),
    (torch.autograd.Function, "apply"),
    (torch.utils.checkpoint.CheckpointFunction, "apply"),
)


@pytest.mark.filterwarnings("ignore:.*one user at a time")
def test_two_threads_whose_contexts_cross_are_both_exact() -> None:
    """The first context to open is the first to close: patches must not come back with the second."""
    before = [vars(home).get(name) for home, name in PATCHED]
    steps = [threading.Barrier(2) for _ in range(4)]
    found: dict[int, tuple[nn.Module, Tensor, Tensor]] = {}

    def work(number: int) -> None:
        torch.manual_seed(number)
        model, x = Model().double(), torch.randn(USERS, 4, D, dtype=torch.float64)
        clipping = dp.PhantomClipping(model)
        if number:
            steps[0].wait(30)  # the other's context is open
        with clipping.users(x) as user:
            if not number:
                steps[0].wait(30)
            steps[1].wait(30)  # both are open
            loss = model(user)
            steps[2].wait(30)
            if number:
                steps[3].wait(30)  # the other's is closed
                loss = loss + 0 * model(user)
        if not number:
            steps[3].wait(30)
        found[number] = model, x, clipping.backward(loss, dp.clip(0.5))

    in_threads(lambda: work(0), lambda: work(1))
    for model, x, norms in found.values():
        truth = one_at_a_time(model, (x,))
        torch.testing.assert_close(norms, norms_of(truth))
        assert relative_error(sums(model), clipped_sum(truth, dp.clip(0.5))) < 1e-9
    assert [vars(home).get(name) for home, name in PATCHED] == before


def test_a_thread_without_an_engine_runs_as_always() -> None:
    model, other, x = Model(), nn.BatchNorm1d(D), torch.randn(USERS, 4, D)
    ready, done = threading.Event(), threading.Event()

    def engine() -> None:
        with dp.PhantomClipping(model).users(x) as user:
            ready.set()
            assert done.wait(30)
            model(user)

    def plain() -> None:
        assert ready.wait(30)
        try:  # a checkpoint that recomputes, statistics over the batch, a function of its own: all of it is theirs
            h = x.clone().requires_grad_()
            calls = []
            out = checkpoint(lambda t: calls.append(1) or Double.apply(t).sin(), h, use_reentrant=False)
            other(out.flatten(0, 1)).sum().backward()
            assert len(calls) == 2 and h.grad is not None
        finally:
            done.set()

    in_threads(engine, plain)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("what", ["users", "backward", "accumulate"])
def test_two_threads_at_one_model_are_refused(engines: int, what: str) -> None:
    model, x = nn.Linear(D, 2), torch.randn(USERS, D)
    mine, theirs = dp.PhantomClipping(model), dp.PhantomClipping(model)
    theirs = theirs if engines == 2 else mine
    with theirs.users(x) as user:
        loss = model(user).square().sum()

    def other() -> None:
        if what == "users":
            with theirs.users(x) as user:
                model(user)
        elif what == "backward":
            theirs.backward(loss, dp.clip(1.0))
        else:
            theirs.accumulate(lambda user: model(user).square().sum(), x, dp.clip(1.0))

    with mine.users(x), pytest.raises(dp.UnsupportedUse, match="another thread is using an engine of this model"):
        in_threads(other)


def test_two_engines_take_turns_at_one_model() -> None:
    model, x = nn.Linear(D, 2).double(), torch.randn(USERS, D, dtype=torch.float64)
    one, two = dp.PhantomClipping(model), dp.PhantomClipping(model)
    with one.users(x) as user:
        first = model(user).square().sum()
    with two.users(x) as user:
        second = model(user).square().sum()
    for clipping, loss in ((two, second), (one, first)):
        clipping.backward(loss, dp.clip(0.5))
    each = [list(torch.autograd.grad(model(x[i]).square().sum(), list(model.parameters()))) for i in range(USERS)]
    assert relative_error(sums(model), [2 * g for g in clipped_sum(each, dp.clip(0.5))]) < 1e-9
    with one.users(x) as user:
        mixed = model(user).square().sum()
    with pytest.raises(dp.UnsupportedUse, match="was not computed inside"):
        two.backward(mixed, dp.clip(0.5))


def test_an_engine_inside_the_context_of_another_is_refused() -> None:
    model, x = nn.Linear(D, 2), torch.randn(USERS, D)
    one, two = dp.PhantomClipping(model), dp.PhantomClipping(nn.Linear(D, 2))
    with pytest.raises(dp.UnsupportedUse, match="inside itself"), one.users(x) as user, two.users(user):
        pass


def test_precision_of_products_comes_back_when_threads_cross() -> None:
    from dpformer.clipping.rounding import full_precision

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        one, two = full_precision("cpu"), full_precision("cpu")
        one.__enter__()
        two.__enter__()
        one.__exit__()
        assert torch.get_float32_matmul_precision() == "highest", "the other is still inside"
        two.__exit__()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


# -- modes of others ---------------------------------------------------------------------------------------------------


class SeesCalls(TorchDispatchMode):
    """Adds one user's gradient to another's."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [SeesCalls, SeesFunctions])
def test_a_mode_around_backward_alone_is_refused(mode: type) -> None:
    model, x = nn.Linear(D, 2), torch.randn(USERS, D)
    clipping = dp.PhantomClipping(model)
    with clipping.users(x) as user:
        loss = model(user).square().sum()
    with pytest.raises(dp.UnsupportedUse, match=f"{mode.__name__} is active"), mode():
        clipping.backward(loss, dp.clip(1.0))
    assert all(p.grad is None for p in model.parameters())


def test_a_function_mode_around_the_context_is_refused() -> None:
    model, x = nn.Linear(D, 2), torch.randn(USERS, D)
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse, match="is active"), SeesFunctions(), clipping.users(x) as user:
        model(user)


def test_what_is_written_out_of_sight_is_a_sentence() -> None:
    model, x = nn.Linear(D, 2), torch.randn(USERS, D)
    clipping = dp.PhantomClipping(model)
    with clipping.users(x) as user:
        h = (model(user) * 1.0).exp()
        with torch._C.DisableTorchFunction():
            h.mul_(2.0)
        loss = h.sum()
    with pytest.raises(dp.UnsupportedUse, match="changed in place after a function had read it"):
        clipping.backward(loss, dp.clip(1.0))
