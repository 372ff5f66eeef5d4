"""Which user a row belongs to: users come first, (B, …), or their rows one behind the other, as many of each."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UserRows:
    """The rows of one use, of `users` users."""

    users: int

    def spread(self, t: Tensor) -> Tensor:
        """(rows, …) → (B, rows of a user, …)"""
        return t.reshape(self.users, len(t) // self.users, *t.shape[1:])

    def total(self, t: Tensor) -> Tensor:
        """(rows, …) → (B, …), summed over each user's rows."""
        return t if len(t) == self.users else self.spread(t).sum(1)

    def user_of_row(self, rows: int, device: torch.device) -> Tensor:
        """(rows,) the user of each row."""
        return torch.arange(self.users, device=device).repeat_interleave(rows // self.users)
