"""The attacker's view: training itself, run on canaries, and every noisy sum that it passes to the optimizer.

Nothing is simulated. The `Trainer` of `dpformer train` draws users, makes micro-batches, clips, sums, adds noise and
steps Adam; it is stopped half-way, saved to a checkpoint and resumed by a new one. Only the model and the data are
synthetic (canaries.py). What is observed is `p.grad` as Adam receives it: everything training learns about the users.

    o_tj = (noisy sum at canary j's coordinate in step t) / C
    L_j = Σ_t log(1 − q + q·exp((2·o_tj − 1) / (2σ²)))      the likelihood ratio of "j takes part" to "j does not"

with σ as observed at spare coordinates rather than as claimed, as an attacker would: too little noise is then exploited
fully. Spare coordinates belong to no canary, so this does not bias the statistics.

Noise that is correlated over b steps (noise/mechanisms) is first decorrelated, w = C·o. The contribution of canary j in
step t is then spread over w_t … w_{t+b−1}, and collected from there: Σ_k c_k·w_{t+k} replaces o_t, and the ratio is
that of a round: each of the g ≥ b groups has one step in it, and q becomes g·q. The attacker knows all groups.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from dpformer.data import Dataset
from dpformer.noise import SecureRandom
from dpformer.runs.checkpoint import load_checkpoint, save_checkpoint
from dpformer.training.gradient_sum import GradientSum
from dpformer.training.plan import Plan
from dpformer.training.steps_taken import in_another_process
from dpformer.training.trainer import Trainer
from dpformer.verification.audit.canaries import CanaryModel, canary_data
from dpformer.verification.audit.observation import Contribution, Mechanism, Observation

if TYPE_CHECKING:
    from dpformer.training.distributed import Team

LEARNING_RATE = 5e-3  # arbitrary: the input of the optimizer is observed
KEEP = 2**23  # number of noise values, and of inclusions, kept for the checks
Watch = Callable[[range], Iterable[int]]


class Watched:
    """A data set that records which users' histories are read, which shows who is in a step."""

    def __init__(self, users: Dataset) -> None:
        self.users = users
        self.asked: list[int] = []

    @property
    def train_lengths(self) -> np.ndarray:
        return self.users.train_lengths

    def histories(self, users: Iterable[int]) -> list[np.ndarray]:
        wanted = list(users)
        self.asked += wanted
        return self.users.histories(wanted)

    def taken(self) -> np.ndarray:
        """(batch,) the users read since the last call."""
        taken, self.asked = np.array(self.asked, dtype=np.int64), []
        return taken


def observe(
    mechanism: Mechanism,
    member: np.ndarray,
    *,
    seed: int | None = None,
    watch: Watch = iter,
    team: Team | None = None,
) -> Observation:
    """Train on the canaries for which `member` (canaries, bool) is true, and record what is released about all.

    With a `team` of processes this one leads; the others call `team.follow()`.
    """
    return _Observer(mechanism, member, seed, team).run(watch)


class _Observer:
    def __init__(self, mechanism: Mechanism, member: np.ndarray, seed: int | None, team: Team | None) -> None:
        self.mechanism, self.member, self.seed, self.team = mechanism, member, seed, team
        self.members = np.flatnonzero(member)
        self.data = canary_data(self.members, len(member))
        model = CanaryModel(len(member), mechanism.clip_norm)
        self.slices, self.coordinates = model.slices(), model.coordinates()
        free = np.ones(sum(parameter.numel() for parameter in model.parameters()), dtype=bool)
        free[self.coordinates] = False
        self.spares = np.flatnonzero(free)  # coordinates without canaries
        free[self.coordinates[~member]] = True
        self.empty = np.flatnonzero(free)[: max(2, KEEP // mechanism.steps)]  # coordinates with pure noise
        self.of_canary = {
            name: (self.coordinates >= part.start) & (self.coordinates < part.stop)
            for name, part in self.slices.items()
        }
        self.scores = np.zeros(len(member))
        self.spare = [0.0, 0]  # sum of squares and count at spare coordinates
        self.noise: list[np.ndarray] = []
        self.inclusion: list[np.ndarray] = []
        self.once = True
        self.contributions = {name: Contribution() for name, owned in self.of_canary.items() if owned.any()}
        self.coefficients = mechanism.noise.coefficients()
        bands = len(self.coefficients)
        self.past: deque[np.ndarray] = deque(maxlen=bands - 1)  # o, latest first
        self.recent: deque[np.ndarray] = deque(maxlen=bands)  # w, earliest first
        self.batches: deque[np.ndarray] = deque(maxlen=bands)  # their users

    def run(self, watch: Watch) -> Observation:
        m = self.mechanism
        restart = m.steps // 2
        trainer = self._joined(self._trainer(self.data))
        groups = self._groups(trainer)
        same = other_data = None
        for step in watch(range(m.steps)):
            if step == restart:
                trainer, saved = self._restarted(trainer)
                other_data = self._noise_with_another_user(saved)
                same = self._same_batches(trainer)
            self._look(step, *self._advance(trainer), groups)
        # Completes the contributions of the last steps.
        for step in range(m.steps, m.steps + len(self.coefficients) - 1):
            self._collect(step, np.zeros_like(self.recent[0]), np.zeros(0, dtype=np.int64), groups)
        assert same is not None and other_data is not None
        return Observation(
            mechanism=m,
            member=self.member,
            scores=self.scores,
            noise=np.stack(self.noise),
            inclusion=self._rounds(),
            once=self.once,
            in_turn=self._in_turn(),
            columns=self._columns(),
            contributions=self.contributions,
            ledger=trainer.optimizer.events(),
            same_batches=same,
            other_data=other_data,
            runs=None if self.seed is not None else np.stack([self._noise_of_a_run() for _ in range(2)]),
            restart=restart,
        )

    # Successive trainers.

    def _plan(self, users: int) -> Plan:
        m = self.mechanism
        return Plan(
            users=users,
            expected_batch_size=m.sample_rate * users,
            steps=m.steps,
            epsilon_target=1.0,
            delta=1 / users,
            clip_norm=m.clip_norm,
            noise_multiplier=m.noise_multiplier,
            releases=(),
            private=self.seed is None,
            noise=m.noise,
            clipping=m.clipping,
        )

    def _trainer(self, data: Dataset) -> Trainer:
        plan = self._plan(data.num_users)
        # Several micro-batches per process of a team.
        tokens = 1024 if self.team is None else max(1, int(plan.expected_batch_size) // (3 * self.team.size))
        model = CanaryModel(len(self.member), plan.clip_norm)
        adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        return Trainer(
            users=Watched(data),
            batches=plan.sampler(seed=self.seed),
            sum=GradientSum(model, plan.clip, tokens),
            optimizer=plan.optimizer(adam, context=f"audit of data {data.hash}", seed=self.seed),
            schedule=lambda step: LEARNING_RATE,
            dropout=SecureRandom("dropout", seed=self.seed),
        )

    def _joined(self, trainer: Trainer) -> Trainer:
        if self.team is not None:
            self.team.enlist(trainer, partial(CanaryModel, len(self.member), self.mechanism.clip_norm))
        return trainer

    def _restarted(self, trainer: Trainer) -> tuple[Trainer, dict[str, Any]]:
        """A new trainer that resumes from a checkpoint on disk, as after a crash."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            save_checkpoint(path, {"trainer": trainer.state()}, config="audit", data="canaries")
            saved = load_checkpoint(path, config="audit", data="canaries")["trainer"]
        fresh = self._trainer(self.data)
        fresh.restore(saved)
        return self._joined(fresh), saved

    def _noise_with_another_user(self, saved: dict[str, Any]) -> np.ndarray:
        """The noise of the same checkpoint on other data. Equal noise would cancel in the difference."""
        # The same number of users, which the sampler's state contains.
        changed = np.append(self.members[1:], self.members[1])
        neighbour = self._trainer(canary_data(changed, len(self.member)))
        neighbour.restore(saved)
        with in_another_process():
            return self._kept(self._advance(neighbour)[0])

    def _noise_of_a_run(self) -> np.ndarray:
        """The first noise of a further run, on the sum of nobody: under one key it would be the same in every run."""
        trainer = self._trainer(self.data)
        self.past.clear()
        return self._kept(self._released(trainer, trainer.optimizer.step))

    def _same_batches(self, trainer: Trainer) -> bool:
        other = self._trainer(self.data).batches
        other.load_state_dict(trainer.batches.state_dict())
        last = self.mechanism.steps - 1
        return all(np.array_equal(other.draw(t), trainer.batches.draw(t)) for t in (0, last // 2, last))

    def _advance(self, trainer: Trainer) -> tuple[np.ndarray, np.ndarray]:
        """o_t of a step, and who was in it."""
        assert isinstance(trainer.users, Watched)
        trainer.users.taken()
        return self._released(trainer, trainer.advance), trainer.users.taken()

    def _released(self, trainer: Trainer, step: Callable[[], object]) -> np.ndarray:
        """o_t, the sum that one step hands to Adam, of all parameters one behind the other."""
        seen: list[np.ndarray] = []

        def look(*_: object) -> None:
            gradients = [cast(Tensor, parameter.grad) for parameter in trainer.model.parameters()]
            numbers = torch.cat([gradient.flatten().double() for gradient in gradients])
            seen.append(numbers.numpy() * trainer.optimizer.expected_batch_size / self.mechanism.clip_norm)

        handle = trainer.optimizer.inner.register_step_pre_hook(look)
        try:
            step()
        finally:
            handle.remove()
        (released,) = seen
        return released

    # Recording of a step.

    def _groups(self, trainer: Trainer) -> np.ndarray:
        """(canaries,) the group of each canary; random for those that never take part."""
        chance = np.random.default_rng(None if self.seed is None else [self.seed, 1])
        groups = chance.integers(0, self.mechanism.noise.groups, len(self.member))
        if self.mechanism.noise.groups > 1:
            groups[self.members] = trainer.batches.groups(0, len(self.members))
        return groups

    def _look(self, step: int, released: np.ndarray, batch: np.ndarray, groups: np.ndarray) -> None:
        self.noise.append(self._kept(released))
        times = np.bincount(batch, minlength=len(self.members))
        self.once &= bool((times <= 1).all())
        self.inclusion.append(times[: max(2, KEEP // self.mechanism.steps)] > 0)
        self._collect(step, self._whitened(released), batch, groups)
        self.past.appendleft(released)

    def _collect(self, step: int, whitened: np.ndarray, batch: np.ndarray, groups: np.ndarray) -> None:
        """Record the step whose contributions this one completes."""
        self.recent.append(whitened)
        self.batches.append(batch)
        if len(self.recent) == len(self.coefficients):
            whole = step < self.mechanism.steps
            total = sum(c * w for c, w in zip(self.coefficients, self.recent, strict=True))
            turn = groups == self.mechanism.noise.turn(step + 1 - len(self.coefficients))
            self._record(cast(np.ndarray, total), self.batches[0], turn, whole)

    def _record(self, seen: np.ndarray, batch: np.ndarray, turn: np.ndarray, whole: bool) -> None:
        m, canaries = self.mechanism, seen[self.coordinates]
        self.spare[0] += float(np.square(seen[self.spares]).sum())
        self.spare[1] += len(self.spares)
        sigma = max((self.spare[0] / self.spare[1]) ** 0.5, 1e-3 * m.noise_multiplier)
        self.scores[turn] += _log_ratio(canaries[turn], m.event.sample_rate, sigma)
        if not whole:
            return
        taking_part = self.members[batch]
        for name, contribution in self.contributions.items():
            contribution.add(canaries[taking_part[self.of_canary[name][taking_part]]])

    def _whitened(self, released: np.ndarray) -> np.ndarray:
        """Row t of C·o: its noise is independent of all other rows'."""
        whitened = self.coefficients[0] * released
        for c, past in zip(self.coefficients[1:], self.past, strict=False):
            whitened = whitened + c * past
        return cast(np.ndarray, whitened)

    def _kept(self, released: np.ndarray) -> np.ndarray:
        return (self._whitened(released)[self.empty] / self.mechanism.noise_multiplier).astype(np.float32)

    def _columns(self) -> dict[str, np.ndarray]:
        """Which of the kept values belong to which parameter."""
        ends = {name: np.searchsorted(self.empty, [part.start, part.stop]) for name, part in self.slices.items()}
        return {name: np.arange(*end) for name, end in ends.items() if end[1] > end[0]}

    def _rounds(self) -> np.ndarray:
        """(⌊T / groups⌋, some): participation by round."""
        groups = self.mechanism.noise.groups
        steps = np.stack(self.inclusion[: self.mechanism.steps // groups * groups])
        return np.logical_or.reduce(steps.reshape(-1, groups, steps.shape[1]), axis=1)

    def _in_turn(self) -> bool:
        steps, users = np.stack(self.inclusion).nonzero()
        order = np.lexsort((steps, users))
        apart, same = np.diff(steps[order]), np.diff(users[order]) == 0
        return bool((apart[same] >= self.mechanism.noise.groups).all())


def _log_ratio(released: np.ndarray, q: float, sigma: float) -> np.ndarray:
    """log(1 − q + q·eˡ), l = (2o − 1)/(2σ²), without overflow."""
    loss = (2 * released - 1) / (2 * sigma**2)
    if q == 1:
        return loss
    return np.logaddexp(np.log1p(-q), np.log(q) + loss)
