"""How the engine behaves around the rules: odd users, odd batches, precision, memory, mistakes put in on purpose."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dpformer as dp
from dpformer.clipping import parameter_norms as norms_module
from dpformer.clipping.uses import pairs
from dpformer.compat import physical
from dpformer.models import softmax_head as head_module
from tests.clipping.naive import clipped_sum, engine, norms_of, one_at_a_time, relative_error, sums
from tests.clipping.problems import B, T, TiedByFunction, TiedHead, V, next_token_loss, per_user


def small() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return TiedByFunction().double(), torch.randint(0, V, (B, T))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return per_user(self.b(torch.tanh(self.a(x))))


def test_two_backwards_before_a_step_accumulate() -> None:
    model, x = small()
    engine(model, (x[:1],), dp.normalize(1.0))
    first = [g.clone() for g in sums(model)]
    clipping = dp.PhantomClipping(model)
    with clipping.users(x[1:]) as user:
        losses = model(user)
    clipping.backward(losses, dp.normalize(1.0))
    both = [g.clone() for g in sums(model)]
    engine(model, (x[1:],), dp.normalize(1.0))
    assert relative_error(both, [a + b for a, b in zip(first, sums(model), strict=True)]) < 1e-12


@pytest.mark.parametrize("kind", [TiedByFunction, TiedHead])
def test_an_empty_batch_leaves_no_gradient(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randint(0, V, (B, T))
    norms = dp.PhantomClipping(model).accumulate(model, x[:0], dp.normalize(1.0))
    assert norms.shape == (0,)
    assert all(float(g.abs().sum()) == 0 for g in sums(model))


def test_frozen_and_unused_parameters() -> None:
    model = Tiny().double()
    model.a.weight.requires_grad_(False)
    x = torch.randn(5, 3, dtype=torch.float64)
    truth = one_at_a_time(model, (x,))
    norms = engine(model, (x,), dp.clip(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-12, atol=0)
    assert model.a.weight.grad is None and model.unused.weight.grad is None


def test_freezing_between_batches_is_seen() -> None:
    model = Tiny().double()
    x = torch.randn(5, 3, dtype=torch.float64)
    clipping = dp.PhantomClipping(model)
    for frozen in (False, True):
        model.a.weight.requires_grad_(not frozen)
        with clipping.users(x) as user:
            losses = model(user)
        norms = clipping.backward(losses, dp.clip(1.0))
        torch.testing.assert_close(norms, norms_of(one_at_a_time(model, (x,))), rtol=1e-12, atol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e200])
@pytest.mark.parametrize("gram", [True, False])
def test_a_poisoned_user_contributes_nothing(poison: float, gram: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50) if gram else nn.Linear(40, 2), nn.LayerNorm(50 if gram else 2))
    model.double()
    x = torch.randn(4, 3, 40, dtype=torch.float64)
    clean = [g.clone() for g in (engine(_Losses(model), (x[[0, 1, 3]],), dp.normalize(1.0)), sums(model))[1]]
    x[2, 1] = poison
    wrapped = _Losses(model)
    wrapped.zero_grad()
    clipping = dp.PhantomClipping(wrapped)
    with clipping.users(x) as user:
        losses = wrapped(user)
    norms = clipping.backward(losses, dp.normalize(1.0))
    if not torch.isfinite(norms[2]):
        assert clipping.skipped_users == 1
        assert relative_error(sums(model), clean) < 1e-12
    assert all(bool(torch.isfinite(g).all()) for g in sums(model))


class _Losses(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().flatten(1).sum(1)


@pytest.mark.parametrize("keep", [head_module.KEEP, 1], ids=["residuals kept", "computed again"])
def test_a_poisoned_user_in_the_tied_head(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "KEEP", keep)
    torch.manual_seed(0)

    class Model(TiedHead):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(V))

        def forward(self, x: Tensor, gain: Tensor) -> Tensor:
            h = self.hidden(x[:, :-1]) * gain[:, None, None]
            return dp.softmax_loss(h, self.e.weight, x[:, 1:], bias=self.bias)

    model, x = Model().double(), torch.randint(0, V, (B, T))
    gain = torch.ones(B, dtype=torch.float64)
    engine(model, (x[1:], gain[1:]), dp.normalize(1.0))
    clean = [g.clone() for g in sums(model)]
    gain[0] = float("inf")
    model.zero_grad()
    clipping = dp.PhantomClipping(model)
    with clipping.users((x, gain)) as user:
        losses = model(*user)
    clipping.backward(losses, dp.normalize(1.0))
    assert clipping.skipped_users == 1
    assert relative_error(sums(model), clean) < 1e-12


def test_dropout_has_one_mask() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    wrapped, x = _Losses(model), torch.randn(4, 5, 6, dtype=torch.float64)
    torch.manual_seed(1)
    plain = wrapped(x)
    parameters = list(model.parameters())
    truth = [list(torch.autograd.grad(plain[i], parameters, retain_graph=True)) for i in range(4)]
    torch.manual_seed(1)
    norms = engine(wrapped, (x,), dp.clip(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-12, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.clip(1.0))) < 1e-12


def test_autocast_to_bfloat16() -> None:
    torch.manual_seed(0)
    model = TiedHead()
    x = torch.randint(0, V, (B, T))
    truth = norms_of(one_at_a_time(model, (x,)))
    clipping = dp.PhantomClipping(model)
    with clipping.users(x) as user, torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(user)
    norms = clipping.backward(losses, dp.normalize(1.0))
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, truth, rtol=5e-2, atol=0)
    assert model.e.weight.grad is not None and model.e.weight.grad.dtype == torch.float32


def test_a_model_in_bfloat16_accumulates_norms_in_float32() -> None:
    """256 equal squares: bfloat16 would stop counting at 256 + 1 = 256."""
    model = _Losses(nn.Linear(64, 1, bias=False)).bfloat16()
    x = torch.ones(2, 40, 64, dtype=torch.bfloat16)
    norms = engine(model, (x,), dp.normalize(1.0))
    exact = norms_of(one_at_a_time(model.double(), (x.double(),)))
    torch.testing.assert_close(norms.double(), exact, rtol=2e-2, atol=0)


def test_the_self_check_frees_the_graph_as_a_backward_pass_does() -> None:
    """Losses that are kept until the next forward pass would keep two graphs."""
    model, x = small()
    clipping = dp.PhantomClipping(model)
    with clipping.users(x) as user:
        losses = model(user)
    clipping.backward(losses, dp.normalize(1.0))
    assert clipping._compared
    with pytest.raises(RuntimeError, match="a second time"):
        physical(losses).sum().backward()


def test_hooks_of_a_model_are_not_called_without_a_gradient() -> None:
    torch.manual_seed(0)
    model, x = Tiny(), torch.randn(B, 3)
    seen: list[Tensor] = []

    def watch(_module: nn.Module, _given: object, out: Tensor) -> None:
        out.register_hook(seen.append)

    model.a.register_forward_hook(watch)
    engine(model, (x,), dp.normalize(1.0))
    expected = clipped_sum(one_at_a_time(model, (x,)), dp.normalize(1.0))
    assert relative_error(sums(model), expected) < 1e-5
    assert seen and all(isinstance(gradient, Tensor) for gradient in seen)


class _Counts(torch.autograd.Function):
    largest: ClassVar[list[float]] = []

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        _Counts.largest.append(float(gradient.abs().max()))
        return gradient


def test_functions_of_a_model_are_not_called_with_zeros() -> None:
    torch.manual_seed(0)
    model, x = Tiny(), torch.randn(B, 3)
    model.a.register_forward_hook(lambda _module, _given, out: _Counts.apply(out))
    engine(model, (x,), dp.normalize(1.0))
    assert _Counts.largest and min(_Counts.largest) > 0


@pytest.mark.parametrize("before", [None, 3.0])
def test_the_self_check_leaves_gradients_of_inputs_alone(before: float | None) -> None:
    torch.manual_seed(0)
    model, x = Tiny(), torch.randn(B, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    if before is not None:
        x.grad, expected = torch.full_like(x, before), expected + before
    engine(model, (x,), dp.normalize(1.0))
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_head_agrees_with_cross_entropy(weighted: bool) -> None:
    """Outside the context it is an ordinary differentiable function."""
    torch.manual_seed(0)
    h = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    w, b = (
        torch.randn(7, 5, dtype=torch.float64, requires_grad=True),
        torch.randn(7, dtype=torch.float64, requires_grad=True),
    )
    targets = torch.tensor([[1, 2, -1, 0], [-1, -1, -1, -1], [6, 6, 6, 6]])
    weights = torch.rand(3, 4, dtype=torch.float64) + 0.1 if weighted else None
    losses = dp.softmax_loss(h, w, targets, bias=b, position_weights=weights)
    each = F.cross_entropy(F.linear(h, w, b).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    counted = (targets >= 0) * (1.0 if weights is None else weights)
    expected = (each.view(3, 4) * counted).sum(1) / counted.sum(1).clamp(min=1e-9)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-14)
    scale = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    ours = torch.autograd.grad((losses * scale).sum(), (h, w, b))
    theirs = torch.autograd.grad((expected * scale).sum(), (h, w, b))
    for a, c in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        (torch.ones(2, 3), r"position weights of shape \(2, 4\), got \(2, 3\)"),
        (torch.zeros(2, 4), "above 0 wherever there is a target"),
        (torch.full((2, 4), float("nan")), "above 0 wherever there is a target"),
        (torch.full((2, 4), float("inf")), "finite position weights"),
        (torch.full((2, 4), 1e-60, dtype=torch.float64), "above 0 wherever there is a target"),
        (torch.ones(2, 4, requires_grad=True), "not trained"),
    ],
)
def test_position_weights_that_are_refused(weights: Tensor, sentence: str) -> None:
    """Weights that are trained would need a gradient that nobody clips."""
    with pytest.raises(ValueError, match=sentence):
        dp.softmax_loss(torch.randn(2, 4, 5), torch.randn(7, 5), torch.ones(2, 4).long(), position_weights=weights)


class _Largest(TorchDispatchMode):
    """The most numbers that any tensor made in the block owns."""

    __module__ = "torch.testing"  # another mode would have users computed one at a time
    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_the_head_never_holds_all_users_gradients_nor_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "TILE", 2000)
    monkeypatch.setattr(head_module, "KEEP", 4000)
    monkeypatch.setattr(norms_module, "KEEP", 40_000)
    torch.manual_seed(0)
    users, length, items, width = 16, 10, 1000, 8
    embedding = nn.Embedding(items, width).double()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = embedding

        def forward(self, x: Tensor) -> Tensor:
            return dp.softmax_loss(torch.tanh(self.e(x[:, :-1])), self.e.weight, x[:, 1:])

    model, x = Model(), torch.randint(0, items, (users, length + 1))
    truth = one_at_a_time(model, (x,))
    with _Largest() as largest:
        norms = engine(model, (x,), dp.normalize(1.0), self_check=False)
    assert largest.numbers < users * length * items // 2
    assert largest.numbers < users * items * width // 2
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-10, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-10


@settings(max_examples=60)
@given(
    users=st.integers(1, 6),
    length=st.integers(2, 9),
    items=st.integers(1, 7),
    width=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    budget=st.sampled_from([1, 50, 1 << 20]),
)
def test_tied_model_over_shapes(users: int, length: int, items: int, width: int, seed: int, budget: int) -> None:
    """Any shape, any lengths (also users without a target), repeated items, any budget of memory."""
    torch.manual_seed(seed)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.p = nn.Embedding(items, width), nn.Parameter(torch.randn(length, width))
            self.mix, self.ln, self.bias = (
                nn.Linear(width, width),
                nn.LayerNorm(width),
                nn.Parameter(torch.randn(items)),
            )

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            h = self.ln(self.mix(self.e(x) + self.p).cumsum(1) + self.p)
            return dp.softmax_loss(h, self.e.weight, targets, bias=self.bias) + 0.1 * per_user(h)

    model = Model().double()
    x = torch.randint(0, items, (users, length))
    lengths = torch.randint(0, length + 1, (users, 1))
    targets = torch.where(torch.arange(length) < lengths, torch.randint(0, items, (users, length)), -1)
    truth = one_at_a_time(model, (x, targets))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "KEEP", budget)
        patch.setattr(head_module, "TILE", budget)
        patch.setattr(norms_module, "KEEP", budget)
        norms = engine(model, (x, targets), dp.normalize(1.0))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-8, atol=1e-9)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-8


@settings(max_examples=60)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3), kept=st.integers(0, 7), users=st.integers(1, 5))
def test_broadcasting_over_shapes(shape: list[int], kept: int, users: int) -> None:
    """A parameter with any of its dimensions of size one, and any leading ones left out."""
    torch.manual_seed(kept)
    own = [n if kept >> i & 1 else 1 for i, n in enumerate(shape)]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q = nn.Parameter(torch.randn(own)), nn.Parameter(torch.randn(1, *own))

        def forward(self, x: Tensor) -> Tensor:
            return per_user(torch.tanh(x * self.p + self.q) - self.p)

    model = Model().double()
    x = torch.randn(users, *shape, dtype=torch.float64)
    truth = one_at_a_time(model, (x,))
    norms = engine(model, (x,), dp.clip(0.5))
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-9, atol=1e-12)


# -- mistakes put in on purpose: the self-check must stop the run -----------------------------------------------------


def test_a_missing_cross_term_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The silent error of Opacus, fastDP and private-transformers on a functionally tied head."""
    monkeypatch.setattr(norms_module, "reach", lambda uses: float("inf"))
    monkeypatch.setitem(pairs.PAIRS, (pairs.Outer, pairs.Lookup), lambda outer, lookup: torch.zeros(len(lookup.ids)))
    model, x = small()
    with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
        engine(model, (x,), dp.normalize(1.0))


def test_a_wrong_lookup_norm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated items taken for different ones."""
    monkeypatch.setattr(norms_module, "reach", lambda uses: float("inf"))
    monkeypatch.setitem(pairs.SQUARED, pairs.Lookup, lambda use: use.grad.square().sum((1, 2)))
    model, _ = small()
    with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
        engine(model, (torch.full((B, T), 3),), dp.normalize(1.0))


def test_a_wrong_sum_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_module.ParameterUses, "add_sum", lambda self, c, out: None)
    model, x = small()
    with pytest.raises(dp.UnsupportedUse, match="disagrees with autograd"):
        engine(model, (x,), dp.normalize(1.0))


def test_gram_and_written_out_agree_where_parts_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two uses that nearly cancel leave a Gram norm few digits: the engine then writes the gradient out."""
    monkeypatch.setattr(norms_module, "reach", lambda uses: float("inf"))
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(30, 20))

        def forward(self, x: Tensor) -> Tensor:
            return (F.linear(x, self.w) - F.linear(x * (1 + 1e-4), self.w)).sum((1, 2))

    model, x = Model(), torch.randn(4, 3, 20)
    exact = norms_of(one_at_a_time(Model().double(), (x.double(),)))
    norms = engine(model, (x,), dp.normalize(1.0))
    torch.testing.assert_close(norms.double(), exact, rtol=2e-3, atol=0)


def test_next_token_loss_of_the_tests_is_per_user() -> None:
    logits, x = torch.randn(3, 4, V), torch.randint(0, V, (3, 4))
    torch.testing.assert_close(next_token_loss(logits, x)[1:2], next_token_loss(logits[1:2], x[1:2]))
