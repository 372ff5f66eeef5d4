"""One training step after another: sample users → their clipped sum → noise, once → the optimizer.

    p.grad = Σ_{i in the batch} c_i g_i          (`GradientSum`, a sum over users whatever the micro-batches)
    p ← Adam(p, (p.grad + σC·N(0, I)) / B)        (`PrivateOptimizer`, B the *expected* batch size)

A step is a function of the state before it: sampler and noise have their own resumable streams, the learning rate
depends on the step alone, and dropout on (key, step, offset of the micro-batch). So a run continues from any checkpoint
to the same model, bit for bit.

Several processes share the micro-batches of a step, and `p.grad` is the sum of theirs (`distributed`); nothing else
changes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import nn

from dpformer.accounting.events import Event
from dpformer.models.pretrained import Pretrained
from dpformer.noise import SecureRandom
from dpformer.sampling import Batch, PoissonBatches
from dpformer.training.gradient_sum import GradientSum, Part
from dpformer.training.microbatches import by_length
from dpformer.training.optimizer import PrivateOptimizer

if TYPE_CHECKING:
    from dpformer.training.distributed import Team


class Users(Protocol):
    """Where a trainer finds users' histories: a data set."""

    @property
    def train_lengths(self) -> np.ndarray: ...  # (users,)

    def histories(self, users: Iterable[int]) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class Step:
    """Statistics of one step. Private, like the data."""

    number: int  # from 1
    users: int
    parts: list[Part]
    learning_rate: float
    seconds: float


@dataclass
class Trainer:
    """Sampler, sum, optimizer and schedule: the state of a run between two steps, and the step."""

    users: Users
    batches: PoissonBatches
    sum: GradientSum
    optimizer: PrivateOptimizer
    schedule: Callable[[int], float]  # the learning rate at step 0, 1, …
    dropout: SecureRandom  # a derived key, which other processes may have: it does not reveal the run's
    team: Team | None = None  # other processes
    step: int = 0
    lengths: np.ndarray = field(init=False)  # (users,) number of positions with a target

    def __post_init__(self) -> None:
        self.lengths = np.maximum(self.users.train_lengths - 1, 0)

    @property
    def model(self) -> nn.Module:
        return self.sum.model

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.sum.parameters

    @property
    def event(self) -> Event:
        """The cost of the steps so far."""
        return self.optimizer.event()

    def advance(self) -> Step:
        """Take one step."""
        began = time.monotonic()
        batch = self.batches.batch(self.step)
        parts = self.add_gradients(batch)
        rate = self.schedule(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step(batch)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return Step(self.step, len(batch), parts, rate, time.monotonic() - began)

    def add_gradients(self, batch: Batch) -> list[Part]:
        """`p.grad` ← the (clipped) sum over the users of a batch."""
        users = batch.part(by_length(batch.users.numpy(), self.lengths))
        if self.team is not None:
            return self.team.add_gradients(self, users)
        parts = self.sum.add(self.users.histories(users.users.numpy()), seed=self.dropout_seed)
        self.sum.put(users, parts)
        return parts

    def dropout_seed(self, place: int) -> int:
        """Dropout seed for the micro-batch at offset `place`."""
        return torch_seed(self.dropout, self.step, place)

    # The state.

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "step": self.step,
            "tokens": self.sum.tokens,
            "skipped_users": self.sum.skipped_users,
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "batches": self.batches.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.step, self.sum.tokens = state["step"], state["tokens"]
        self.sum.clipping.skipped_users = state["skipped_users"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])

    def released(self) -> Any:
        """The model to release: the last iterate, with adapters merged into the weights."""
        model = copy.deepcopy(self.model).eval()
        return model.merged() if isinstance(model, Pretrained) else model


def dropout_key(random: SecureRandom) -> SecureRandom:
    """The key of dropout, derived from the run's secret, which it does not reveal."""
    return SecureRandom("dropout", key=random.within("dropout").words(4, step=0).tobytes())


def torch_seed(random: SecureRandom, step: int = 0, stream: int = 0) -> int:
    """A seed for torch's generator, a function of the run's secret and of its purpose."""
    return int(random.words(1, step=step, stream=stream)[0] >> np.uint64(1))
