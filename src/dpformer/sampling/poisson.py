"""Poisson sampling: each user is in each batch independently with probability q. This is what the accountant assumes.

Neither shuffling nor a batch of fixed size is a substitute: accounted as Poisson sampling they under-report ε, by up to
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

CHUNK = 2**18  # users drawn at a time


class PoissonBatches:
    """The batches of a run: users 0..n-1, ascending, possibly none.

    >>> batches = PoissonBatches(1000, sample_rate=0.1, steps=5)
    >>> for batch in batches:
    ...     users = batch.users  # an empty batch is a step like any other: noise alone

    One number of 64 bits a user and step decides: u < q·2⁶⁴, rounded down, so nobody is included more often than
    accounted for. Whether a user is in step t depends on key, n, q, t and the user alone: `batch(t)` can be asked in
    any order, and every process that has the key gets the same batch. Steps are taken on them in order, one on each
    (batch.py).

    Iterating goes on where it stopped: each batch comes once, and after `steps` of them there are no more.

    Args:
        n: number of users.
        sample_rate: q, the probability that a user is in a batch.
        steps: T, how many batches there are.
        noise: the noise that will be added to the batches' sums. Where it is correlated, users are dealt at random into
            `noise.groups` groups, which take turns: step t draws from one of them alone, at rate groups·q; then one
            sampler goes with one optimizer, and each batch, an empty one too, with one step of it.
        key: 32 secret bytes, to share between processes; by default new ones from the operating system.
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
        self.step = 0  # batches given out so far by iterating
        self._due = Due()
        self.noise = noise
        self._random = SecureRandom(f"Poisson batches of {self.n} users at {self.sample_rate!r}", key=key, seed=seed)
        self._threshold = int(Fraction(noise.step_rate(self.sample_rate)) * 2**64)

    @property
    def expected_batch_size(self) -> float:
        """q·n: what a noisy sum is divided by, whatever the batch turned out to be. Not a whole number in general."""
        return self.sample_rate * self.n

    @property
    def private(self) -> bool:
        """Whether the draw is secret: not with a seed."""
        return self._random.private

    @property
    def description(self) -> str:
        """One sentence for privacy statements."""
        turns = "" if self.noise.groups == 1 else f" over all of {self.noise.groups} groups that take turns"
        return f"Poisson sampling of users at rate {self.sample_rate:g}{turns}, {self._random.description}"

    @property
    def origin(self) -> Origin:
        """What its batches say of where they come from. The identity does not tell the key."""
        digest = hashlib.sha256(self._random.within("identity").words(4, step=0).tobytes())
        digest.update(repr((self.n, self.sample_rate, self.steps, self.noise)).encode())
        return Origin(digest.hexdigest(), self.n, self.sample_rate, self.steps, self.noise, self.private)

    def batch(self, step: int) -> Batch:
        """The batch of step 0 ≤ step < steps."""
        return Batch(self.draw(step), step, self.origin, self._due)

    def draw(self, step: int) -> np.ndarray:
        """(batch,) int64: the users of step 0 ≤ step < steps, ascending; no step can be taken on them."""
        if not 0 <= step < self.steps:
            raise ValueError(f"step must be in 0..{self.steps - 1}, not {step}")
        if self.sample_rate == 1:
            return np.arange(self.n)
        parts = []
        for start in range(0, self.n, CHUNK):
            words = self._random.words(min(CHUNK, self.n - start), step=step, start=start)
            chosen = words < np.uint64(self._threshold) if self._threshold < 2**64 else np.ones(len(words), dtype=bool)
            if self.noise.groups > 1:
                chosen &= self.groups(start, len(words)) == self.noise.turn(step)
            parts.append(np.flatnonzero(chosen) + start)
        return np.concatenate(parts).astype(np.int64, copy=False)

    def groups(self, start: int, count: int) -> np.ndarray:
        """(count,) int64: the groups of some users. A user's group depends on nobody else, as the guarantee needs."""
        words = self._random.within("groups").words(count, step=0, start=start)
        return ((words >> np.uint64(32)) * np.uint64(self.noise.groups) >> np.uint64(32)).astype(np.int64)

    def __iter__(self) -> Iterator[Batch]:
        while self.step < self.steps:
            self.step += 1  # before the batch is handed out: a checkpoint made in the loop's body goes on after it
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
        """Goes on exactly where the other left off; its n, q and T must be the same, since they are accounted for.

        A batch that was given out and not stepped on comes again.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"a sampler's state has the keys {sorted(self.state_dict())}, not {sorted(state)}")
        mine = {"n": self.n, "sample_rate": self.sample_rate, "steps": self.steps, **self.noise.settings()}
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(f"{name} was {state[name]} when this state was saved, now it is {value}")
        step, taken = (whole(name, state[name], 0) for name in ("step", "taken"))
        if max(step, taken) > self.steps:
            raise ValueError(f"step must be at most {self.steps}, not {max(step, taken)}")
        self.step, self._random = taken or step, self._random.with_state(state["random"])
        self._due = Due(taken)
