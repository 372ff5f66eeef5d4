"""Layers of torch and ways to write a model, one small module each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from experiments.model_cases import LENGTH, VOCABULARY, WIDTH, Case, floats, ids
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Run(nn.Module):
    """Modules and what is done with them; the result is squared and summed for each user."""

    def __init__(self, run: Callable[..., Tensor], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(self, x)
        y = torch.view_as_real(y) if y.is_complex() else y
        return y.square().flatten(1).sum(1) + y.flatten(1).sin().sum(1)


def _layer(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Run(lambda m, x: m.layer(x), layer=make())


def _recurrent(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Run(lambda m, x: m.layer(x)[0], layer=make())


def _written(run: Callable[..., Tensor], *shape: int) -> Callable[[], nn.Module]:
    return lambda: Run(run, w=nn.Parameter(torch.randn(*shape)), a=nn.Linear(WIDTH, WIDTH))


SEQUENCE, PLANE, IDS = floats(LENGTH, WIDTH), floats(4, 6, 6), ids
CHANNELS = floats(WIDTH, LENGTH)
W = WIDTH

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "nn.Linear": (_layer(lambda: nn.Linear(W, W)), SEQUENCE),
    "nn.Bilinear": (lambda: Run(lambda m, x: m.layer(x, x.sin()), layer=nn.Bilinear(W, W, 3)), SEQUENCE),
    "nn.Embedding": (_layer(lambda: nn.Embedding(VOCABULARY, W)), IDS),
    "nn.Embedding(max_norm=1)": (_layer(lambda: nn.Embedding(VOCABULARY, W, max_norm=1.0)), IDS),
    "nn.EmbeddingBag": (_layer(lambda: nn.EmbeddingBag(VOCABULARY, W)), IDS),
    "nn.Conv1d": (_layer(lambda: nn.Conv1d(W, 3, 3)), CHANNELS),
    "nn.Conv2d": (_layer(lambda: nn.Conv2d(4, 3, 3)), PLANE),
    "nn.Conv2d, depthwise": (_layer(lambda: nn.Conv2d(4, 4, 3, groups=4)), PLANE),
    "nn.Conv3d": (_layer(lambda: nn.Conv3d(2, 3, 2)), floats(2, 3, 3, 3)),
    "nn.ConvTranspose1d": (_layer(lambda: nn.ConvTranspose1d(W, 3, 3)), CHANNELS),
    "nn.ConvTranspose2d": (_layer(lambda: nn.ConvTranspose2d(4, 3, 3)), PLANE),
    "nn.LayerNorm": (_layer(lambda: nn.LayerNorm(W)), SEQUENCE),
    "nn.RMSNorm": (_layer(lambda: nn.RMSNorm(W)), SEQUENCE),
    "nn.GroupNorm": (_layer(lambda: nn.GroupNorm(2, W)), CHANNELS),
    "nn.InstanceNorm1d": (_layer(lambda: nn.InstanceNorm1d(W, affine=True)), CHANNELS),
    "nn.BatchNorm1d, eval mode": (_layer(lambda: nn.BatchNorm1d(W)), CHANNELS),
    "batch normalisation over the batch": (
        lambda: Run(lambda m, x: F.batch_norm(m.a(x), None, None, m.w, training=True),
                    w=nn.Parameter(torch.randn(W)), a=nn.Conv1d(W, W, 1)),
        CHANNELS,
    ),
    "nn.PReLU": (_layer(lambda: nn.PReLU(LENGTH)), SEQUENCE),
    "nn.GRU": (_recurrent(lambda: nn.GRU(W, W, batch_first=True)), SEQUENCE),
    "nn.LSTM": (_recurrent(lambda: nn.LSTM(W, W, batch_first=True)), SEQUENCE),
    "nn.LSTM(proj_size)": (_recurrent(lambda: nn.LSTM(W, W, proj_size=4, batch_first=True)), SEQUENCE),
    "nn.RNN": (_recurrent(lambda: nn.RNN(W, W, batch_first=True)), SEQUENCE),
    "nn.MultiheadAttention": (
        lambda: Run(lambda m, x: m.layer(x, x, x)[0], layer=nn.MultiheadAttention(W, 2, batch_first=True)), SEQUENCE
    ),
    "nn.MultiheadAttention(add_bias_kv)": (
        lambda: Run(lambda m, x: m.layer(x, x, x)[0],
                    layer=nn.MultiheadAttention(W, 2, batch_first=True, add_bias_kv=True)),
        SEQUENCE,
    ),
    "nn.TransformerEncoderLayer": (_layer(lambda: nn.TransformerEncoderLayer(W, 2, 24, batch_first=True)), SEQUENCE),
    "weight norm": (_layer(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(W, W))), SEQUENCE),
    "spectral norm": (_layer(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))), SEQUENCE),
    "orthogonal": (_layer(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(W, W))), SEQUENCE),
    "x @ w": (_written(lambda m, x: m.a(x) @ m.w, W, W), SEQUENCE),
    "einsum": (_written(lambda m, x: torch.einsum("btd,md->btm", m.a(x), m.w), 5, W), SEQUENCE),
    "einsum by heads": (
        _written(lambda m, x: torch.einsum("bthd,hdk->bhtk", m.a(x).unflatten(-1, (2, -1)), m.w), 2, W // 2, 3),
        SEQUENCE,
    ),
    "tensordot": (_written(lambda m, x: torch.tensordot(m.a(x), m.w, dims=([2], [0])), W, 3), SEQUENCE),
    "cdist": (_written(lambda m, x: torch.cdist(m.a(x), m.w), 5, W), SEQUENCE),
    "complex filter on a Fourier transform (FMLP-Rec)": (
        lambda: Run(lambda m, x: torch.fft.irfft(torch.fft.rfft(m.a(x), dim=1) * torch.view_as_complex(m.w), dim=1),
                    w=nn.Parameter(torch.randn(LENGTH // 2 + 1, W, 2)), a=nn.Linear(W, W)),
        SEQUENCE,
    ),
    "complex linear layer": (
        lambda: Run(lambda m, x: torch.complex(m.a(x), x) @ torch.view_as_complex(m.w),
                    w=nn.Parameter(torch.randn(W, 3, 2)), a=nn.Linear(W, W)),
        SEQUENCE,
    ),
    "activation checkpointing": (
        _written(lambda m, x: checkpoint(m.a, m.a(x), use_reentrant=False) * m.w, W), SEQUENCE
    ),
    "torch.compile": (lambda: Run(lambda m, x: torch.compile(m.a, backend="eager")(x), a=nn.Linear(W, W)), SEQUENCE),
    "hidden[mask]": (_written(lambda m, x: _masked(m, x), W, W), SEQUENCE),
    "time first inside": (_written(lambda m, x: (m.a(x.transpose(0, 1)) @ m.w).transpose(0, 1), W, W), SEQUENCE),
    "mean over users": (_written(lambda m, x: m.a(x) * m.w + m.a(x).mean(0), W), SEQUENCE),
    "assignment into users' data": (_written(lambda m, x: _assigned(m, x), W), SEQUENCE),
}  # fmt: skip


def _masked(m: Any, x: Tensor) -> Tensor:
    mask = torch.arange(LENGTH, device=x.device) <= (x[:, :1, 0] > 0) * 2
    return torch.zeros_like(x).masked_scatter(mask[..., None], torch.tanh(m.a(x)[mask]) @ m.w)


def _assigned(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 0] = m.w
    return h


def layers() -> list[Case]:
    return [Case("layers of torch, and ways to write a model", name, *made) for name, made in LAYERS.items()]
