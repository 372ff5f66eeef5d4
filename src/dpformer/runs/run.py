"""A run, from config to released model: start or resume, loop with checkpoints, release, statement."""

from __future__ import annotations

import hashlib
import hmac
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from dpformer.data import Dataset
from dpformer.data.statement import order_line
from dpformer.errors import DpformerError
from dpformer.evaluation.evaluate import masked_ranks
from dpformer.models import SequenceModel
from dpformer.models.counts import TransitionCounts
from dpformer.models.warm_start import low_rank_items
from dpformer.privacy import Ledger, SecureRandom
from dpformer.privacy.events import METRICS, Event
from dpformer.releases.metrics import MetricRelease, release_metrics
from dpformer.runs.checkpoint import check_data, load_checkpoint, save_checkpoint
from dpformer.runs.config import Config
from dpformer.runs.folder import Metrics, RunFolder
from dpformer.runs.model_file import Release, load_release, save_release
from dpformer.runs.network import (
    build_assistant,
    build_model,
    item_frequencies,
    load_dataset,
    make_trainer,
    release_counts,
)
from dpformer.runs.planning import make_plan
from dpformer.runs.progress import TrainingProgress
from dpformer.runs.statement import statement
from dpformer.runs.statement_file import check_shape
from dpformer.runs.tasks import task_of
from dpformer.training.plan import Plan
from dpformer.training.trainer import Step, Trainer

if TYPE_CHECKING:
    from dpformer.training.distributed import Team


class Interrupted(DpformerError):
    """Ctrl-C or SIGTERM; the state is saved."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    config: Config
    statement: dict[str, Any]

    @cached_property
    def release(self) -> Release:
        """The model with its vocabulary and metadata."""
        return load_release(self.folder / "model.safetensors")


def train(config: Config, out: str | Path, team: Team | None = None) -> Run:
    """Trains a model and writes the run folder `out`, which must not be there yet.

    With a `team` of processes, this one leads it; the others are to call `team.follow()`.
    """
    RunFolder(out).refuse_existing()
    random = SecureRandom("run", seed=config.seed)
    with _threads(config.threads) as threads:
        dataset = load_dataset(config, random)
        if config.file is not None and (said := order_line(dataset.description)):
            Console(stderr=True).print(said, markup=False, highlight=False, soft_wrap=True)
        config = config.resolve(users=dataset.num_users, threads=threads)
        plan = make_plan(config, dataset.num_users)
        folder = RunFolder.create(out, config.to_toml())
        with folder.lock():
            return _Session(folder, config, plan, dataset, random, team=team).go()


def started_before(config: Config, out: str | Path) -> bool:
    """Whether `out` is a run of this very config: what a job that is started again finds."""
    folder = RunFolder(out)
    if not folder.config.is_file():
        return False
    saved = Config.make(folder.config)
    given = {name: value.resolve() if isinstance(value, Path) else value for name, value in config}
    return all(value is None or value == getattr(saved, name) for name, value in given.items())


def resume(path: str | Path, team: Team | None = None, *, file: Path | None = None) -> Run:
    """Goes on with an interrupted run to the model it would have made; a run that is done is left as it is.

    `file` is where the log is now, if it was moved; it must hold the same data.
    """
    folder = RunFolder.open(path)
    config = Config.make(folder.config)
    if file is not None:
        config = config.but(file=file.resolve())
    with folder.lock(), _threads(config.threads):
        if folder.done:
            folder.forget_secrets()  # it may have been killed just before
            return finished(folder.path)
        random, state = SecureRandom("run", seed=config.seed), None
        if folder.checkpoint.exists():  # else it was stopped before the first step: nothing was released
            state = load_checkpoint(folder.checkpoint, config=config.hash())
            random = random.with_state(state["random"])
        dataset = load_dataset(config, random)
        if state is not None:
            check_data(folder.checkpoint, state["data"], dataset.hash)
        plan = make_plan(config, dataset.num_users) if state is None else Plan.from_dict(state["plan"])
        return _Session(folder, config, plan, dataset, random, state, team).go()


def finished(path: str | Path) -> Run:
    """Opens a run that is done."""
    folder = RunFolder.open(path)
    if not folder.done:
        raise DpformerError(f"{folder.path} is not finished; go on with: dpformer train --resume {folder.path}")
    facts = check_shape(folder.read_json(folder.statement), folder.statement)
    return Run(folder.path, Config.make(folder.config), facts)


class _Session:
    """One process at work in a run folder."""

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        plan: Plan,
        dataset: Dataset,
        random: SecureRandom,
        state: dict[str, Any] | None = None,
        team: Team | None = None,
    ) -> None:
        self.team = team
        self.folder, self.config, self.plan = folder, config, plan
        self.dataset, self.random, self.resumed = dataset, random, state
        self.frequencies = None if state is None else state["frequencies"]
        self.task = task_of(config)
        self.ledger = Ledger()  # what happened
        # A private list of items was released while the data was read; after a crash, so was all before training.
        self.ledger.extend(event for event in plan.releases if event.label == "vocabulary" or self._released(event))

    def _released(self, event: Event) -> bool:
        return self.resumed is not None and event.label != METRICS

    def go(self) -> Run:
        """Trains to the last step and releases."""
        if self.config.model == "counts":  # seconds; nothing to save on the way
            counts = self._release_counts()
            self._remember_data()
            Metrics(self.folder.metrics, 0).close()
            return self._release(counts)
        with torch.random.fork_rng(devices=[]):
            trainer = self._trainer()
            if self.team is not None:
                build = partial(build_assistant, self.config, self.plan, self.dataset.num_items)
                self.team.enlist(trainer, build, self.config.device)
            self._train(trainer)
            self.ledger.add(trainer.event)
            return self._release(trainer.released())

    def _release_counts(self) -> TransitionCounts:
        counts, self.frequencies, paid = release_counts(self.config, self.plan, self.dataset)
        self.ledger.extend(paid)
        return counts

    def _trainer(self) -> Trainer:
        start: TransitionCounts | None = None
        if self.resumed is None and self.config.warm_start:
            start = self._release_counts()
        elif self.resumed is None:
            self.frequencies, paid = item_frequencies(self.config, self.plan, self.dataset)
            self.ledger.extend(paid)
        model = build_model(self.config, self.plan, self.dataset.num_items, self.frequencies, self.random)
        if start is not None:
            model.start_items(low_rank_items(start, model.dim))
        trainer = make_trainer(self.config, self.plan, self.dataset, model, self.random)
        if self.resumed is not None:
            trainer.restore(self.resumed["trainer"])
            return trainer
        # Before the first step, so that no resumed run ever draws other noise for the same step.
        self._remember_data()
        self._save(trainer)
        return trainer

    def _train(self, trainer: Trainer) -> None:
        metrics = Metrics(self.folder.metrics, trainer.step)
        progress = TrainingProgress(self.plan.steps, start=trainer.step, private=self.plan.private)
        saved = time.monotonic()
        with _signals() as stop, progress:
            while trainer.step < self.plan.steps:
                record = self._record(self._advance(trainer), trainer)
                metrics.add(record)
                progress.update(record)
                if self._evaluation_is_due(trainer):
                    metrics.add(record := self._evaluate(trainer))
                    progress.say(self.task.line(record))
                if stop.is_set() or time.monotonic() - saved >= self.config.checkpoint_seconds:
                    self._save(trainer)
                    saved = time.monotonic()
                if stop.is_set():
                    raise Interrupted(
                        f"stopped after step {trainer.step:,} of {self.plan.steps:,}, all saved; "
                        f"go on with: dpformer train --resume {self.folder.path}"
                    )
        metrics.close()

    def _advance(self, trainer: Trainer) -> Step:
        try:
            return trainer.advance()
        except ValueError as error:
            if self.config.private:  # the sum holds finite users only
                raise
            raise DpformerError(f"training without clipping has diverged ({error}): lower --learning-rate") from None

    def _record(self, step: Step, trainer: Trainer) -> dict[str, Any]:
        """What metrics.jsonl keeps of a step: exact statistics of the data, and an upper bound on ε so far."""
        losses = torch.cat([part.losses for part in step.parts]) if step.parts else torch.zeros(0)
        norms = torch.cat([part.norms for part in step.parts if part.norms is not None] or [torch.zeros(0)])
        losses, norms = losses[losses.isfinite()], norms[norms.isfinite()]
        spent = self.plan.spent(step.number)
        return {
            "step": step.number,
            "epoch": round(step.number * self.plan.sample_rate, 4),
            "loss": float(losses.mean()) if len(losses) else None,
            "median_norm": float(norms.median()) if len(norms) else None,
            "users": step.users,
            "skipped_users": trainer.sum.skipped_users,
            "learning_rate": step.learning_rate,
            "epsilon": spent if math.isfinite(spent) else None,
            "micro_batch_tokens": trainer.sum.tokens,
            "seconds": round(step.seconds, 4),
        }

    def _save(self, trainer: Trainer) -> None:
        state = {
            "random": self.random.state_dict(),
            "plan": self.plan.to_dict(),
            "frequencies": self.frequencies,
            "trainer": trainer.state(),
        }
        save_checkpoint(self.folder.checkpoint, state, config=self.config.hash(), data=self.dataset.hash)

    def _remember_data(self) -> None:
        self.folder.write_json(self.folder.data, {"hash": self.dataset.hash, "salt": self._salt().hex()})

    def _salt(self) -> bytes:
        return self.random.within("salt of the hash of the data").words(4, step=0).tobytes()

    # Evaluation on users' own held-out items: for the owner's eyes, and without influence on training.

    def _evaluation_is_due(self, trainer: Trainer) -> bool:
        if not self.config.evaluate_every:
            return False
        epoch, before = (int(step * self.plan.sample_rate + 1e-9) for step in (trainer.step, trainer.step - 1))
        every = self.config.evaluate_every
        return epoch // every > before // every or trainer.step == self.plan.steps

    def _evaluate(self, trainer: Trainer) -> dict[str, Any]:
        found = self.task.evaluate(trainer.released(), self.dataset, self.config)
        epoch = round(trainer.step * self.plan.sample_rate, 4)
        return {"step": trainer.step, "epoch": epoch, **found, "covered": False}

    # The end.

    def _release(self, model: SequenceModel | TransitionCounts) -> Run:
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise DpformerError("training has diverged: weights are not finite; lower --learning-rate and train again")
        facts = self._statement(self._metrics(model))
        save_release(
            self.folder.model,
            model,
            vocabulary=self.dataset.vocabulary,
            frequencies=self.frequencies,
            metadata={
                **{name: facts[name] for name in ("headline", "private", "epsilon", "delta", "versions")},
                **self.task.metadata(self.config, self.dataset),
            },
        )
        self.folder.write_json(self.folder.statement, facts)
        self.folder.forget_secrets()
        return Run(self.folder.path, self.config, facts)

    def _metrics(self, model: SequenceModel | TransitionCounts) -> MetricRelease | None:
        """Accuracy of the model on held-out items, with noise, once: a resumed run draws the same noise again."""
        noise = self.plan.noise_of(METRICS)
        if noise is None:
            return None
        random = self.random.within(f"metrics config {self.config.hash()} data {self.dataset.hash}")
        metrics = release_metrics(masked_ranks(model, self.dataset), noise, random=random)
        self.ledger.add(metrics.event)
        return metrics

    def _statement(self, metrics: MetricRelease | None) -> dict[str, Any]:
        self._check_ledger()
        data = hmac.new(self._salt(), self.dataset.hash.encode(), hashlib.sha256).hexdigest()
        return statement(
            [event for planned in self.plan.events for event in self.ledger if event.label == planned.label],
            delta=self.plan.delta,
            target=self.config.epsilon,
            clipping=self.config.clipping,
            clip_norm=self.plan.clip_norm,
            expected_batch_size=self.plan.expected_batch_size,
            users=self.plan.users,
            seeded=not self.random.private,
            data=self.task.sentences(self.dataset),
            unit=self.task.unit(self.config),
            metrics=None if metrics is None else metrics.to_dict(),
            hashes={"config": self.config.hash(), "data (salted; the salt is in checkpoint/)": data},
        )

    def _check_ledger(self) -> None:
        """What happened is what was planned and σ calibrated for; else nothing is released."""
        happened, planned = (sorted(repr(event) for event in events) for events in (self.ledger, self.plan.events))
        if happened != planned:
            raise RuntimeError(f"what happened, {happened}, is not what was planned, {planned}: nothing is released")


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM set the event once; a second one ends the process at once, as after a kill."""
    stop = threading.Event()
    former: dict[int, Any] = {}

    def ask(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, former[number])

    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def _threads(wanted: int | None) -> Iterator[int]:
    """The number of threads is part of a run: another one adds numbers up in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
