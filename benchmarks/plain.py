"""The Transformer a user would otherwise write: ordinary modules, padded batches, logits, cross-entropy."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainTransformer(nn.Module):
    """The paper's model in plain PyTorch, tied by a function (F.linear), by a module (nn.Linear) or not."""

    def __init__(
        self, items: int, max_length: int, dim: int, heads: int, blocks: int, dropout: float, tie: str | None
    ) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, dim), nn.Embedding(max_length, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, dropout) for _ in range(blocks))
        self.dropout = nn.Dropout(dropout)
        self.tie = tie
        if tie != "function":
            self.head = nn.Linear(dim, items, bias=False)
        if tie == "module":
            self.head.weight = self.items.weight
        for p in (self.items.weight, self.places.weight):
            nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1]).repeat(x.shape[0], 1)  # a copy: Opacus views ids flat
        h = self.dropout(self.items(x) + self.places(places))
        for block in self.blocks:
            h = block(h)
        return F.linear(h, self.items.weight) if self.tie == "function" else self.head(h)


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.project, self.merge = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.expand, self.contract = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm1, self.norm2, self.dropout = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.dropout(self.merge(y)))
        return self.norm2(x + self.dropout(self.contract(F.relu(self.expand(x)))))


def per_user_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of each user's own positions, (B,)."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
    return each.view_as(targets).sum(1) / (targets >= 0).sum(1).clamp(min=1)


def padded(sequences: list[np.ndarray], max_length: int) -> tuple[Tensor, Tensor]:
    """Items and targets padded to `max_length`, as fixed-shape training code does."""
    items = np.zeros((len(sequences), max_length), dtype=np.int64)
    targets = np.full((len(sequences), max_length), -1, dtype=np.int64)
    for i, s in enumerate(sequences):
        items[i, : len(s) - 1], targets[i, : len(s) - 1] = s[:-1], s[1:]
    return torch.from_numpy(items), torch.from_numpy(targets)
