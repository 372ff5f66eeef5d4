"""What an attacker sees: training itself, run on canaries, and every noisy sum that it hands to the optimizer.

Nothing is simulated. The `Trainer` of `dpformer train` draws the users, cuts micro-batches, clips, sums, adds noise and
steps Adam; it is stopped half-way, saved to a checkpoint and resumed by a new one. Only the model and the data are made
up (canaries.py). What is watched is `p.grad` as Adam receives it: all that training ever learns about the users.

    o_tj = (noisy sum at canary j's coordinate in step t) / C
    L_j = Σ_t log(1 − q + q·exp((2·o_tj − 1) / (2σ²)))      the likelihood ratio of "j takes part" to "j does not"

with σ not as claimed but as seen at spare coordinates, since an attacker would look: less noise than claimed is then
used to the full. Spare coordinates are nobody's, so this costs the statistics nothing.

Noise that is correlated over b steps (privacy/mechanisms) is first made independent again, w = C·o. What canary j adds
in step t is then spread over w_t … w_{t+b−1}, and collected from there: Σ_k c_k·w_{t+k} takes the place of o_t, and the
ratio that of a round: each of the g ≥ b groups has one step in it, and q is g·q. The attacker knows everybody's group.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from dpformer.accounting.events import PoissonGaussian
from dpformer.data import Dataset
from dpformer.noise import SecureRandom
from dpformer.noise.mechanisms import INDEPENDENT, Noise
from dpformer.runs.checkpoint import load_checkpoint, save_checkpoint
from dpformer.training.gradient_sum import GradientSum
from dpformer.training.plan import Plan
from dpformer.training.trainer import Trainer
from dpformer.verification.audit.canaries import CanaryTable, canary_data

if TYPE_CHECKING:
    from dpformer.training.distributed import Team

LEARNING_RATE = 5e-3  # any: what is watched is what the optimizer is handed
KEEP = 2**23  # numbers of noise kept for the checks, and of inclusion
Watch = Callable[[range], Iterable[int]]


@dataclass(frozen=True)
class Mechanism:
    """What is claimed of training, and so what is audited."""

    noise_multiplier: float
    sample_rate: float
    steps: int
    clip_norm: float = 1.0
    clipping: str = "normalize"
    noise: Noise = INDEPENDENT

    @property
    def event(self) -> PoissonGaussian:
        """What it costs, as steps with independent noise: a round of all groups is one."""
        planned = self.noise.event(self.noise_multiplier, self.sample_rate, self.steps)
        return PoissonGaussian(self.noise_multiplier, planned.rate, planned.compositions)

    def to_dict(self) -> dict[str, Any]:
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "noise"}
        return facts | self.noise.settings()


@dataclass
class Observation:
    """What came out of one run on canaries."""

    mechanism: Mechanism
    member: np.ndarray  # (canaries,) bool
    scores: np.ndarray  # (canaries,) L_j
    noise: np.ndarray  # (T, some) float32: w_tj at canaries that never take part, in deviations of the claimed noise
    inclusion: (
        np.ndarray
    )  # (T, some) bool: which members were in which batch; with groups, in which whole round of them
    in_turn: bool  # nobody was twice in a round of all groups, wherever it begins
    contribution: tuple[float, float]  # mean of o_tj where j was in batch t, and its standard error
    unevenness: tuple[float, int]  # Σ ((o_tj − 1)/σ)² over the same, and how many they are
    same_batches: bool  # a second process with the same key draws the same batches
    other_data: np.ndarray  # (some,): the first noise after the restart, had one user been another
    other_run: np.ndarray | None  # (some,): the first noise of another run; None with a seed
    restart: int  # the step before which training was stopped and resumed


def observe(
    mechanism: Mechanism, canaries: int, *, seed: int | None = None, watch: Watch = iter, team: Team | None = None
) -> Observation:
    """Trains on about half of the canaries, by the toss of coins, and records what is released about all of them.

    With a `team` of processes this one leads; the others are to call `team.follow()`.
    """
    member = np.random.default_rng(seed).random(canaries) < 0.5
    return _Observer(mechanism, member, seed, team).run(watch)


class _Observer:
    def __init__(self, mechanism: Mechanism, member: np.ndarray, seed: int | None, team: Team | None) -> None:
        self.mechanism, self.member, self.seed, self.team = mechanism, member, seed, team
        self.members, self.others = np.flatnonzero(member), np.flatnonzero(~member)
        self.data = canary_data(self.members, len(member))
        self.scores = np.zeros(len(member))
        self.spare = [0.0, 0]  # sum of squares and count at spare coordinates
        self.noise: list[np.ndarray] = []
        self.inclusion: list[np.ndarray] = []
        self.of_included = [0.0, 0.0, 0]  # sum, sum of squares around 1, count
        self.coefficients = mechanism.noise.coefficients()
        bands = len(self.coefficients)
        self.past: deque[np.ndarray] = deque(maxlen=bands - 1)  # o, the latest first
        self.recent: deque[np.ndarray] = deque(maxlen=bands)  # w, the earliest first
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
            self._look(step, self._advance(trainer), trainer.batches.batch(step), groups)
        for step in range(
            m.steps, m.steps + len(self.coefficients) - 1
        ):  # what the last steps added is cut off by the end
            self._collect(step, np.zeros_like(self.recent[0]), np.zeros(0, dtype=np.int64), groups)
        assert same is not None and other_data is not None
        total, squares, count = self.of_included
        return Observation(
            mechanism=m,
            member=self.member,
            scores=self.scores,
            noise=np.stack(self.noise),
            inclusion=self._rounds(),
            in_turn=self._in_turn(),
            contribution=(total / max(count, 1), m.noise_multiplier / max(count, 1) ** 0.5),
            unevenness=(squares / m.noise_multiplier**2, int(count)),
            same_batches=same,
            other_data=other_data,
            other_run=None if self.seed is not None else self._noise_of_another_run(),
            restart=restart,
        )

    # One trainer after the other.

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
        # Several micro-batches for every process of a team.
        tokens = 1024 if self.team is None else max(1, int(plan.expected_batch_size) // (3 * self.team.size))
        model = CanaryTable(len(self.member), plan.clip_norm)
        adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        return Trainer(
            users=data,
            batches=plan.sampler(seed=self.seed),
            sum=GradientSum(model, plan.clip, tokens),
            optimizer=plan.optimizer(adam, context=f"audit of data {data.hash}", seed=self.seed),
            schedule=lambda step: LEARNING_RATE,
            dropout=SecureRandom("dropout", seed=self.seed),
        )

    def _joined(self, trainer: Trainer) -> Trainer:
        if self.team is not None:
            self.team.enlist(trainer, partial(CanaryTable, len(self.member), self.mechanism.clip_norm))
        return trainer

    def _restarted(self, trainer: Trainer) -> tuple[Trainer, dict[str, Any]]:
        """Another trainer that goes on from a checkpoint on disk, as after a crash."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            save_checkpoint(path, {"trainer": trainer.state()}, config="audit", data="canaries")
            saved = load_checkpoint(path, config="audit", data="canaries")["trainer"]
        fresh = self._trainer(self.data)
        fresh.restore(saved)
        return self._joined(fresh), saved

    def _noise_with_another_user(self, saved: dict[str, Any]) -> np.ndarray:
        """The noise that the same checkpoint gives on other data. Equal noise would cancel in the difference."""
        changed = np.append(self.members[1:], self.members[1])  # as many users: the sampler's state names the number
        neighbour = self._trainer(canary_data(changed, len(self.member)))
        neighbour.restore(saved)
        return self._kept(self._advance(neighbour))

    def _noise_of_another_run(self) -> np.ndarray:
        first = self._advance(self._trainer(self.data))
        self.past.clear()
        return self._kept(first)

    def _same_batches(self, trainer: Trainer) -> bool:
        other = self._trainer(self.data).batches
        other.load_state_dict(trainer.batches.state_dict())
        last = self.mechanism.steps - 1
        return all(np.array_equal(other.batch(t), trainer.batches.batch(t)) for t in (0, last // 2, last))

    def _advance(self, trainer: Trainer) -> np.ndarray:
        """(canaries + spare,) o_t: the sum that one step hands to Adam, at every coordinate, in units of C."""
        seen: list[np.ndarray] = []
        (table,) = trainer.parameters

        def look(*_: object) -> None:
            assert table.grad is not None
            total = table.grad.detach().double() * trainer.optimizer.expected_batch_size
            seen.append(torch.flatten(total).numpy() / self.mechanism.clip_norm)

        handle = trainer.optimizer.inner.register_step_pre_hook(look)
        try:
            trainer.advance()
        finally:
            handle.remove()
        (released,) = seen
        return released

    # What is kept of a step.

    def _groups(self, trainer: Trainer) -> np.ndarray:
        """(canaries,) the group of each; those that never take part have one by chance."""
        chance = np.random.default_rng(None if self.seed is None else [self.seed, 1])
        groups = chance.integers(0, self.mechanism.noise.groups, len(self.member))
        if self.mechanism.noise.groups > 1:
            groups[self.members] = trainer.batches.groups(0, len(self.members))
        return groups

    def _look(self, step: int, released: np.ndarray, batch: np.ndarray, groups: np.ndarray) -> None:
        self.noise.append(self._kept(released))
        included = np.zeros(len(self.members), dtype=bool)
        included[batch] = True
        self.inclusion.append(included[: max(2, KEEP // self.mechanism.steps)])
        self._collect(step, self._whitened(released), batch, groups)
        self.past.appendleft(released)

    def _collect(self, step: int, whitened: np.ndarray, batch: np.ndarray, groups: np.ndarray) -> None:
        """Records the step whose last trace this one holds."""
        self.recent.append(whitened)
        self.batches.append(batch)
        if len(self.recent) == len(self.coefficients):
            whole = step < self.mechanism.steps
            total = sum(c * w for c, w in zip(self.coefficients, self.recent, strict=True))
            turn = groups == self.mechanism.noise.turn(step + 1 - len(self.coefficients))
            self._record(cast(np.ndarray, total), self.batches[0], turn, whole)

    def _record(self, seen: np.ndarray, batch: np.ndarray, turn: np.ndarray, whole: bool) -> None:
        m, count = self.mechanism, len(self.member)
        self.spare[0] += float(np.square(seen[count:]).sum())
        self.spare[1] += len(seen) - count
        sigma = max((self.spare[0] / self.spare[1]) ** 0.5, 1e-3 * m.noise_multiplier)
        self.scores[turn] += _log_ratio(seen[:count][turn], m.event.sample_rate, sigma)
        if not whole:
            return
        added = seen[self.members[batch]]
        for place, value in enumerate((float(added.sum()), float(np.square(added - 1).sum()), len(batch))):
            self.of_included[place] += value

    def _whitened(self, released: np.ndarray) -> np.ndarray:
        """Row t of C·o: its noise is independent of all other rows'."""
        whitened = self.coefficients[0] * released
        for c, past in zip(self.coefficients[1:], self.past, strict=False):
            whitened = whitened + c * past
        return cast(np.ndarray, whitened)

    def _kept(self, released: np.ndarray) -> np.ndarray:
        some = self.others[: max(2, KEEP // self.mechanism.steps)]
        return (self._whitened(released)[some] / self.mechanism.noise_multiplier).astype(np.float32)

    def _rounds(self) -> np.ndarray:
        """(⌊T / groups⌋, some): who took part in which round."""
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
