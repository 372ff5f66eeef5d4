"""An external recommender that takes tensors trains as it is, and its norms are exact."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dpformer as dp
from tests.language.sasrec import SASRec


def losses_of(model: SASRec, seqs: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    pos_logits, neg_logits = model(seqs, pos, neg)
    real = pos != 0
    each = F.softplus(-pos_logits) + F.softplus(neg_logits)
    return (each * real).sum(1) / real.sum(1).clamp(min=1)


def batch_of(users: int, length: int = 8, items: int = 20) -> list[Tensor]:
    """Left-padded with 0, as that code wants it; user 0 is short."""
    rng = np.random.default_rng(users)
    seqs, pos, neg = (rng.integers(1, items + 1, (users, length)) for _ in range(3))
    seqs[0, :3] = pos[0, :3] = neg[0, :3] = 0
    return [torch.from_numpy(t) for t in (seqs, pos, neg)]


@pytest.mark.parametrize("users", [1, 3, 4, 8])  # 4 divides the length, 8 equals it: time first looks like batch first
def test_exact(users: int) -> None:
    torch.manual_seed(0)
    model, batch = SASRec(20).double(), batch_of(users)
    parameters = list(model.parameters())
    gradients = []
    for i in range(users):
        loss = losses_of(model, *(t[i : i + 1] for t in batch))[0]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients.append(torch.cat([torch.zeros(p.numel()).double() if g is None else g.flatten()
                                    for p, g in zip(parameters, grads, strict=True)]))  # fmt: skip
    truth = torch.stack(gradients)
    clipping = dp.PhantomClipping(model)
    with clipping.users(batch) as user:
        loss = losses_of(model, *user)
    norms = clipping.backward(loss, dp.clip(0.5))
    torch.testing.assert_close(norms, truth.norm(dim=1), rtol=1e-9, atol=0)
    summed = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])
    torch.testing.assert_close(summed, (truth * (0.5 / truth.norm(dim=1)).clamp(max=1)[:, None]).sum(0))


def test_trains() -> None:
    """With little noise, the loss falls."""
    torch.manual_seed(0)
    model = SASRec(20, dropout_rate=0.1)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 20, (200, 1))
    walk = (starts + np.arange(9)) % 20 + 1  # everybody walks through the items in order
    seqs, pos = walk[:, :-1], walk[:, 1:]
    neg = rng.integers(1, 21, pos.shape)
    seqs, pos, neg = (torch.from_numpy(t) for t in (seqs, pos, neg))
    clipping = dp.PhantomClipping(model)
    optimizer = dp.PrivateOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2),
        noise_multiplier=0.1,
        clip_norm=1.0,
        expected_batch_size=40,
        seed=0,
    )
    with torch.no_grad():
        before = float(losses_of(model.eval(), seqs, pos, neg).mean())
    model.train()
    for batch in dp.PoissonBatches(200, sample_rate=0.2, steps=25, seed=0):
        users = batch.users
        with clipping.users((seqs[users], pos[users], neg[users]), batch[:]) as user:
            loss = losses_of(model, *user)
        clipping.backward(loss, dp.normalize(1.0))
        optimizer.step(batch)
        optimizer.zero_grad()
    with torch.no_grad():
        after = float(losses_of(model.eval(), seqs, pos, neg).mean())
    assert after < 0.7 * before
