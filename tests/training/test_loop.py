"""The step against a naive twin: one user at a time, float64, plain autograd, noise taken from the optimiser."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpformer.clipping import normalize
from dpformer.data import Dataset
from dpformer.errors import DpformerError
from dpformer.kinds.network import build_model, make_trainer
from dpformer.models import Batch as Rows
from dpformer.noise import SecureRandom
from dpformer.runs.config import Config
from dpformer.sampling.batch import Batch, Due
from dpformer.training.gradient_sum import out_of_memory
from dpformer.training.plan import Plan
from dpformer.training.trainer import Step, Trainer

USERS, ITEMS, LENGTH = 40, 25, 8


def dataset_of(lengths: list[int] | None = None) -> Dataset:
    rng = np.random.default_rng(0)
    lengths = lengths if lengths is not None else rng.integers(1, 14, USERS).tolist()
    return Dataset.from_histories([rng.integers(0, ITEMS, n) for n in lengths], ITEMS, max_length=LENGTH)


def trainer_of(dataset: Dataset | None = None, dtype: torch.dtype = torch.float64, **choices: Any) -> Trainer:
    dataset = dataset or dataset_of()
    defaults = {"dropout": 0.0, "dim": 8, "blocks": 1, "max_length": LENGTH, "batch_size": 10, "epochs": 2, "seed": 1}
    config = Config.make(**{**defaults, **choices}).resolve(users=dataset.num_users, threads=1)
    noise = 1.3 if config.private else 0.0
    steps = math.ceil(config.epochs * dataset.num_users / 10)
    plan = Plan(dataset.num_users, 10, steps, config.epsilon, 1e-3, config.clip_norm, noise, (), False)
    random = SecureRandom("test", seed=3)
    frequencies = torch.full((ITEMS,), 0.2, dtype=torch.float64)
    model = build_model(config, plan, ITEMS, frequencies, random).to(dtype)
    return make_trainer(config, plan, dataset, model, random)


def loss_of(step: Step) -> float:
    return float(torch.cat([part.losses for part in step.parts]).mean())


def gradients(trainer: Trainer) -> list[Tensor]:
    return [p.grad.clone() for p in trainer.parameters if p.grad is not None]


def naive_sum(trainer: Trainer, users: np.ndarray, factor: Callable[[Tensor], Tensor]) -> list[Tensor]:
    total = [torch.zeros_like(p) for p in trainer.parameters]
    for user in users.tolist():
        batch = Rows.from_histories([trainer.users.train(user)], LENGTH)
        loss = trainer.model(batch).sum()
        if not loss.requires_grad:
            continue
        grads = torch.autograd.grad(loss, trainer.parameters, allow_unused=True)
        known = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, trainer.parameters, strict=True)]
        norm = torch.stack([g.square().sum() for g in known]).sum().sqrt()
        for t, g in zip(total, known, strict=True):
            t += factor(norm[None])[0] * g
    return total


def of(trainer: Trainer, users: np.ndarray, due: Due | None = None) -> Batch:
    """A batch that nobody drew."""
    return Batch(users, 0, trainer.batches.origin, due)


@pytest.mark.parametrize("tokens", [1, 11, 10_000])
def test_the_sum_is_of_clipped_users_whatever_the_micro_batches(tokens: int) -> None:
    trainer = trainer_of(micro_batch_tokens=tokens)
    users = np.arange(USERS)
    trainer.add_gradients(of(trainer, users))
    for ours, naive in zip(gradients(trainer), naive_sum(trainer, users, normalize(1.0)), strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("noise_by_step")
def test_a_step_is_the_noisy_sum_over_the_expected_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, twin = trainer_of(seed=2), trainer_of(seed=2)
    users = twin.batches.draw(0)
    total = naive_sum(twin, users, normalize(1.0))
    noise = twin.optimizer._noise(twin.parameters, twin.optimizer._random)
    seen: list[list[Tensor]] = []
    inner = trainer.optimizer.inner.step
    monkeypatch.setattr(trainer.optimizer.inner, "step", lambda: (seen.append(gradients(trainer)), inner()))
    record = trainer.advance()
    for ours, t, z in zip(seen[0], total, noise, strict=True):
        assert z is not None
        torch.testing.assert_close(
            ours, (t + 1.3 * z.all().view(t.shape)) / 10, rtol=0, atol=2e-4
        )  # the grid, 2⁻¹⁰·σ/B
    assert record.users == len(users) != 10, "divided by the expected size, not by this one"
    assert (trainer.step, trainer.optimizer.steps) == (1, 1)


def test_an_empty_batch_is_a_step_of_noise() -> None:
    trainer = trainer_of()
    trainer.batches.draw = lambda step: np.zeros(0, dtype=np.int64)  # type: ignore[method-assign]
    before = [p.detach().clone() for p in trainer.parameters]
    record = trainer.advance()
    assert (record.users, record.parts) == (0, [])
    assert all(not torch.equal(b, p) for b, p in zip(before, trainer.parameters, strict=True))
    assert trainer.event.repeats == 1, "and it is counted"


def test_users_without_anything_to_predict_add_nothing() -> None:
    trainer = trainer_of(dataset_of([1, 1, 1] + [5] * 7))
    parts = trainer.add_gradients(of(trainer, np.array([0, 1, 2])))
    assert sum(float(g.abs().sum()) for g in gradients(trainer)) == 0
    assert sum(len(part.losses) for part in parts) == 0


def test_the_ledger_counts_every_step() -> None:
    trainer = trainer_of()
    for _ in range(trainer.batches.steps):
        trainer.advance()
    assert trainer.event.repeats == trainer.batches.steps
    with pytest.raises(ValueError, match="step must be in"):
        trainer.advance()


def test_without_privacy_the_sum_is_plain() -> None:
    trainer = trainer_of(epsilon=math.inf)
    users = np.arange(USERS)
    trainer.add_gradients(of(trainer, users))
    for ours, naive in zip(gradients(trainer), naive_sum(trainer, users, torch.ones_like), strict=True):
        torch.testing.assert_close(ours, naive, rtol=1e-9, atol=1e-12)
    assert all(part.norms is None for part in trainer.advance().parts)


# Memory.


@pytest.mark.parametrize("fails_late", [False, True])
def test_out_of_memory_halves_the_micro_batch_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, fails_late: bool
) -> None:
    """Also when memory runs out after some parameters have had their share: no user may count twice."""
    whole = trainer_of(micro_batch_tokens=10_000)
    whole.add_gradients(of(whole, np.arange(USERS)))
    trainer = trainer_of(micro_batch_tokens=10_000)
    backward, failures = trainer.sum.clipping._backward, []

    def fragile(losses: Tensor, clip: Any, *more: Any) -> Any:
        if len(losses) > 8:
            failures.append(len(losses))
            if fails_late:
                backward(losses, clip, *more)
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: not enough memory: you tried")
        return backward(losses, clip, *more)

    monkeypatch.setattr(trainer.sum.clipping, "_backward", fragile)
    trainer.add_gradients(of(trainer, np.arange(USERS)))
    assert failures and trainer.sum.tokens < 10_000
    for ours, theirs in zip(gradients(trainer), gradients(whole), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    everybody = of(trainer, np.arange(USERS), Due())
    trainer.optimizer.step(everybody)
    assert trainer.sum.tokens == trainer.state()["tokens"]


def test_a_user_who_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()

    def full(*_: Any) -> Tensor:
        raise MemoryError

    monkeypatch.setattr(trainer.sum.clipping, "backward", full)
    with pytest.raises(DpformerError, match="out of memory for a single user with 8 items: lower --max-length"):
        trainer.add_gradients(of(trainer, np.arange(USERS)))


def test_other_errors_are_not_taken_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    monkeypatch.setattr(trainer.sum.clipping, "backward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.advance()
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and not out_of_memory(RuntimeError("shape"))


# Resuming.


def states_agree(a: Trainer, b: Trainer) -> bool:
    mine, theirs = a.model.state_dict(), b.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_restored_run_takes_the_same_steps() -> None:
    """With dropout, in float32: masks, batches, noise and Adam's moments all come back, from any step."""
    trainer = trainer_of(dtype=torch.float32, dropout=0.3, micro_batch_tokens=30)
    states = []
    for _ in range(trainer.batches.steps):
        states.append(copy.deepcopy(trainer.state()))
        trainer.advance()
    for state in states[::3]:
        other = trainer_of(dtype=torch.float32, dropout=0.3, micro_batch_tokens=30)
        torch.manual_seed(99)
        other.restore(state)
        while other.step < other.batches.steps:
            other.advance()
        assert states_agree(trainer, other)
        ours, theirs = trainer.released().parameters(), other.released().parameters()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_dropout_differs_between_steps_and_micro_batches() -> None:
    trainer = trainer_of(dropout=0.5)
    draws = set()
    for trainer.step in range(4):
        for place in (0, 5):
            trainer.sum.add(trainer.users.histories(range(8)), [slice(place, place + 3)], trainer.dropout_seed)
            draws.add(torch.rand(1).item())
    assert len(draws) == 8


def test_a_step_without_clipping_that_is_not_finite_is_refused() -> None:
    trainer = trainer_of(epsilon=math.inf)
    with torch.no_grad():
        trainer.parameters[0].fill_(math.inf)
    with pytest.raises(ValueError, match="not finite"):
        trainer.advance()
