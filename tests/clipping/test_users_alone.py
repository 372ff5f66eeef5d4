"""Inside `accumulate` the engine compares users together with users alone, outside of everything that it intercepts."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer import compat
from dpformer.clipping import engine as engine_module
from tests.clipping.naive import clipped_sum, norms_of, one_at_a_time, relative_error, sums
from tests.clipping.problems import PROBLEMS, Problem

USERS, D = 6, 5


class Model(nn.Module):
    """With all that draws random numbers."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.rnn = nn.GRU(D, D, 2, dropout=dropout, batch_first=True)
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.rnn(x)[0]) + 0.1 * torch.randn_like(x)
        h = h * torch.empty_like(h).bernoulli_(0.7) + torch.rand(())
        return self.out(h).square().mean((1, 2))


def data() -> Tensor:
    return torch.randn(USERS, 4, D)


def test_random_numbers_are_no_reason_to_refuse() -> None:
    model, x = Model(), data()
    clipping = dp.PhantomClipping(model)
    state = torch.get_rng_state()
    clipping.accumulate(model, x, dp.clip(1.0))
    checked = [g.clone() for g in sums(model)]
    model.zero_grad()
    torch.set_rng_state(state)
    dp.PhantomClipping(model, self_check=False).accumulate(model, x, dp.clip(1.0))
    assert all(torch.equal(a, b) for a, b in zip(checked, sums(model), strict=True)), "the check has drawn numbers"


def remembers(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A list that Python carries from user to user: computed one at a time, which looks at modules only."""
    seen: list[float] = []

    def loss_of(user: Tensor) -> Tensor:
        seen.append(user.abs().mean().item())
        return model(user) * (sum(seen) / len(seen))

    return loss_of


def counts(model: nn.Module) -> Callable[[Tensor], Tensor]:
    calls: list[int] = []

    def loss_of(user: Tensor) -> Tensor:
        calls.append(1)
        return model(user) * len(calls)

    return loss_of


def looks_where_it_is(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Another number inside vmap than outside."""
    return lambda user: model(user) * (1.0 if compat.is_batchedtensor(user) else 1.1)


class WrongBackward(torch.autograd.Function):
    """Right inside the engine alone: the gradient looks where it is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.inside = bool(compat.function_modes())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if ctx.inside else 2 * grad


def goes_back_otherwise(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda user: WrongBackward.apply(model(user))


@pytest.mark.filterwarnings("ignore:.*one user at a time")
@pytest.mark.parametrize("form", [remembers, counts, looks_where_it_is, goes_back_otherwise])
def test_caught_on_the_first_batch(form: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    model = Model(0.0)
    with pytest.raises(dp.UnsupportedUse, match="alone and outside of it"):
        dp.PhantomClipping(model).accumulate(form(model), data(), dp.clip(1.0))
    assert all(p.grad is None for p in model.parameters()), "refused before anything is added"
    dp.PhantomClipping(model, self_check=False).accumulate(form(model), data(), dp.clip(1.0))


def test_caught_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins after the first batch is found at random."""
    model, begun = Model(0.0), []
    seen: list[float] = []

    def loss_of(user: Tensor) -> Tensor:
        if begun:
            seen.append(1.0)
        return model(user) * (1 + len(seen))

    clipping = dp.PhantomClipping(model)
    clipping.accumulate(loss_of, data(), dp.clip(1.0))
    begun.append(True)
    monkeypatch.setattr(engine_module, "due", lambda: False)
    clipping.accumulate(loss_of, data(), dp.clip(1.0))
    monkeypatch.setattr(engine_module, "due", lambda: True)
    with pytest.raises(dp.UnsupportedUse, match="alone and outside of it"):
        clipping.accumulate(loss_of, data(), dp.clip(1.0))


def test_one_user_at_a_time_draws_the_same_numbers_for_each() -> None:
    class Jitter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x[x.abs() > -1].view(x.shape)  # cannot be batched
            return self.out(x * torch.rand_like(x)) * torch.rand(()) * torch.randn(3)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Jitter()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).square().mean((1, 2)) * torch.rand(())

    model = Outer()
    clipping = dp.PhantomClipping(model)
    with pytest.warns(UserWarning, match="one user at a time"):
        clipping.accumulate(model, data(), dp.clip(1.0))
    assert clipping.fallbacks == {"Jitter": 1}, "the check is not counted"


@pytest.mark.parametrize("together", [True, False])
def test_sums_are_exact_beside_the_check(together: bool) -> None:
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def loss_of(user: Tensor) -> Tensor:
        scale = 1.0 if together else float(user.sum()) ** 2
        return model(user).square().mean((1, 2)) * scale

    x = data().double()
    parameters = list(model.parameters())
    truth = [list(torch.autograd.grad(loss_of(x[i : i + 1])[0], parameters)) for i in range(USERS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        norms = dp.PhantomClipping(model).accumulate(loss_of, x, dp.clip(0.5))
    torch.testing.assert_close(norms.double(), norms_of(truth))
    assert relative_error(sums(model), clipped_sum(truth, dp.clip(0.5))) < 1e-9


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_no_model_that_is_right_is_refused(problem: Problem, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = problem.make().to(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in problem.batch())
    clipping = dp.PhantomClipping(model)
    clipping.accumulate(lambda user: model(*user), batch, dp.normalize(1.0))
    assert clipping._compared_alone >= 2


class Half(nn.Module):
    """Every kind of rule; numbers of the model itself are in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.scale = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Parameter(0.1 * torch.randn(8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.conv, self.rnn = nn.Conv1d(8, 8, 3, padding=1), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.encoder(self.table(x)) * self.scale.exp())
        h = h + self.conv(h.mT).mT
        h = h + self.rnn(h)[0]
        logits = F.linear(h[:, :-1], self.table.weight)  # tied
        return F.cross_entropy(logits.float().mT, x[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_a_model_in_half_precision(dtype: torch.dtype, rounding: float) -> None:
    torch.manual_seed(0)
    model, x = Half().to(dtype), torch.randint(0, 11, (USERS, 5))
    norms = dp.PhantomClipping(model).accumulate(model, x, dp.clip(1.0))
    exact = Half().double()
    exact.load_state_dict(model.state_dict())
    torch.testing.assert_close(norms.double(), norms_of(one_at_a_time(exact, (x,))), rtol=rounding, atol=0)


@pytest.mark.parametrize("name", ["LoraConfig", "IA3Config", "PromptTuningConfig"])
def test_adapters_of_peft(name: str) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=30, n_positions=20, n_embd=16, n_layer=2, n_head=2)
    options: dict[str, dict[str, Any]] = {
        "LoraConfig": {"r": 2, "target_modules": ["c_attn"], "lora_dropout": 0.2, "fan_in_fan_out": True},
        "IA3Config": {"target_modules": ["c_attn"], "feedforward_modules": [], "fan_in_fan_out": True},
        "PromptTuningConfig": {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"},
    }
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), getattr(peft, name)(**options[name]))
    x = torch.randint(0, 30, (USERS, 7))

    def loss_of(user: Tensor) -> Tensor:
        logits = model(input_ids=user, use_cache=False).logits[:, -7:-1]
        return F.cross_entropy(logits.mT, user[:, 1:], reduction="none").mean(1)

    model.train()
    clipping = dp.PhantomClipping(model)
    clipping.accumulate(loss_of, x, dp.clip(1.0))
    assert clipping._compared_alone == USERS and not clipping.fallbacks
