"""Poisson batches of users, collated user by user and split into parts.

A data collator sees the examples of one user at a time, so that padding, masking, packing or shuffling cannot mix
users; its random numbers come from a secret seed of step and user alone. Users are then combined here: a part is a dict
of tensors with B·k rows, user i in rows i·k … i·k + k − 1. Shorter rows are padded on the right; users with fewer rows
repeat their last one, which does not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.errors import DpformerError
from dpformer.integrations.users import Users
from dpformer.sampling.poisson import PoissonBatches

PADDING = {"attention_mask": 0, "labels": -100, "token_type_ids": 0, "position_ids": 0, "special_tokens_mask": 1}
Collate = Callable[[list[Any]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Part:
    """Some whole users of a batch: inputs with B·k rows, and which of each user's k rows are real."""

    inputs: dict[str, Tensor]
    real: Tensor  # (B, k) bool
    collated: Sequence[Mapping[str, Tensor]] = ()  # the same users, individually
    pad_token: int = 0
    who: tuple[int, ...] = ()  # the numbers of the same users
    drawn: bool = False  # made from the data of these users, by `LogicalBatches`

    @property
    def users(self) -> int:
        return len(self.real)

    def to(self, device: torch.device | str) -> Part:
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, real=self.real.to(device))

    def by_user(self) -> tuple[dict[str, Tensor], Tensor, int]:
        """Inputs (B, k, …), which of the rows are real, and the token for padding."""
        inputs = {name: tensor.unflatten(0, self.real.shape) for name, tensor in self.inputs.items()}
        return inputs, self.real, self.pad_token

    @staticmethod
    def of_user(tree: tuple[dict[str, Tensor], Tensor, int]) -> Part:
        """The part of one user, k rows, from that user's inputs (1, k, …)."""
        inputs, real, pad_token = tree
        return Part({name: tensor[0] for name, tensor in inputs.items()}, real, pad_token=pad_token)

    def some(self, users: Sequence[int]) -> Part:
        """A subset of the users, combined anew: padding depends on who they are."""
        who = [self.who[user] for user in users] if self.who else ()
        return Part.of([self.collated[user] for user in users], self.pad_token, who).to(self.real.device)

    def mean(self, values: Tensor, counted: Tensor | None = None) -> Tensor:
        """(B,): the mean of each user's own values, (B·k,) or (B·k, L); `counted` selects the values."""
        weight = self.real.reshape(-1, *[1] * (values.ndim - 1)).expand(values.shape)
        if counted is not None:
            weight = weight & counted
        kept = torch.where(weight, values, 0).reshape(self.users, -1)
        return kept.sum(1) / weight.reshape(self.users, -1).sum(1).clamp(min=1)

    @staticmethod
    def of(users: Sequence[Mapping[str, Tensor]], pad_token: int = 0, who: Sequence[int] = ()) -> Part:
        """Combine users who were collated individually."""
        names = set(users[0])
        if any(set(user) != names for user in users):
            raise DpformerError(
                f"the collator returns inputs other than {sorted(names)} for some users: return the same for all"
            )
        rows = [len(next(iter(user.values()))) for user in users]
        most = max(rows)
        even = [_with_mask(user, count, most) for user, count in zip(users, rows, strict=True)]
        inputs = {name: _stack(name, [user[name] for user in even], pad_token) for name in even[0]}
        real = torch.arange(most)[None, :] < torch.tensor(rows)[:, None]
        return Part(_needed(inputs, names), real, users, pad_token, tuple(who))


def _with_mask(user: Mapping[str, Tensor], rows: int, most: int) -> dict[str, Tensor]:
    """As many rows as the others, and an attention mask, which distinguishes padding from tokens."""
    out = dict(user)
    ids = out.get("input_ids")
    if ids is not None and "attention_mask" not in out:
        out["attention_mask"] = torch.ones_like(ids)
    for name, tensor in out.items():
        if not isinstance(tensor, Tensor) or tensor.ndim == 0 or len(tensor) != rows:
            raise DpformerError(
                f"the collator returns {name!r} as {_shape(tensor)} for a user with {rows} rows; each input must be a "
                "tensor with one row per example"
            )
        out[name] = torch.cat([tensor, tensor[-1:].expand(most - rows, *tensor.shape[1:])])
    return out


def _shape(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _stack(name: str, tensors: list[Tensor], pad_token: int) -> Tensor:
    """(B·k, L, …), padded on the right."""
    longest = max(tensor.shape[1] if tensor.ndim > 1 else 0 for tensor in tensors)
    padded = []
    for tensor in tensors:
        if tensor.ndim > 1 and tensor.shape[1] < longest:
            if tensor.ndim > 2 or (name not in PADDING and not name.endswith("input_ids")):
                raise DpformerError(
                    f"the input {name!r} has rows of different lengths, and its padding value is unknown: pad every "
                    "example to one length in the data set"
                )
            tensor = F.pad(tensor, (0, longest - tensor.shape[1]), value=PADDING.get(name, pad_token))
        padded.append(tensor)
    return torch.cat(padded)


def _needed(inputs: dict[str, Tensor], given: set[str]) -> dict[str, Tensor]:
    """Remove the mask if nothing is padded and the collator provided none."""
    mask = inputs.get("attention_mask")
    if "attention_mask" not in given and mask is not None and bool(mask.all()):
        del inputs["attention_mask"]
    return inputs


@dataclass(frozen=True)
class LogicalBatch:
    """The users of one step, possibly none, in parts of whole users."""

    step: int
    parts: list[Part]

    @property
    def users(self) -> int:
        return sum(part.users for part in self.parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)


class LogicalBatches(torch.utils.data.Dataset[LogicalBatch]):
    """Maps step t to its Poisson batch.

    Args:
        users: the data.
        batches: the sampler.
        collate: maps the examples of *one* user to a dict of tensors, one row per example.
        rows: maximum number of rows of a part; a user with more is a part alone.
        seed: maps (step, user) to a secret seed for the collator.
        pad_token: padding value of `input_ids`.
    """

    def __init__(
        self,
        users: Users,
        batches: PoissonBatches,
        collate: Collate,
        rows: int,
        seed: Callable[[int, int], int],
        pad_token: int = 0,
    ) -> None:
        self.users, self.batches, self.collate = users, batches, collate
        self.rows, self.seed, self.pad_token = rows, seed, pad_token

    def __len__(self) -> int:
        return self.batches.steps

    def __getitem__(self, step: int) -> LogicalBatch:
        found = [(self._collated(step, user), user) for user in self.batches.draw(step).tolist()]
        found.sort(key=lambda one: _size(one[0]), reverse=True)  # groups users of similar size, which reduces padding
        parts: list[list[tuple[Mapping[str, Tensor], int]]] = []
        for one in found:
            if parts and (len(parts[-1]) + 1) * _size(parts[-1][0][0])[0] <= self.rows:
                parts[-1].append(one)
            else:
                parts.append([one])
        made = (zip(*part, strict=True) for part in parts)
        combined = [Part.of(collated, self.pad_token, who) for collated, who in made]
        return LogicalBatch(step, [replace(part, drawn=True) for part in combined])

    def _collated(self, step: int, user: int) -> Mapping[str, Tensor]:
        """The inputs of a user, collated twice: what a collator keeps from one call would reach the next user."""
        inputs, again = self._collated_once(step, user), self._collated_once(step, user)
        if not _same(inputs, again):
            raise DpformerError(
                "the collator returns different inputs for the same user and the same random numbers: it keeps "
                "something between calls, as packing across examples does, and that would put users into each "
                "other's inputs; give a collator without a state"
            )
        return inputs

    def _collated_once(self, step: int, user: int) -> Mapping[str, Tensor]:
        with drawing_from(self.seed(step, user)):
            return self.collate(self.users[user])


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results of a collator are equal, bit for bit; what is no tensor is refused elsewhere."""
    if one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in one]
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _size(user: Mapping[str, Tensor]) -> tuple[int, int]:
    """Rows and length."""
    first = user["input_ids"] if "input_ids" in user else next(iter(user.values()))
    return len(first), first.shape[1] if first.ndim > 1 else 0


class StepsLeft:
    """The remaining steps, one at a time: a `batch_sampler`. `taken` returns the number of steps taken."""

    def __init__(self, steps: int, taken: Callable[[], int]) -> None:
        self.steps, self.taken = steps, taken

    def __iter__(self) -> Iterator[list[int]]:
        return iter([step] for step in range(self.taken(), self.steps))

    def __len__(self) -> int:
        return self.steps


def only(batches: list[LogicalBatch]) -> LogicalBatch:
    """For `collate_fn`: a batch is already one."""
    (batch,) = batches
    return batch


@contextmanager
def drawing_from(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Within the context, torch, NumPy and Python draw from a secret seed; outside, as before.

    With a public seed, such as one set by a trainer, adding a user to a batch would visibly shift the masks of all
    others.
    """
    devices = [] if device is None or device.type == "cpu" else [device]
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
