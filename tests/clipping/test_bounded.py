"""A private step is taken on bounded gradients only. Each test is a way to get around that which once worked."""

import copy
import io
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping.bounded_sum import bound_of, joint_bound, put_bounded, sum_of
from dpformer.kernels import native

X, Y = torch.randn(6, 5), torch.randint(0, 3, (6,))


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def private(parameters: Any, **options: Any) -> dp.PrivateOptimizer:
    settings = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": 6.0} | options
    return dp.PrivateOptimizer(torch.optim.SGD(parameters, lr=0.1), **settings)


def losses_of(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def clipped(model: nn.Module, clip: dp.clipping.ClipFunction | None = None) -> None:
    clipping = dp.PhantomClipping(model)
    with clipping.users((X, Y)) as user:
        losses = losses_of(model, *user)
    clipping.backward(losses, clip or dp.clip(1.0))


def refuses(optimizer: dp.PrivateOptimizer, words: str = "not a sum that PhantomClipping has bounded") -> None:
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(ValueError, match=words):
        optimizer.step()
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert optimizer.steps == 0 and all(map(torch.equal, before, after)), "a refused step must change nothing"


def test_a_bounded_gradient_is_taken() -> None:
    model = model_of()
    optimizer = private(model.parameters())
    for parts in (1, 3):
        for _ in range(parts):
            clipped(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=parts == 1)  # zeros left behind by zero_grad are bounded too
    optimizer.step()  # an empty batch
    assert optimizer.steps == 3


# The attacks.


def test_plain_backward() -> None:
    model = model_of()
    losses_of(model).sum().backward()
    refuses(private(model.parameters()))


def test_plain_backward_on_top_of_a_clipped_one() -> None:
    model = model_of()
    clipped(model)
    losses_of(model).sum().backward()
    refuses(private(model.parameters()))


def test_a_clipped_backward_on_top_of_a_plain_one() -> None:
    model = model_of()
    losses_of(model).sum().backward()
    clipped(model)
    refuses(private(model.parameters()))


def test_a_step_on_what_the_last_step_left() -> None:
    """Without zero_grad the noisy mean of the last batch is in the next sum."""
    model = model_of()
    optimizer = private(model.parameters())
    clipped(model)
    optimizer.step()
    clipped(model)
    with pytest.raises(ValueError, match="zero_grad"):
        optimizer.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.grad.mul_(100),
        lambda p: p.grad.data.mul_(100),  # leaves the version as it is
        lambda p: p.grad.detach().mul_(100),
        lambda p: p.grad.numpy().__imul__(100),
        lambda p: setattr(p, "grad", p.grad * 100),
        lambda p: setattr(p, "grad", p.grad.clone()),
        lambda p: setattr(p, "grad", copy.deepcopy(p.grad)),
        lambda p: nn.utils.clip_grad_value_([p], 0.001),
    ],
    ids=["mul", "data.mul", "detach.mul", "numpy", "replaced", "cloned", "copied", "clip_grad_value"],
)
@pytest.mark.parametrize("again", [False, True], ids=["", "then another part"])
def test_a_gradient_changed_after_clipping(change: Any, again: bool) -> None:
    model = model_of()
    clipped(model)
    change(model[0].weight)
    if again:
        clipped(model)
    refuses(private(model.parameters()))


def test_scaled_and_unscaled_for_half_precision() -> None:
    model = model_of()
    clipped(model)
    torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], 1.5)
    refuses(private(model.parameters()))


def test_a_bare_tensor() -> None:
    """It is no part of the model, so nobody clips what flows to it."""
    model, shift = model_of(), torch.zeros(3, requires_grad=True)
    clipping = dp.PhantomClipping(model)
    with pytest.raises(dp.UnsupportedUse, match="neither the model's nor the user's"), clipping.users((X, Y)) as (x, y):
        F.cross_entropy(model(x) + shift, y)


def test_a_head_used_outside_the_context() -> None:
    model, head = model_of(), nn.Linear(3, 3)
    nn.init.normal_(head.weight, std=1000)
    clipping = dp.PhantomClipping(model)
    with (
        pytest.raises(dp.UnsupportedUse, match="neither the model's nor the user's"),
        clipping.users((X, Y)) as (x, y),
    ):
        F.cross_entropy(head(model(x)), y)


def test_two_halves_clipped_apart() -> None:
    """C each is √2·C together."""
    model = model_of()
    for half, frozen in ((model[0], model[2]), (model[2], model[0])):
        frozen.requires_grad_(False)
        clipped(model)
        frozen.requires_grad_(True)
        assert half.weight.grad is not None
    refuses(private(model.parameters()), "clipped apart")


def test_more_than_the_noise_is_for() -> None:
    model = model_of()
    clipped(model, dp.clip(1.0))
    clipped(model, dp.clip(1.5))  # either of two parts
    clipped(model, dp.clip(1.0))
    refuses(private(model.parameters()), r"clipped to 1\.5.*clip_norm=1\.0")
    private(model.parameters(), clip_norm=1.5).step()


@pytest.mark.parametrize("bound", [None, 0.0, float("nan"), "1"])
def test_a_clip_function_without_a_bound(bound: Any) -> None:
    def keep(norms: Tensor) -> Tensor:
        return torch.ones_like(norms)

    if bound is not None:
        keep.clip_norm = bound  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="clip_norm"):
        clipped(model_of(), keep)  # type: ignore[arg-type]


def test_trainer_of_hugging_face(tmp_path: Any) -> None:
    """It runs its own `loss.backward()`, once to the end and to a claim of ε = 4.999."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            return {"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i}

    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = private(model.parameters())
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, arguments, train_dataset=Data(), optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="Trainer"):
        trainer.train()
    assert optimizer.steps == 0


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = model_of()
    optimizer = private(model.parameters())
    model, wrapped = accelerator.prepare(model, optimizer)
    accelerator.backward(losses_of(model).mean())
    with pytest.raises(ValueError, match="not a sum that PhantomClipping has bounded"):
        wrapped.step()
    assert optimizer.steps == 0


# What is allowed, and says so.


def test_clipped_by_the_caller() -> None:
    model = model_of()
    losses_of(model).sum().backward()
    optimizer = private(model.parameters(), assume_clipped=True)
    optimizer.step()
    event = optimizer.event(0.1)
    assert "assumed, not checked" in event.label and "assumed, not checked" in optimizer.description
    assert "assumed, not checked" in str(dp.Ledger([event]).to_json())
    other = private(model_of().parameters())
    other.step(dp.PoissonBatches(6, 1e-9, 1).batch(0))
    assert "assumed" not in other.event().label


def test_without_noise_nothing_is_promised_and_nothing_refused() -> None:
    model = model_of()
    losses_of(model).sum().backward()
    private(model.parameters(), noise_multiplier=0.0).step()


def test_sums_made_elsewhere() -> None:
    """Micro-batches and processes add up; the mark is put on by hand, and holds for that sum only."""
    model = model_of()
    parameters = list(model.parameters())
    clipped(model)
    sums = [sum_of(p).double() * 2 for p in parameters]  # type: ignore[union-attr]
    assert joint_bound(parameters) == 1.0
    put_bounded(parameters, sums, 1.0)
    assert joint_bound(parameters) == 1.0
    torch.testing.assert_close(model[0].weight.grad, sums[0].float())
    model[0].weight.grad.add_(1)
    with pytest.raises(ValueError, match="changed since"):
        joint_bound(parameters)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "in Python"])
def test_a_bounded_sum_that_is_not_finite_is_refused(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "kernels", None)
    model = model_of()
    parameters = list(model.parameters())
    put_bounded(parameters, [torch.full_like(p, float("inf") if n else 1.0) for n, p in enumerate(parameters)], 1.0)
    with pytest.raises(ValueError, match="not finite"):
        private(parameters).step()


def test_a_gradient_can_be_saved() -> None:
    model = model_of()
    clipped(model)
    file = io.BytesIO()
    torch.save(model[0].weight.grad, file)
    file.seek(0)
    model[0].weight.grad = torch.load(file, weights_only=False)
    assert bound_of(model[0].weight) is None


# Half precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_600th_user_in_half_precision(dtype: torch.dtype) -> None:
    """In bfloat16 a sum of 600 users has steps of 4 users: one more user would change nothing, or four times C."""
    users = 600

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.w).sum(1)

    model = Mean()
    optimizer = private(model.parameters(), expected_batch_size=1.0, noise_multiplier=1e-9)
    clipping = dp.PhantomClipping(model)
    x, totals = torch.ones(1, 1, dtype=dtype), []
    for _ in range(users):
        with clipping.users(x) as user:
            losses = model(user)
        clipping.backward(losses, dp.clip(1.0))
        totals.append(float(sum_of(model.w)))  # type: ignore[arg-type]
    optimizer.step()
    assert model.w.grad is not None and model.w.grad.dtype == dtype
    assert totals[-1] == pytest.approx(users, rel=1e-5)
    assert max(after - before for before, after in pairwise(totals)) <= 1 + 1e-4


def test_noise_is_added_to_the_wide_sum() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = private(model.parameters(), noise_multiplier=1e-9, expected_batch_size=600.0)
    clipping, x = dp.PhantomClipping(model), torch.ones(1, 1, dtype=torch.bfloat16)
    for _ in range(600):
        with clipping.users(x) as user:
            losses = model(user)[:, 0]
        clipping.backward(losses, dp.clip(1.0))
    optimizer.step()
    assert float(model.weight.grad) == 1.0  # type: ignore[arg-type]


def test_the_statement_says_what_was_assumed() -> None:
    from dpformer.accounting.events import ASSUMED_CLIPPED as ASSUMED
    from dpformer.statement.build import words

    facts = {
        "epsilon": 1.0, "delta": 1e-5, "unit": "user", "steps": 0, "private": True,
        "events": [{"label": f"training ({ASSUMED})", "kind": "poisson_gaussian"}],
    }  # fmt: skip
    assert any("assumed, not checked" in sentence for sentence in words(facts))
