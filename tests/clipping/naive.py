"""The naive twin: plain autograd, one user at a time, in whatever precision the model has."""

import torch
from torch import Tensor, nn

import dpformer as dp


def one_at_a_time(model: nn.Module, batch: tuple[Tensor, ...]) -> list[list[Tensor]]:
    """Gradients of every trainable parameter, for each user alone."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    out = []
    for i in range(len(batch[0])):
        loss = model(*(t[i : i + 1] for t in batch))
        grads = torch.autograd.grad(loss[0], parameters, allow_unused=True)
        out.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)])
    return out


def norms_of(gradients: list[list[Tensor]]) -> Tensor:
    return torch.stack([torch.stack([g.square().sum() for g in user]).sum().sqrt() for user in gradients])


def clipped_sum(gradients: list[list[Tensor]], clip: dp.clipping.ClipFunction) -> list[Tensor]:
    factors = clip(norms_of(gradients))
    return [sum(c * g for c, g in zip(factors, each, strict=True)) for each in zip(*gradients, strict=True)]


def engine(model: nn.Module, batch: tuple[Tensor, ...], clip: dp.clipping.ClipFunction, **options: bool) -> Tensor:
    """One pass of the engine; returns the norms and leaves the sums in p.grad."""
    model.zero_grad()
    clipping = dp.PhantomClipping(model, **options)
    with clipping.users(batch) as user:
        loss = model(*user)
    return clipping.backward(loss, clip)


def sums(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]


def relative_error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Distance of two gradients as a share of the length of the second."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, theirs, strict=True))
    return (apart / sum(float(b.double().square().sum()) for b in theirs)) ** 0.5
