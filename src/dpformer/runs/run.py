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

from dpformer.accounting import Ledger
from dpformer.accounting.events import METRICS
from dpformer.data import Attributes, Dataset
from dpformer.data.restrict_vocabulary import restrict_to_vocabulary
from dpformer.data.shared_store import Store
from dpformer.errors import DpformerError
from dpformer.evaluation.evaluate import served_ranks
from dpformer.models import SequenceModel
from dpformer.models.counts import TransitionCounts
from dpformer.models.warm_start import low_rank_items
from dpformer.noise import SecureRandom
from dpformer.progress import Phases
from dpformer.queries.counts import TransitionRelease
from dpformer.queries.metrics import MetricRelease, release_metrics
from dpformer.runs.checkpoint import check_data, load_checkpoint, save_checkpoint
from dpformer.runs.choice import chosen, with_attributes
from dpformer.runs.config import Config
from dpformer.runs.folder import Metrics, RunFolder
from dpformer.runs.keys import load_keys, save_keys
from dpformer.runs.ledger_file import kept, notes, reserve, taken_back
from dpformer.runs.model_file import Release, load_release, save_release, sha256_of
from dpformer.runs.planning import check_budget, make_plan
from dpformer.runs.prepare_training import (
    Released,
    build_assistant,
    build_model,
    load_dataset,
    make_trainer,
    release_before_training,
    released_before,
)
from dpformer.runs.progress import TrainingProgress
from dpformer.runs.releases_file import save_releases
from dpformer.runs.tasks import task_of
from dpformer.runs.trust import is_own, mark_as_own
from dpformer.statement.build import DATA_HASH, statement
from dpformer.statement.data import order_line
from dpformer.statement.shape import check_shape
from dpformer.statement.signature import private_key, sign
from dpformer.training.allocator import freed_memory_kept
from dpformer.training.plan import Plan
from dpformer.training.trainer import Step, Trainer

if TYPE_CHECKING:
    from dpformer.training.distributed import Team


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(DpformerError):
    """Ctrl-C, SIGTERM or SIGHUP; the state is saved."""


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


def train(
    config: Config,
    out: str | Path,
    team: Team | None = None,
    *,
    key: Path | None = None,
    ledger: Path | Ledger | None = None,
    source: dict[str, str] | None = None,
) -> Run:
    """Trains a model and writes the run folder `out`, which must not be there yet.

    With a `team` of processes, this one leads it; the others are to call `team.follow()`. With a private `key` (PEM,
    Ed25519) the statement is signed. A `ledger` file keeps one budget over many runs (`ledger_file`): this one
    is written down there before anything is released, or refused. A `Ledger` only counts. `source` is
    what whoever gave the data calls it, instead of the file it was put into (`order_line`).
    """
    RunFolder(out).refuse_existing()
    check_budget(config)
    signer = None if key is None else private_key(key)
    random = SecureRandom("run", seed=config.seed)
    phases = Phases()
    with _threads(config.threads) as threads:
        with phases("reading"):
            dataset = load_dataset(config)
        if not config.synthetic and (said := order_line({**dataset.description, **(source or {})})):
            Console(stderr=True).print(said, markup=False, highlight=False, soft_wrap=True)
        reason = ""
        if config.model == "auto":
            config, dataset, choice = chosen(config, dataset)
            reason = f"# model = auto was {choice.model}, because {choice.reason}\n"
            said = f"model: {choice.model}, because {choice.reason}; --model chooses another"
            Console(stderr=True).print(said, markup=False, highlight=False, soft_wrap=True)
        config = with_attributes(config, dataset.vocabulary).resolve(users=dataset.num_users, threads=threads)
        plan = make_plan(config, dataset.num_users)
        budget = config.delta if config.private and config.seed is None and not config.synthetic else None
        for said in notes(out, dataset, budget, ledger is not None):
            Console(stderr=True).print(f"note: {said}", markup=False, highlight=False, soft_wrap=True)
        if ledger is not None:
            if not plan.private:
                raise DpformerError("a run without noise, or with noise of a seed, cannot be counted in a ledger")
            if isinstance(ledger, Ledger):
                ledger.extend(plan.events)
        file = None if isinstance(ledger, Ledger) else ledger
        reserved = None if file is None else reserve(file, out, plan.events)
        with taken_back(file, reserved):
            folder = RunFolder.create(out, reason + config.to_toml())
        with folder.lock(), kept(file, out):
            mark_as_own(folder)
            if reserved is not None:
                folder.write_json(folder.budget, reserved.facts())
            save_keys(folder, random, config=config.hash(), data=dataset.hash)  # before anything is released
            with phases("release"):
                session = _Session(folder, config, plan, dataset, random, team=team)
            with phases("model" if config.model == "counts" else "training"):
                run = session.go()
            if signer is not None:
                sign(folder, signer)
            Console(stderr=True).print(str(phases), markup=False, highlight=False, soft_wrap=True)
            return run


def started_before(config: Config, out: str | Path) -> bool:
    """Whether `out` is a run of this very config: what a job that is started again finds."""
    folder = RunFolder(out)
    if not folder.config.is_file():
        return False
    saved = Config.make(folder.config)
    given = {name: value.resolve() if isinstance(value, Path) else value for name, value in config}
    return all(value in (None, "auto") or value == getattr(saved, name) for name, value in given.items())


def resume(path: str | Path, team: Team | None = None, *, file: Path | None = None, key: Path | None = None) -> Run:
    """Goes on with an interrupted run to the model it would have made; a run that is done is left as it is.

    Nothing is released twice: the keys were saved before anything was, so what was released comes out again, bit for
    bit; where they are gone, and something was, the run is refused.

    Args:
        path: the run folder.
        team: as for `train`.
        file: where the log is now, if it was moved; it must hold the same data.
        key: as for `train`.
    """
    folder = RunFolder.open(path)
    config = Config.make(folder.config)
    if file is not None:
        config = config.replace(file=file.resolve())
    signer = None if key is None else private_key(key)
    with folder.lock(), _threads(config.threads):
        if not folder.done:
            _go_on(folder, config, team)
        folder.forget_secrets()  # it may have been killed just before
        if signer is not None:
            sign(folder, signer)
        return finished(folder.path)


def _go_on(folder: RunFolder, config: Config, team: Team | None) -> None:
    if config.engine == "spark" and not is_own(folder):
        raise DpformerError(
            f"{folder.path} was not made by you on this machine, so that its SQL is not run in a cluster"
        )
    folder.refuse_released(by_steps=config.model != "counts")
    random, state = SecureRandom("run", seed=config.seed), None
    keys = load_keys(folder, config=config.hash())
    if keys is not None:  # else it was stopped before anything was released
        random = random.with_state(keys["random"])
    if folder.checkpoint.exists():
        state = load_checkpoint(folder.checkpoint, config=config.hash())
        random = random.with_state(state["random"])
    # The log is named in the folder, and going on is to read it; where prepared data is written, its owner alone says.
    dataset = load_dataset(config if is_own(folder) else config.replace(cache=None))
    for saved in (keys, state):
        if saved is not None:
            check_data(folder.private, saved["data"], dataset.hash)
    plan = make_plan(config, dataset.num_users)
    if state is not None:
        plan = _same_plan(folder, plan, state)
    elif keys is None:
        save_keys(folder, random, config=config.hash(), data=dataset.hash)
    _Session(folder, config, plan, dataset, random, state, team).go()


def _same_plan(folder: RunFolder, due: Plan, state: dict[str, Any]) -> Plan:
    """The plan of a checkpoint, which is that of the config, or a refusal."""
    try:
        plan = Plan.from_dict(state["plan"])
        noise = state["trainer"]["optimizer"]["noise_multiplier"]
    except (KeyError, TypeError, ValueError) as error:
        raise DpformerError(f"{folder.checkpoint} holds no plan: {error}") from None
    if plan != due or noise != due.noise_multiplier:
        raise DpformerError(
            f"{folder.checkpoint} was made with another plan than config.toml asks for (noise {noise:g}, due "
            f"{due.noise_multiplier:g}): bring back what was changed, or start again with another --out"
        )
    return plan


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
        self.task = task_of(config)
        self.ledger = Ledger()  # what happened
        self.released = self._release_items()
        self.vocabulary = self.released.vocabulary(dataset)

    @cached_property
    def users(self) -> Dataset:
        """What a network is trained on."""
        return restrict_to_vocabulary(self.dataset, self.vocabulary)

    def _release_items(self) -> Released:
        """What is released before training; after a crash in training it is in the checkpoint, and paid for."""
        if self.resumed is None:
            released = release_before_training(self.config, self.plan, self.dataset, self.random)
        else:
            released = released_before(self.config, self.plan, self.resumed["released"])
        self.ledger.extend(released.events)
        return released

    def go(self) -> Run:
        """Trains to the last step and releases."""
        if self.config.model == "counts":  # seconds; nothing to save on the way
            self._remember_data()
            Metrics(self.folder.metrics, 0).close()
            assert self.released.transitions is not None
            return self._release(TransitionCounts.from_release(self.released.transitions, self._attributes))
        with torch.random.fork_rng(devices=[]), freed_memory_kept():
            trainer = self._trainer()
            if self.team is not None:
                build = partial(build_assistant, self.config, self.plan, self.users.num_items)
                store = Store.of(self.dataset, self.vocabulary)
                self.team.enlist(trainer, build, self.config.device, None if store is None else store.open)
                if store is not None:
                    self._say_who_reads(store, self.team)
            self._train(trainer)
            self.ledger.add(trainer.event)
            return self._release(trainer.released())

    def _say_who_reads(self, store: Store, team: Team) -> None:
        Console(stderr=True).print(
            f"{len(team.readers)} of {team.size - 1} other processes read their histories from {store.folder}; the "
            "rest do not see it and are sent theirs",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    @property
    def _attributes(self) -> Attributes | None:
        """What the public catalogue says about items, if counts are to use it."""
        return self.vocabulary.attributes if self.config.attributes else None

    def _trainer(self) -> Trainer:
        if [*self.ledger] != [event for event in self.plan.releases if event.label != METRICS]:
            raise RuntimeError("what was released is not what was planned and σ calibrated for: nothing is trained")
        model = build_model(self.config, self.plan, self.users.num_items, self.released.frequencies, self.random)
        if self.released.transitions is not None:
            model.initialise_items(
                low_rank_items(TransitionCounts.from_release(self.released.transitions, self._attributes), model.dim)
            )
        trainer = make_trainer(self.config, self.plan, self.users, model, self.random)
        if self.resumed is not None:
            try:
                trainer.restore(self.resumed["trainer"])
            except (KeyError, TypeError, ValueError) as error:
                said = " ".join(str(error).split())[:300]
                raise DpformerError(f"{self.folder.checkpoint} is not a state of this run: {said}") from None
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
            "released": self.released.state(),
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
        found = self.task.evaluate(trainer.released(), self.dataset, self.vocabulary, self.config)
        epoch = round(trainer.step * self.plan.sample_rate, 4)
        return {"step": trainer.step, "epoch": epoch, **found, "covered": False}

    # The end.

    def _release(self, model: SequenceModel | TransitionCounts) -> Run:
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise DpformerError("training has diverged: weights are not finite; lower --learning-rate and train again")
        facts = self._statement(self._metrics(model))
        if self.released.frequency_release is not None:
            save_releases(self.folder.releases, self.released.frequency_release, self._counts_released())
            facts["hashes"]["releases"] = sha256_of(self.folder.releases)
        save_release(
            self.folder.model,
            model,
            vocabulary=self.vocabulary,
            frequencies=self.released.frequencies,
            metadata={
                **{name: facts[name] for name in ("headline", "private", "epsilon", "delta", "versions")},
                **self.task.metadata(self.config, self.dataset),
            },
        )
        facts["hashes"]["model"] = sha256_of(self.folder.model)
        self.folder.write_json(self.folder.statement, facts)
        self.folder.forget_secrets()
        return Run(self.folder.path, self.config, facts)

    def _counts_released(self) -> TransitionRelease | None:
        """Transition counts that are the model; those that a network started from are not kept in checkpoints."""
        return self.released.transitions if self.config.model == "counts" else None

    def _metrics(self, model: SequenceModel | TransitionCounts) -> MetricRelease | None:
        """Accuracy of the model on held-out items, with noise, once: a resumed run draws the same noise again."""
        noise = self.plan.noise_of(METRICS)
        if noise is None:
            return None
        random = self.random.within(f"metrics config {self.config.hash()} data {self.dataset.hash}")
        ranks = served_ranks(model, self.dataset, vocabulary=self.vocabulary)
        metrics = release_metrics(ranks, noise, random=random)
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
            data=self.task.sentences(self.config, self.plan, len(self.vocabulary), _tokens(self.dataset)),
            unit=self.task.unit(self.config),
            metrics=None if metrics is None else metrics.to_dict(),
            hashes={"config": self.config.hash(), DATA_HASH: data},
            given=self.config.items_given,
            model=self.config.model,
            budget=self.folder.read_json(self.folder.budget) if self.folder.budget.exists() else None,
        )

    def _check_ledger(self) -> None:
        """What happened is what was planned and σ calibrated for; else nothing is released."""
        happened, planned = (sorted(repr(event) for event in events) for events in (self.ledger, self.plan.events))
        if happened != planned:
            raise RuntimeError(f"what happened, {happened}, is not what was planned, {planned}: nothing is released")


def _tokens(dataset: Dataset) -> str:
    """The sentence on the vocabulary of text."""
    tokens = getattr(dataset, "tokens", None)
    return "" if tokens is None else str(tokens.description)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Ctrl-C, SIGTERM and SIGHUP (the terminal is gone) set the event once.

    A second one ends the process at once, as after a kill.
    """
    stop = threading.Event()
    former: dict[int, Any] = {}

    def ask(number: int, _: Any) -> None:
        stop.set()
        signal.signal(number, former[number])

    if threading.current_thread() is threading.main_thread():
        former = {number: signal.signal(number, ask) for number in STOPPING}
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
