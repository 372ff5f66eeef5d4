"""Which user a row belongs to.

Every use of a parameter sees a tensor whose first dimension counts rows. Three layouts have a rule:

- batch first: as many rows as users, row i is user i;
- flattened user by user, as `x.view(-1, d)`: k rows a user, rows i·k … i·k+k−1 are user i;
- packed: an explicit index names the user of each row (`PhantomClipping.packed`). A layer that flattens what is inside
  each row (as Hugging Face's Conv1D does) sees k times as many rows, of the same users in the same order.

Anything else is refused; rows picked by a mask or an index keep their users (picked.py).
A layout that only looks like one of these (time first with T = B, say) is caught by the proof against autograd
(proof.py), which runs whenever a new layout is seen, and always where two of them are possible.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.clipping.errors import UnsupportedUse


@dataclass(frozen=True)
class Packed:
    """The user of each row, with the slot of the row among that user's rows."""

    user: Tensor  # (N,) int64
    slot: Tensor  # (N,) int64
    slots: int  # rows of the longest user

    @staticmethod
    def of(user: Tensor) -> "Packed":
        if user.ndim != 1 or user.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"packed rows need a 1-d integer user index, got {user.dtype} of shape {tuple(user.shape)}"
            )
        user = user.long()
        if user.numel() and int(user.min()) < 0:
            raise ValueError(f"packed rows need user indices from 0, got {int(user.min())}")
        order = torch.argsort(user, stable=True)
        ordered = user[order]
        counts = torch.bincount(user) if user.numel() else user.new_zeros(0)
        starts = counts.cumsum(0) - counts
        slot = torch.empty_like(user)
        slot[order] = torch.arange(len(user), device=user.device) - starts[ordered]
        return Packed(user, slot, int(counts.max()) if counts.numel() else 0)

    def flattened(self, each: int) -> "Packed":
        """The same rows, of which each has become `each`."""
        if each == 1:
            return self
        inside = torch.arange(each, device=self.slot.device)
        slot = (self.slot[:, None] * each + inside).flatten()
        return Packed(self.user.repeat_interleave(each), slot, self.slots * each)

    def is_even(self, users: int) -> bool:
        """Whether the index says what would be assumed without it: as many rows of each user, user by user."""
        if users == 0 or len(self.user) % users:
            return False
        even = torch.arange(users, device=self.user.device).repeat_interleave(len(self.user) // users)
        return torch.equal(self.user, even)


@dataclass(frozen=True)
class UserRows:
    """The rows of one use, resolved to `users` users."""

    users: int
    packed: Packed | None
    where: str  # parameter and function, for messages

    def _packed(self, rows: int) -> Packed | None:
        """The index of these rows; None if they are batch first or flattened."""
        if self.packed is None:
            return None
        named = len(self.packed.user)
        if rows == named or (named and rows % named == 0):
            self._check_packed()
            return self.packed.flattened(rows // max(1, named))
        if rows == self.users:
            return None
        raise UnsupportedUse(
            f"{self.where} sees {rows} rows inside `clipping.packed`, which names the users of {named} rows: rows must "
            f"be a multiple of those, or one a user ({self.users}); use this layer outside `packed`, or name its rows"
        )

    def _rows_each(self, rows: int) -> int:
        if self.users and rows % self.users == 0:
            return rows // self.users
        raise UnsupportedUse(
            f"{self.where} sees {rows} rows for {self.users} losses, so the user of a row is unknown; give a tensor "
            f"whose first dimension is the batch (or rows flattened user by user), or name the user of each row with "
            f"`with clipping.packed(user_of_row):`"
        )

    def spread(self, t: Tensor) -> Tensor:
        """(rows, …) → (B, rows a user, …); packed rows are padded with zeros."""
        packed = self._packed(t.shape[0])
        if packed is None:
            return t.reshape(self.users, self._rows_each(t.shape[0]), *t.shape[1:])
        out = t.new_zeros(self.users, packed.slots, *t.shape[1:])
        out[packed.user, packed.slot] = t
        return out

    def total(self, t: Tensor) -> Tensor:
        """(rows, …) → (B, …), summed over each user's rows."""
        packed = self._packed(t.shape[0])
        if packed is not None:
            return t.new_zeros(self.users, *t.shape[1:]).index_add_(0, packed.user, t)
        each = self._rows_each(t.shape[0])
        return t if each == 1 else t.reshape(self.users, each, *t.shape[1:]).sum(1)

    def user_of_row(self, rows: int, device: torch.device) -> Tensor:
        """(rows,) the user of each row."""
        packed = self._packed(rows)
        if packed is not None:
            return packed.user
        return torch.arange(self.users, device=device).repeat_interleave(self._rows_each(rows))

    def one_each(self, rows: int) -> None:
        """Refuses rows that are not simply the users, in order."""
        packed = self._packed(rows)
        if rows != self.users or not (packed is None or packed.is_even(self.users)):
            raise UnsupportedUse(
                f"{self.where} sees {rows} rows for {self.users} losses; it needs one row a user, in order: join the "
                f"rows of each user before this call"
            )

    def _check_packed(self) -> None:
        assert self.packed is not None
        if self.packed.user.numel() and int(self.packed.user.max()) >= self.users:
            raise UnsupportedUse(
                f"{self.where} has packed rows of user {int(self.packed.user.max())}, but there are {self.users} losses"
            )
