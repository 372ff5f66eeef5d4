"""The exported graph: the model on the last items of a history, with seen items masked and the k best returned."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class TopItems(nn.Module):
    """history (B, L) → items (B, k), scores (B, k).

    `history` holds item numbers, oldest first, each row padded on the right with −1. Any L is allowed, as is a row of
    padding: the model reads the last `max_length` items of a row, and all items of the row are masked if
    `filter_seen`. If a history leaves fewer than k items, the score is −∞ and the item is meaningless.
    """

    def __init__(self, model: Any, k: int, *, filter_seen: bool = True) -> None:
        super().__init__()
        self.model, self.k, self.filter_seen = model, k, filter_seen

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        longest, num_items = self.model.max_length, self.model.num_items
        real = (history >= 0).sum(1)  # (B,)
        first = (real - longest).clamp(min=0)  # first item that the model sees
        place = torch.arange(history.shape[1], device=history.device)[:longest]
        columns = (first[:, None] + place).clamp(max=history.shape[1] - 1)  # (B, min(L, longest))
        items = history.gather(1, columns).clamp(min=0)
        scores = self.model.next_scores(items, real.clamp(max=longest))  # (B, M)
        if not self.filter_seen:
            best, numbers = scores.topk(self.k)
            return numbers, best
        # The additional column absorbs what padding writes.
        seen = torch.where(history < 0, num_items, history)
        wide = torch.cat([scores, scores[:, :1]], 1).scatter(1, seen, -math.inf)
        best, numbers = wide[:, :num_items].topk(self.k)
        return numbers, best
