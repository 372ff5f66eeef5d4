"""The users of one step, with a token that one step consumes.

A claim of Poisson sampling is a claim about *which* users are in a noisy sum: all those that the sampler drew for this
step, each exactly once. So a batch is not an array of indices but an object that is tracked from the draw to the step:

    sampler   draws a `Batch`: users, the number of its step, where it comes from (`Origin`), and a one-time token
    engine    receives a `Part` of it with the data of these users, and attaches it to the sum (clipping/bounded_sum.py)
    step      consumes the token of the batch, after checking that the sum holds each of its users once

Tokens are consumed in the order of the steps, without gaps: a batch that may be skipped because of its contents, for
instance because it is small, is not a Poisson sample. This guards against mistakes, not against deliberate forgery.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dpformer.noise.mechanisms import Noise


@dataclass(frozen=True)
class Origin:
    """The sampler that drew a batch, which determines what its steps cost. Holds no key.

    Args:
        identity: the same for the same secret, n, q, T and noise, in every process and after resuming.
        n: number of users.
        sample_rate: q, over all steps.
        steps: T, the number of batches.
        noise: the noise for which users are dealt into groups.
        private: False if the draw was seeded.
    """

    identity: str
    n: int
    sample_rate: float
    steps: int
    noise: Noise
    private: bool


@dataclass
class Due:
    """The next step to be taken; shared by a sampler and all of its batches."""

    step: int = 0


class Batch:
    """The users that a sampler has drawn for one step, possibly none.

    Args:
        users: (B,) indices, ascending, each once.
        step: the number of its step, from 0.
        origin: the sampler.
        due: the sampler's tokens; None if no sampler drew the batch here, so that no step can be taken on it.
    """

    step: int
    origin: Origin
    _users: Tensor
    _due: Due | None

    def __init__(self, users: np.ndarray | Tensor, step: int, origin: Origin, due: Due | None = None) -> None:
        drawn = _indices(users)
        if len(drawn) > 1 and not bool((drawn[1:] > drawn[:-1]).all()):
            raise ValueError("the users of a batch must be ascending and distinct")
        self.__dict__.update(_users=drawn, step=step, origin=origin, _due=due)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        """Refuses: a batch cut to a maximum size, or with some users removed, is not a Poisson sample."""
        raise AttributeError(
            f"{name} of a batch is fixed, since it was drawn for its step: use all of its users, in parts "
            "(`batch.split(size)`) if they do not fit into memory; for smaller batches lower the sample rate"
        )

    @property
    def users(self) -> Tensor:
        """(B,) a copy of the indices, ascending, each once."""
        return self._users.clone()

    def split(self, size: int) -> Iterator[Part]:
        """Parts of at most `size` users, in order; none for an empty batch. Any split gives the same sum."""
        return self[:].split(size)

    def part(self, users: np.ndarray | Tensor) -> Part:
        """Some of the users, in any order."""
        return Part(_indices(users), self)

    def __getitem__(self, places: slice | Tensor) -> Part:
        """The users at these positions."""
        return Part(self._users[places], self)

    def __len__(self) -> int:
        return len(self._users)

    def is_of_the_draw(self, other: Batch) -> bool:
        """Whether both hold users of the same draw, in this process or another."""
        return (self.step, self.origin.identity) == (other.step, other.origin.identity)

    def check_due(self) -> None:
        """Raise unless its step is the next one."""
        if self._due is None:
            raise ValueError(
                f"the batch of step {self.step + 1} was not drawn by PoissonBatches in this process: step on batches "
                "that the sampler yields, or call `optimizer.step()` without one, which claims no sampling"
            )
        if self.step < self._due.step:
            raise ValueError(
                f"the batch of step {self.step + 1} has been used: each batch is one step, and the next step needs the "
                f"batch of step {self._due.step + 1}"
            )
        if self.step > self._due.step:
            raise ValueError(
                f"the batch of step {self._due.step + 1} was skipped, and now that of step {self.step + 1} comes: "
                "batches must not be skipped or merged, and empty or small ones are steps too; call "
                "`optimizer.step(batch)` for each, in order"
            )

    def consume(self) -> None:
        """Consume the token, once, for a step."""
        self.check_due()
        assert self._due is not None
        self._due.step += 1

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a batch cannot be copied or pickled: its token is valid for one step, in the process that drew it"
        )

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, {len(self)} users)"


class Part:
    """Some users of a batch: those whose data go into one forward pass, in this order.

    Args:
        users: (b,) indices, each once, all in the batch.
        batch: the batch they belong to.
    """

    def __init__(self, users: np.ndarray | Tensor, batch: Batch) -> None:
        users, drawn = _indices(users), batch._users
        self._users, self._batch = users, batch
        places = torch.searchsorted(drawn, users)
        there = drawn[places.clamp(max=max(len(drawn) - 1, 0))] == users if len(drawn) else torch.zeros_like(users) > 0
        if not bool(there.all()):
            raise ValueError(
                f"user {int(users[~there][0])} was not drawn for step {batch.step + 1}: a part may hold only "
                "users of its batch"
            )
        ordered = users.sort().values
        if bool((twice := ordered[1:] == ordered[:-1]).any()):
            raise ValueError(
                f"user {int(ordered[1:][twice][0])} occurs twice in one part, but a user's data count once per step: "
                "put all of them into one loss"
            )

    @property
    def users(self) -> Tensor:
        """(b,) a copy of the indices."""
        return self._users.clone()

    @property
    def batch(self) -> Batch:
        """The batch they belong to."""
        return self._batch

    def split(self, size: int) -> Iterator[Part]:
        """Parts of at most `size` users, in order."""
        if size < 1:
            raise ValueError(f"size must be a whole number of at least 1, not {size!r}")
        return (self[start : start + size] for start in range(0, len(self), size))

    def __getitem__(self, places: slice | Tensor) -> Part:
        """The users at these positions."""
        return Part(self._users[places], self._batch)

    def __len__(self) -> int:
        return len(self._users)

    def __repr__(self) -> str:
        return f"Part({len(self)} of {len(self.batch)} users of step {self.batch.step + 1})"


def _indices(users: Any) -> Tensor:
    """(b,) int64, a copy on the CPU."""
    found = torch.as_tensor(users)
    if found.ndim != 1 or (found.numel() and (found.is_floating_point() or found.dtype == torch.bool)):
        raise ValueError(f"users must be indices, shape (b,), got {found.dtype} of shape {tuple(found.shape)}")
    return found.to("cpu", torch.int64, copy=True).contiguous()
