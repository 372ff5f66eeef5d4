"""What an attack has found: users that meet where the engine does not look, and errors that a model goes on after."""

from __future__ import annotations

import array
import io
import pickle
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function
from torch.utils._python_dispatch import TorchDispatchMode

import dpformer as dp
from tests.clipping.naive import clipped_sum, norms_of, relative_error, sums
from tests.clipping.test_users import EVERYBODY, FORMS, B, D, Inner, Loss, T, make, naive, total, with_block

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSED: dict[str, Loss] = {}
EXACT: dict[str, Loss] = {}
OTHERS = EVERYBODY.mean(0)


def refused(function: Loss) -> Loss:
    REFUSED[function.__name__] = function
    return function


def exact(function: Loss) -> Loss:
    EXACT[function.__name__] = function
    return function


# -- other users' data is written into a tensor that was the same for all ----------------------------------------------


def writes(name: str, write: Callable[[Tensor], Any]) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        zeros = torch.zeros(T, D, dtype=x.dtype)
        write(zeros)
        return total(model(x) + zeros)

    REFUSED[name] = loss


writes("operator", lambda t: torch.ops.aten.copy_.default(t, OTHERS))
writes("foreach", lambda t: torch._foreach_add_([t], [OTHERS]))
writes("memory", lambda t: t.set_(OTHERS))
writes("storage", lambda t: t.set_(OTHERS.untyped_storage(), 0, (T, D)))
writes("through_its_storage", lambda t: t.untyped_storage().copy_(OTHERS.clone().untyped_storage()))
writes("running_mean", lambda t: F.instance_norm(EVERYBODY.mT, t[0], torch.ones(D, dtype=t.dtype)))
writes("statistics", lambda t: torch.batch_norm_update_stats(EVERYBODY.mT, t[0], torch.ones(D, dtype=t.dtype), 0.5))


def _unseen(t: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        t.add_(OTHERS)


writes("out_of_sight", _unseen)


@pytest.mark.parametrize("name", ["iand", "ior", "ixor", "ilshift", "irshift"])
def test_operators_in_place(name: str) -> None:
    model, data = make()
    others = (OTHERS.abs() * 3).long()

    def loss(x: Tensor) -> Tensor:
        public = torch.ones(T, D, dtype=torch.long)
        getattr(public, f"__{name}__")(others)
        return total(model(x) * public)

    with pytest.raises(dp.UnsupportedUse, match="past"):
        dp.PhantomClipping(model).accumulate(loss, data, dp.normalize(1.0))


@refused
def buffer_and_back(model: nn.Module, x: Tensor) -> Tensor:
    before = model.scale.clone()
    model.scale.data.copy_(OTHERS.mean(0))
    loss = total(model(x) * model.scale)
    model.scale.data.copy_(before)
    return loss


@refused
def constant_written(model: nn.Module, x: Tensor) -> Tensor:
    model.table.data.copy_(OTHERS)
    return total(model(x) + model.table)


@refused
def constant_replaced(model: nn.Module, x: Tensor) -> Tensor:
    model.table.data = OTHERS
    return total(model(x) + model.table)


# -- tensors that look as if they were the same for all ----------------------------------------------------------------


@refused
def sparse_of_lists(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) * torch.sparse_coo_tensor([list(range(D))], OTHERS[0].tolist(), (D,)).to_dense())


PICKLED = pickle.dumps(OTHERS)
SAVED = io.BytesIO()
torch.save(OTHERS, SAVED)


@refused
def unpickled(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) + pickle.loads(PICKLED))


@refused
def loaded(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) + torch.load(io.BytesIO(SAVED.getvalue())))


@refused
def gradient_of_earlier_parts(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) @ model.w.grad)


@refused
def number_of_others(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x)) * EVERYBODY.mean().item()


@refused
def branch_of_others(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x)) * (2 if EVERYBODY.mean() > 0 else 1)


@refused
def result_of_a_module_computed_alone(model: nn.Module, x: Tensor) -> Tensor:
    def recall(h: Tensor) -> Tensor:
        return EVERYBODY[int(h.detach().abs().sum().item()) % B][None]

    return total(model(x) + Inner(recall)(x))


# -- code of others that runs out of sight -----------------------------------------------------------------------------


class Kept:
    everybody = EVERYBODY


class Recalls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: type[Kept]) -> Tensor:
        return kept.everybody.mean(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g, None


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(OTHERS)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g * ctx.saved_tensors[0]


class Backward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g * OTHERS.mean()


class Remembers(torch.autograd.Function):
    kept: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        Remembers.kept.append(g * 1)
        return g + sum(Remembers.kept)


@refused
def function_that_recalls(model: nn.Module, x: Tensor) -> Tensor:
    return total(Recalls.apply(model(x), Kept))


@refused
def function_that_saves(model: nn.Module, x: Tensor) -> Tensor:
    return total(Saves.apply(model(x)))


@refused
def backward_of_others(model: nn.Module, x: Tensor) -> Tensor:
    return total(Backward.apply(model(x)))


@refused
def backward_that_remembers(model: nn.Module, x: Tensor) -> Tensor:
    return total(Remembers.apply(model(x)))


@refused
def hook_of_others(model: nn.Module, x: Tensor) -> Tensor:
    def hooked(h: Tensor) -> Tensor:
        h.register_hook(lambda g: g * OTHERS.mean())
        return h * 1

    return total(Inner(hooked)(model(x)))


# `Function.apply`, taken before any context began, as most libraries write it
recalls, saves, backward, remembers = Recalls.apply, Saves.apply, Backward.apply, Remembers.apply


@refused
def taken_function_that_recalls(model: nn.Module, x: Tensor) -> Tensor:
    return total(recalls(model(x), Kept))


@refused
def taken_function_that_saves(model: nn.Module, x: Tensor) -> Tensor:
    return total(saves(model(x)))


@refused
def taken_backward_of_others(model: nn.Module, x: Tensor) -> Tensor:
    return total(backward(model(x)))


@refused
def taken_backward_that_remembers(model: nn.Module, x: Tensor) -> Tensor:
    return total(remembers(model(x)))


class Adds(nn.Parameter):
    """Code of its own for functions of torch."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out + OTHERS.mean() if func is Tensor.mul else out


class Stands:
    """The same for what is no tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] + OTHERS.mean()


@refused
def class_of_a_parameter(model: nn.Module, x: Tensor) -> Tensor:
    return total(model(x) * model.of_a_class)


@refused
def class_that_stands_for_tensors(model: nn.Module, x: Tensor) -> Tensor:
    return total(torch.mul(model(x), Stands()))


@wrap_torch_function(lambda x: (x,))
def overridable(x: Tensor) -> Tensor:
    return x + OTHERS


@refused
def function_that_can_be_overridden(model: nn.Module, x: Tensor) -> Tensor:
    return total(overridable(model(x)))


@refused
def hooks_of_all_modules(model: nn.Module, x: Tensor) -> Tensor:
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        return total(model.b(model(x)))
    finally:
        handle.remove()


# -- exact: one user at a time ---------------------------------------------------------------------------------------


class OwnRule(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:
        return x + x.mean(dims[0], keepdim=True), dims[0]


@exact
def vmap_rule_that_mixes(model: nn.Module, x: Tensor) -> Tensor:
    return total(OwnRule.apply(model(x)))


own_rule = OwnRule.apply


@exact
def taken_vmap_rule_that_mixes(model: nn.Module, x: Tensor) -> Tensor:
    return total(Inner(own_rule)(model(x)))


class Quantised(Tensor):
    """A class with operators of its own, where those of all users come together: one scale for all."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        first, *others = (a.inner if isinstance(a, Quantised) else a for a in args)
        return func(first, *others) + first.detach().abs().amax()


@exact
def operators_of_a_class(model: nn.Module, x: Tensor) -> Tensor:
    return total(Inner(lambda h: h * model.quantised)(model(x)))


@exact
def function_that_looks_what_is_differentiable(model: nn.Module, x: Tensor) -> Tensor:
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return total(model(x))
    options, target = torch.nn.LinearCrossEntropyOptions(), torch.arange(T) % D
    return Inner(lambda h: F.linear_cross_entropy(h[0], torch.eye(D, dtype=h.dtype), target, options=options))(model(x))


class Scaled(TorchDispatchMode):
    """As quantization with one scale for a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + out.detach().amax() if func is torch.ops.aten.tanh.default else out


@exact
def dispatch_mode(model: nn.Module, x: Tensor) -> Tensor:
    def scaled(h: Tensor) -> Tensor:
        with Scaled():
            return h.tanh()

    return total(Inner(scaled)(model(x)))


@exact
def error_that_is_caught(model: nn.Module, x: Tensor) -> Tensor:
    def guess(h: Tensor) -> Tensor:
        try:
            return h * h.detach().mean().item()
        except RuntimeError:
            return h * 3

    return total(Inner(guess)(model(x)))


@exact
def error_of_one_user(model: nn.Module, x: Tensor) -> Tensor:
    def picky(h: Tensor) -> Tensor:
        if h.mean().item() > 0:
            raise ValueError("positive")
        return h * 2

    inner = Inner(picky)

    def guess(h: Tensor) -> Tensor:
        try:
            return inner(h)
        except ValueError:
            return h * 5

    return total(Inner(guess)(model(x)))


@exact
def differentiable(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x)
    return total(h * 2 if h.grad_fn is not None and not h.is_leaf else h)


@exact
def argument_as_it_came(model: nn.Module, x: Tensor) -> Tensor:
    def same(h: Tensor) -> Tensor:
        h.mean().item()
        return h

    h = model(x) * 1
    Inner(same)(h).mul_(2)
    return total(h)


class Appends(nn.Module):
    def forward(self, h: Tensor, outs: list[Tensor]) -> Tensor:
        outs.append(h * h.mean().item())
        return h


@exact
def list_that_a_module_appends_to(model: nn.Module, x: Tensor) -> Tensor:
    def both(h: Tensor) -> Tensor:
        outs: list[Tensor] = []
        return Appends()(h, outs) + sum(outs)

    return total(Inner(both)(model(x)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, form: Any) -> None:
    model, data = make()
    model.table, model.w.grad = torch.zeros(T, D, dtype=data.dtype), torch.ones(D, D, dtype=data.dtype)
    model.of_a_class = Adds(torch.ones(D, dtype=data.dtype), requires_grad=False)
    Remembers.kept.clear()
    with pytest.raises(dp.UnsupportedUse):
        form(dp.PhantomClipping(model, self_check=False), lambda user: REFUSED[name](model, user), data)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, form: Any) -> None:
    model, data = make()
    model.quantised = Quantised(torch.ones(D, dtype=data.dtype))
    model.quantised.inner = torch.ones(D, dtype=data.dtype)
    truth = naive(model, EXACT[name], data)
    norms = form(dp.PhantomClipping(model, self_check=False), lambda user: EXACT[name](model, user), data)
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-9


def _last(kept: Any, value: float) -> float:
    before, kept[0] = kept[0], value
    return float(before)


def _inner(kept: Any, value: float) -> float:
    kept["a"].append(value)
    return sum(kept["a"][:-1])


def _queue(kept: Any, value: float) -> float:
    kept.append(value)
    return sum(kept) - value


def _drawn(kept: random.Random, value: float) -> float:
    before = kept.random()
    kept.seed(value)
    return before


def _filled(kept: Tensor, value: float) -> float:
    before = kept.item()
    kept.fill_(value)
    return before


class Memory:
    def __init__(self) -> None:
        self.inside = [0.0]


def remembering() -> Callable[[float], float]:
    kept = [0.0]
    return lambda value: _last(kept, value)


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, float], float]]] = {
    "list in a dictionary": (lambda: {"a": []}, _inner),
    "list in a list": (lambda: [[0.0]], lambda kept, value: _last(kept[0], value)),
    "queue": (lambda: deque([0.0], 3), _queue),
    "array of numpy": (lambda: np.zeros(1), _last),
    "array": (lambda: array.array("d", [0.0]), _last),
    "object": (Memory, lambda kept, value: _last(kept.inside, value)),
    "variable of a function": (remembering, lambda kept, value: kept(value)),
    "generator of random numbers": (lambda: random.Random(0), _drawn),
    "tensor": (lambda: torch.zeros(()), _filled),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", KEPT)
def test_numbers_that_a_model_keeps(how: str, form: Any) -> None:
    """Where one user is computed at a time, nothing that attributes hold may carry one user's numbers to the next."""
    make_it, use = KEPT[how]
    model, data = make()
    model.kept = make_it()
    inner = Inner(lambda h: h * (1 + use(model.kept, h.mean().item())))
    with pytest.raises(dp.UnsupportedUse, match="'kept' was changed"):
        form(dp.PhantomClipping(model, self_check=False), lambda x: total(inner(model(x))), data)


def test_what_stays_as_it_was_is_not_refused() -> None:
    model, data = make()
    model.kept = [{"a": (Memory(), np.ones(2), deque([1]), remembering(), partial(_last, [0]), model.forward)}]
    model.w.kept = Memory()
    inner = Inner(lambda h: h * h.detach().mean().item())
    for _ in range(3):
        with_block(dp.PhantomClipping(model, self_check=False), lambda x: total(inner(model(x))), data)


@pytest.mark.parametrize("form", FORMS)
def test_a_replaced_tensor_that_holds_a_number(form: Any) -> None:
    def body(h: Tensor) -> Tensor:
        before, model.scale = model.scale, torch.full((D,), h.mean().item(), dtype=h.dtype)
        return h * before

    model, data = make()
    inner = Inner(body)
    with pytest.raises(dp.UnsupportedUse, match="'scale' was changed"):
        form(dp.PhantomClipping(model, self_check=False), lambda x: total(inner(model(x))), data)


@pytest.mark.parametrize("form", FORMS)
def test_a_table_made_when_it_is_needed(form: Any) -> None:
    """Each user makes its own: the first one's would hold its numbers."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        def body(h: Tensor) -> Tensor:
            number = h.detach().mean().item()
            if model.made is None:
                model.made = torch.full((), number, dtype=h.dtype)
            return h * model.made

        return total(Inner(body)(model(x)))

    model, data = make()
    truth = []
    for user in range(B):
        model.made = None
        truth += naive(model, loss, data[user : user + 1])
    model.made = None
    norms = form(dp.PhantomClipping(model, self_check=False), lambda x: loss(model, x), data)
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)
    assert model.made is None


def test_an_error_outside_modules_is_not_passed_over() -> None:
    def loss(x: Tensor) -> Tensor:
        h = model(x)
        try:
            return total(h * h.detach().mean().item())
        except RuntimeError:
            return total(h)

    model, data = make()
    with (
        pytest.raises(dp.UnsupportedUse, match="goes on after an error"),
        dp.PhantomClipping(model).users(data) as user,
    ):
        loss(user)
    truth = naive(model, lambda _, x: loss(x), data)
    norms = dp.PhantomClipping(model).accumulate(loss, data, dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=0)


def test_data_written_before_it_is_computed_one_user_at_a_time() -> None:
    def loss(x: Tensor) -> Tensor:
        x.add_(1)
        return total(model(x)) * x.mean().item()

    model, data = make()
    with pytest.raises(dp.UnsupportedUse, match="clone"):
        dp.PhantomClipping(model).accumulate(loss, data, dp.normalize(1.0))


def test_public_tensor_written_outside() -> None:
    """A tensor that the model made is the same for all users only while nobody else writes into it."""

    def loss(x: Tensor) -> Tensor:
        if model.cache is None:
            model.cache = torch.zeros(T, D, dtype=x.dtype)
        return total(model(x) + model.cache)

    model, data = make()
    clipping = dp.PhantomClipping(model)
    for _ in range(2):
        clipping.accumulate(loss, data, dp.normalize(1.0))
    model.cache += data.mean(0)
    with pytest.raises(dp.UnsupportedUse, match="past"):
        clipping.accumulate(loss, data, dp.normalize(1.0))


def test_public_tensors_written_part_by_part() -> None:
    """As tables of positions are made: views that share their memory."""

    def loss(x: Tensor) -> Tensor:
        if model.cache is None:
            table = torch.zeros(T, D, dtype=x.dtype)
            for row in table.unbind(0):
                row.fill_(0.5)
            first = table.chunk(2)[0]
            first.mul_(2)
            table[:, 0::2] = 3
            model.cache = table, table.chunk(2)[1]
        return total(model(x) + model.cache[0]) + total(model(x)[:, :2] + model.cache[1])

    model, data = make()
    for _ in range(2):
        dp.PhantomClipping(model).accumulate(loss, data, dp.normalize(1.0))
