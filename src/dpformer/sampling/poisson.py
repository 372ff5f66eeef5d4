"""Poisson sampling: each user is in each batch independently with probability q, as the accountant assumes.

Neither shuffling nor batches of fixed size are a substitute: accounted as Poisson sampling they understate ε, by up to
a factor of 4 in audits. Nor is drawing the size first and then that many users, unless the size is binomial.
"""

import hashlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from dpformer.accounting.arguments import sample_rate_of, whole
from dpformer.noise.mechanisms import INDEPENDENT, Noise
from dpformer.noise.randomness import SecureRandom
from dpformer.sampling.batch import Batch, Due, Origin

FIXED = {"n", "sample_rate", "steps", "noise"}
CHUNK = 2**18  # users drawn at a time


class PoissonBatches:
    """The batches of a run: users 0..n-1, ascending, possibly none.

    >>> batches = PoissonBatches(1000, sample_rate=0.1, steps=5)
    >>> for batch in batches:
    ...     users = batch.users  # an empty batch is a step like any other: pure noise

    One 64-bit number per user and step decides: u < q·2⁶⁴, rounded down, so that no user is included more often than
    accounted for. Whether a user is in step t depends on key, n, q, t and the user alone: `batch(t)` can be computed in
    any order, and every process that has the key gets the same batch. Steps must be taken in order, one per batch
    (batch.py).

    Iteration continues where it stopped: each batch comes once, and iteration ends after `steps` batches.

    Args:
        n: number of users.
        sample_rate: q, the probability that a user is in a batch.
        steps: T, the number of batches.
        noise: the noise that will be added to the batches' sums. If it is correlated, users are dealt at random into
            `noise.groups` groups, which alternate: step t draws from one of them alone, at rate groups·q; then one
            sampler belongs to one optimizer, and each batch, including empty ones, to one step of it. With
            `Truncated`, batches hold at most a public number of users, and cost accordingly more.
        key: 32 secret bytes, to be shared between processes; by default drawn from the operating system.
        seed: for tests only: marks the batches as not private.
    """

    def __init__(
        self,
        n: int,
        sample_rate: float,
        steps: int,
        *,
        noise: Noise = INDEPENDENT,
        seed: int | None = None,
        key: bytes | None = None,
    ) -> None:
        self.n = whole("n", n, 1)
        self.sample_rate = sample_rate_of(sample_rate)
        self.steps = whole("steps", steps, 1)
        self.step = 0  # batches yielded so far
        self._due = Due()
        self.noise = noise
        noise.check_users(self.n)
        self._random = SecureRandom(f"Poisson batches of {self.n} users at {self.sample_rate!r}", key=key, seed=seed)
        self._threshold = int(Fraction(noise.step_rate(self.sample_rate)) * 2**64)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to change what its batches claim: they are drawn with what it was created with."""
        if name in FIXED and name in self.__dict__:
            raise AttributeError(
                f"{name} is fixed, since all batches are drawn and accounted for with it: for a schedule create "
                "another PoissonBatches for each part, and step on both with the same optimizer"
            )
        super().__setattr__(name, value)

    @property
    def expected_batch_size(self) -> float:
        """q·n: noisy sums are divided by it, whatever the size of the batch. Not an integer in general."""
        return self.sample_rate * self.n

    @property
    def private(self) -> bool:
        """Whether the draw is secret, that is, unseeded."""
        return self._random.private

    @property
    def description(self) -> str:
        """One sentence for privacy statements."""
        turns = "" if self.noise.groups == 1 else f" over all of {self.noise.groups} alternating groups"
        return f"Poisson sampling of users at rate {self.sample_rate:g}{turns}, {self._random.description}"

    @property
    def origin(self) -> Origin:
        """The origin recorded in its batches. The identity does not reveal the key."""
        facts = repr((self._random.identity, self.n, self.sample_rate, self.steps, self.noise))
        return Origin(
            hashlib.sha256(facts.encode()).hexdigest(), self.n, self.sample_rate, self.steps, self.noise, self.private
        )

    def batch(self, step: int) -> Batch:
        """The batch of step 0 ≤ step < steps."""
        return Batch(self.draw(step), step, self.origin, self._due)

    def draw(self, step: int) -> np.ndarray:
        """(batch,) int64: the users of step 0 ≤ step < steps, ascending; no step can be taken on them."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step must be in 0..{self.steps - 1}, not {step}")
        if self.sample_rate == 1:
            return self.noise.keep(np.arange(self.n), step, self._random)
        parts = []
        for start in range(0, self.n, CHUNK):
            words = self._random.words(min(CHUNK, self.n - start), step=step, start=start)
            chosen = words < np.uint64(self._threshold) if self._threshold < 2**64 else np.ones(len(words), dtype=bool)
            if self.noise.groups > 1:
                chosen &= self.groups(start, len(words)) == self.noise.turn(step)
            parts.append(np.flatnonzero(chosen) + start)
        return self.noise.keep(np.concatenate(parts).astype(np.int64, copy=False), step, self._random)

    def groups(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: groups of users. A user's group depends on no other user, as the guarantee requires."""
        words = self._random.within("groups").words(count, step=0, start=start)
        return ((words >> np.uint64(32)) * np.uint64(self.noise.groups) >> np.uint64(32)).astype(np.int64)

    def __iter__(self) -> Iterator[Batch]:
        while self.step < self.steps:
            self.step += 1  # before the batch is yielded, so that a checkpoint made in the loop's body resumes after it
            yield self.batch(self.step - 1)

    def __len__(self) -> int:
        return self.steps

    def state_dict(self) -> dict[str, Any]:
        """Key and position; secret. Plain types, for `torch.load(weights_only=True)` or JSON."""
        return {
            "n": self.n,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "step": self.step,
            "taken": self._due.step,
            "random": self._random.state_dict(),
            **self.noise.settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume exactly where the other left off; n, q and T must be the same, since they are accounted for.

        A batch that was yielded but not stepped on comes again.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"the state of a sampler has the keys {sorted(self.state_dict())}, not {sorted(state)}")
        mine = {"n": self.n, "sample_rate": self.sample_rate, "steps": self.steps, **self.noise.settings()}
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(f"{name} was {state[name]} when this state was saved, now it is {value}")
        step, taken = (whole(name, state[name], 0) for name in ("step", "taken"))
        if max(step, taken) > self.steps:
            raise ValueError(f"step must be at most {self.steps}, not {max(step, taken)}")
        self.step, self._random = taken or step, self._random.with_state(state["random"])
        self._due = Due(taken)
