"""Exact in situations that are no property of the model: checkpointing, autocast, two contexts, constants."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dpformer as dp
from tests.clipping.naive import clipped_sum, engine, norms_of, one_at_a_time, relative_error, sums
from tests.clipping.problems import B, D, T, per_user

CLIP = dp.clip(0.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.ln = nn.Linear(D, 8), nn.Linear(8, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(x + self.b(F.gelu(self.a(x))))


class Checkpointed(nn.Module):
    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.reentrant is not None:
            return per_user(checkpoint(self.second, h, use_reentrant=self.reentrant))
        return per_user(self.second(h))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    """As Hugging Face's gradient_checkpointing_enable: same gradients; outside, checkpointing is torch's own again."""
    torch.manual_seed(0)
    model, batch = Checkpointed().double(), (torch.randn(B, T, D, dtype=torch.float64),)
    truth = one_at_a_time(model, batch)
    model.reentrant = reentrant
    norms = engine(model, batch, CLIP)
    torch.testing.assert_close(norms, norms_of(truth), rtol=1e-10, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, CLIP)) < 1e-10
    runs = []
    model.second.register_forward_pre_hook(lambda *_: runs.append(1))
    model(*batch).sum().backward()
    assert len(runs) == 2


@pytest.mark.parametrize("outside", [True, False])
def test_autocast(outside: bool) -> None:
    """The backward pass outside autocast, as torch advises, or inside it."""
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(B, T, D)
    truth = one_at_a_time(model, (x,))
    clipping = dp.PhantomClipping(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with clipping.users(x) as user:
            losses = model(user)
        if not outside:
            norms = clipping.backward(losses.float(), CLIP)
    if outside:
        norms = clipping.backward(losses.float(), CLIP)
    torch.testing.assert_close(norms, norms_of(truth), rtol=3e-2, atol=0)
    assert relative_error(sums(model), clipped_sum(truth, CLIP)) < 3e-2


def test_complex_parameters() -> None:
    """Norms are over real and imaginary parts."""

    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.m = (
                nn.Parameter(torch.randn(T, D, dtype=torch.complex128)),
                nn.Parameter(torch.randn(D, 3, dtype=torch.complex128)),
            )

        def forward(self, x: Tensor) -> Tensor:
            f = torch.fft.fft(x, dim=1) * self.w
            return per_user(torch.view_as_real(f @ self.m))

    torch.manual_seed(0)
    model, batch = Filter(), (torch.randn(B, T, D, dtype=torch.float64),)
    truth = one_at_a_time(model, batch)
    norms = engine(model, batch, CLIP)
    right = norms_of([[torch.view_as_real(g) for g in user] for user in truth])
    torch.testing.assert_close(norms, right, rtol=1e-10, atol=0)
    for ours, each in zip(sums(model), zip(*truth, strict=True), strict=True):
        expected = sum(c * g for c, g in zip(CLIP(right), each, strict=True))
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("users", [(B, B), (B, 3)])
def test_two_contexts_then_two_backward_passes(users: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed().double(), [torch.randn(n, T, D, dtype=torch.float64) for n in users]
    truths = [one_at_a_time(model, (part,)) for part in x]
    clipping = dp.PhantomClipping(model)
    losses = []
    for part in x:
        with clipping.users(part) as user:
            losses.append(model(user))
    expected = [torch.zeros_like(g) for g in clipped_sum(truths[0], CLIP)]
    for own, truth in zip(losses, truths, strict=True):
        torch.testing.assert_close(clipping.backward(own, CLIP), norms_of(truth), rtol=1e-10, atol=0)
        expected = [a + b for a, b in zip(expected, clipped_sum(truth, CLIP), strict=True)]
        assert relative_error(sums(model), expected) < 1e-10
    assert not clipping._gate.calls


def two_contexts() -> tuple[nn.Module, Tensor, dp.PhantomClipping, list[Tensor]]:
    """A model, two batches, and the losses of each, computed in a context of its own."""
    torch.manual_seed(0)
    model, x = Checkpointed().double(), torch.randn(2, B, T, D, dtype=torch.float64)
    clipping = dp.PhantomClipping(model)
    losses = []
    for part in x:
        with clipping.users(part) as user:
            losses.append(model(user))
    return model, x, clipping, losses


def test_contexts_in_another_order() -> None:
    """Refused by name; the pass before it is right."""
    model, x, clipping, (first, second) = two_contexts()
    clipping.backward(second, CLIP)
    before = [g.clone() for g in sums(model)]
    assert relative_error(before, clipped_sum(one_at_a_time(model, (x[1],)), CLIP)) < 1e-10
    with pytest.raises(dp.UnsupportedUse, match="called for it before"):
        clipping.backward(first, CLIP)
    assert all(torch.equal(a, b) for a, b in zip(sums(model), before, strict=True))


def test_a_step_between_two_backward_passes() -> None:
    """The second pass would be of weights that are no more."""
    model, _, clipping, (first, second) = two_contexts()
    clipping.backward(first, CLIP)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    with pytest.raises((RuntimeError, dp.UnsupportedUse), match=r"in.?place"):
        clipping.backward(second, CLIP)
