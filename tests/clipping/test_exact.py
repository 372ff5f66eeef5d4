"""Every problem of the shared list against one-user-at-a-time autograd."""

import pytest
import torch

import dpformer as dp
from dpformer.kernels import native
from tests.clipping.naive import clipped_sum, engine, norms_of, one_at_a_time, relative_error, sums
from tests.clipping.problems import PROBLEMS, Problem

CLIPS = [dp.normalize(1.0), dp.clip(0.8)]


def build(problem: Problem, dtype: torch.dtype) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = problem.make().to(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in problem.batch())
    return model, batch


def test_the_list_is_long_enough() -> None:
    assert len(PROBLEMS) >= 40


@pytest.mark.parametrize("clip", CLIPS, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_float64(problem: Problem, clip: dp.clipping.ClipFunction) -> None:
    model, batch = build(problem, torch.float64)
    truth = one_at_a_time(model, batch)
    norms = engine(model, batch, clip, self_check=False)
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-10, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, clip)) < 1e-10


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "in Python"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_float32_against_float64(problem: Problem, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(native, "kernels", None)
    exact, batch = build(problem, torch.float64)
    truth = one_at_a_time(exact, batch)
    model, batch = build(problem, torch.float32)
    model.load_state_dict({k: v.to(model.state_dict()[k].dtype) for k, v in exact.state_dict().items()})
    single = tuple(t.float() if t.is_floating_point() else t for t in batch)
    truth = one_at_a_time(exact, tuple(t.double() if t.is_floating_point() else t for t in single))
    norms = engine(model, single, dp.normalize(1.0))
    torch.testing.assert_close(norms.double(), norms_of(truth), rtol=1e-4, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, dp.normalize(1.0))) < 1e-4


@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_the_self_check_accepts_what_is_right(problem: Problem) -> None:
    model, batch = build(problem, torch.float64)
    engine(model, batch, dp.normalize(1.0))


@pytest.mark.parametrize("parts", [2, 9])
@pytest.mark.parametrize("problem", PROBLEMS, ids=repr)
def test_any_split_gives_the_same_sum(problem: Problem, parts: int) -> None:
    torch.manual_seed(0)
    model = problem.make().double()
    samples = [problem.batch() for _ in range(3)]
    whole = tuple(torch.cat(ts)[:9] for ts in zip(*samples, strict=True))
    whole = tuple(t.double() if t.is_floating_point() else t for t in whole)
    engine(model, whole, dp.normalize(1.0))
    expected = [g.clone() for g in sums(model)]
    model.zero_grad()
    clipping = dp.PhantomClipping(model)
    for piece in zip(*(t.tensor_split(parts) for t in whole), strict=True):
        with clipping.users(piece) as user:
            loss = model(*user)
        clipping.backward(loss, dp.normalize(1.0))
    assert relative_error(sums(model), expected) < 1e-12
