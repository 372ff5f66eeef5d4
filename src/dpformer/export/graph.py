"""What the exported graph computes: the model's last items in, seen items masked, the k best out."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class TopItems(nn.Module):
    """history (B, L) → items (B, k), scores (B, k).

    `history` holds item numbers, oldest first, each row padded on the right with −1. Any L will do, and so will a row
    of pads: the model gets the last `max_length` of a row, and all of the row is masked. Where a history leaves fewer
    than k items, the score is −∞ and the item means nothing.
    """

    def __init__(self, model: Any, k: int) -> None:
        super().__init__()
        self.model, self.k = model, k

    def forward(self, history: Tensor) -> tuple[Tensor, Tensor]:
        longest, num_items = self.model.max_length, self.model.num_items
        real = (history >= 0).sum(1)  # (B,)
        first = (real - longest).clamp(min=0)  # of the items that the model sees
        place = torch.arange(history.shape[1], device=history.device)[:longest]
        columns = (first[:, None] + place).clamp(max=history.shape[1] - 1)  # (B, min(L, longest))
        items = history.gather(1, columns).clamp(min=0)
        scores = self.model.next_scores(items, real.clamp(max=longest))  # (B, M)
        # One column more takes what the pads write.
        seen = torch.where(history < 0, num_items, history)
        wide = torch.cat([scores, scores[:, :1]], 1).scatter(1, seen, -math.inf)
        best, numbers = wide[:, :num_items].topk(self.k)
        return numbers, best
