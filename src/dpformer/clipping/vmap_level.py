"""The level of torch's vmap in which one user exists: tensors of users are batched by torch, all others are public."""

from __future__ import annotations

from torch import Tensor

from dpformer.clipping import torch_names as torch_


class VmapLevel:
    """Entered for `users` users; random numbers differ between users, as they do in a batch."""

    def __init__(self, users: int) -> None:
        torch_.lazy_load_decompositions()
        self.users = users
        self.number = torch_.enter_level(users, "different")

    def leave(self) -> None:
        torch_.leave_level()

    def is_current(self) -> bool:
        """False inside another transform (torch.func.vmap, grad) that the model has entered."""
        return bool(torch_.maybe_current_level() == self.number)

    def wrap(self, t: Tensor) -> Tensor:
        """(B, …) → what one user's is, (…)."""
        wrapped: Tensor = torch_.add_batch_dim(t, 0, self.number)
        return wrapped


class Outside:
    """Outside the level for a moment (and any other inside it), where tensors have the users' dimension, (B, …)."""

    def __enter__(self) -> None:
        self._saved = []
        while torch_.maybe_current_level() is not None:
            self._saved.append(torch_.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self._saved:
            torch_.push_dynamic_layer_stack(self._saved.pop())


def physical(t: Tensor) -> Tensor:
    """One user's tensor (…) → that of all users, (B, …)."""
    inner: Tensor = torch_.get_unwrapped(t)
    dim = torch_.maybe_get_bdim(t)
    return inner.movedim(dim, 0) if dim else inner
