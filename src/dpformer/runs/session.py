"""One process that works in a run folder: queries, fit, queries about the model, release.

The ledger records what happened. At the end it is compared with the plan for which σ was calibrated; if they differ,
nothing is released.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dpformer.accounting import Event, Ledger
from dpformer.data import Attributes, Dataset, Vocabulary
from dpformer.data.restrict_vocabulary import restrict_to_vocabulary
from dpformer.data.shared_store import Store
from dpformer.errors import DpformerError
from dpformer.kinds.ranking import served_ranks
from dpformer.noise import SecureRandom
from dpformer.progress import say
from dpformer.queries.base import Question
from dpformer.queries.registry import asked_queries
from dpformer.queries.released import Released, planned, release_before_training, resumed
from dpformer.runs.checkpoint import save_checkpoint
from dpformer.runs.config import Config
from dpformer.runs.folder import Metrics, RunFolder
from dpformer.runs.keys import commitment
from dpformer.runs.loop import train_to_the_end
from dpformer.runs.model_file import save_release, sha256_of
from dpformer.runs.previous import PreviousRun, with_prior
from dpformer.runs.releases_file import save_releases
from dpformer.runs.tasks import task_of
from dpformer.statement.build import DATA_HASH, statement
from dpformer.training.plan import Plan
from dpformer.training.trainer import Trainer

if TYPE_CHECKING:
    from dpformer.training.distributed import Team


class Session:
    """What `ModelKind.fit` receives."""

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
        """
        Args:
            folder: locked.
            config: resolved.
            plan: the plan of the config.
            dataset: the data with all its items.
            random: random numbers from the key of the run.
            state: state of a checkpoint, if the run is resumed.
            team: processes led by this one.
        """
        self.folder, self.config, self.plan = folder, config, plan
        self.dataset, self.random, self.state, self.team = dataset, random, state, team
        self.task = task_of(config)
        self.ledger = Ledger()  # the events so far
        self.released = Released()
        self.stated: dict[str, Any] = {}  # results of queries, for the statement

    # Inputs for fitting.

    @property
    def resuming(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return self.state is not None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The items of the model."""
        return self.released.vocabulary(self.dataset)

    @cached_property
    def users(self) -> Dataset:
        """The training data of a network."""
        return restrict_to_vocabulary(self.dataset, self.vocabulary)

    @property
    def attributes(self) -> Attributes | None:
        """Public attributes of items from the catalogue, if counts use them."""
        return self.vocabulary.attributes if self.config.attributes else None

    # From queries to the release.

    def ask(self) -> None:
        """Ask the queries before training; on resume, their answers come from the checkpoint."""
        if self.state is None:
            self.released = release_before_training(self.config, self.plan, self.dataset, self.random)
        else:
            self.released = self._restored(
                "released", lambda saved: resumed(self.config, self.plan, self.dataset, saved)
            )
        self.ledger.extend(self.released.events)
        ids = self.released.vocabulary(self.dataset).ids
        self.released = with_prior(self.released, self.config, ids, self.plan.users)
        asked = [query for query in asked_queries(self.config) if self.config.private and not query.after_training]
        self._compare_ledger([planned(self.plan, query) for query in asked])

    def fit_and_release(self) -> dict[str, Any]:
        """Fit the model, ask the queries about it, write it with its statement, and return the statement."""
        if not self.config.kind.trains:  # takes seconds, so there are no checkpoints
            self._remember_data()
            Metrics(self.folder.metrics, 0).close()
        model = self.config.kind.fit(self)
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise DpformerError(
                "training has diverged (the weights are not finite): lower --learning-rate and train again"
            )
        self._ask_about(model)
        self._compare_ledger(self.plan.events)
        return self._release(model)

    # For kinds that are trained in steps.

    def continue_earlier(self, model: Any) -> None:
        """Give a new network the weights of the run that it starts from, if any."""
        if self.config.previous is not None and not self.resuming:
            PreviousRun.open(self.config.previous, self.config).start(model, self.users.vocabulary.ids)

    def start(self, trainer: Trainer) -> Trainer:
        """The trainer at the current step: restored from the checkpoint, or saved to one before step 1."""
        if self.state is not None:
            self._restored("trainer", trainer.restore)
            return trainer
        # Before the first step, so that a resumed run never draws other noise for the same step.
        self._remember_data()
        self.save(trainer)
        return trainer

    def train(self, trainer: Trainer, build: Callable[[], nn.Module]) -> None:
        """Take all remaining steps, in this process and its team; `build` makes the model in the others."""
        if self.team is not None:
            store = Store.of(self.dataset, self.vocabulary)
            self.team.enlist(trainer, build, self.config.device, None if store is None else store.open)
            if store is not None:
                say(
                    f"{len(self.team.readers)} of {self.team.size - 1} other processes read their histories from "
                    f"{store.folder}; the others cannot see it and receive theirs over the network"
                )
        train_to_the_end(self, trainer)
        self.ledger.add(trainer.event)

    def save(self, trainer: Trainer) -> None:
        """Replace the checkpoint."""
        state = {
            "random": self.random.state_dict(),
            "plan": self.plan.to_dict(),
            "released": self.released.state(self.config),
            "trainer": trainer.state(),
        }
        save_checkpoint(self.folder.checkpoint, state, config=self.config.hash(), data=self.dataset.hash)

    def _restored(self, part: str, restore: Callable[[Any], Any]) -> Any:
        assert self.state is not None
        try:
            return restore(self.state[part])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            said = " ".join(str(error).split())[:300]
            raise DpformerError(f"{self.folder.checkpoint} is not the state of this run: {said}") from None

    def _remember_data(self) -> None:
        snapshot = self.dataset.description.get("snapshot")
        named = {} if snapshot is None else {"snapshot": snapshot}
        self.folder.write_json(self.folder.data, {"hash": self.dataset.hash, "salt": self._salt().hex(), **named})

    def _salt(self) -> bytes:
        return self.random.within("salt of the hash of the data").words(4, step=0).tobytes()

    # The end.

    def _ask_about(self, model: Any) -> None:
        """Ask the queries about the model, each once: a resumed run draws the same noise again."""
        question = Question(
            self.config,
            self.dataset,
            ranks=lambda: served_ranks(
                model, self.dataset, vocabulary=self.vocabulary, filter_seen=self.config.filter_seen
            ),
        )
        for query in asked_queries(self.config):
            if not query.after_training:
                if query.stated:
                    self.stated[query.stated] = query.facts(self.released.value(query))
                continue
            random = self.random.within(f"{query.label} config {self.config.hash()} data {self.dataset.hash}")
            answer = query.run(question, planned(self.plan, query), random)
            self.ledger.extend([] if answer.event is None else [answer.event])
            if query.stated:
                self.stated[query.stated] = query.facts(answer.value)

    def _compare_ledger(self, due: Iterable[Event]) -> None:
        """Refuse to release anything unless the events are those planned, for which σ is calibrated."""
        happened, planned_so_far = (sorted(repr(event) for event in events) for events in (self.ledger, due))
        if happened != planned_so_far:
            raise RuntimeError(
                f"the recorded events, {happened}, differ from the plan, {planned_so_far}: nothing is released"
            )

    def _release(self, model: Any) -> dict[str, Any]:
        facts = self._statement()
        if arrays := self.released.arrays(self.config):
            save_releases(self.folder.releases, arrays)
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
        return facts

    def _statement(self) -> dict[str, Any]:
        data = salted(self._salt(), self.dataset.hash, self.dataset.description.get("snapshot"))
        return statement(
            [event for due in self.plan.events for event in self.ledger if event.label == due.label],
            delta=self.plan.delta,
            target=self.config.epsilon,
            clipping=self.config.clipping,
            clip_norm=self.plan.clip_norm,
            expected_batch_size=self.plan.expected_batch_size,
            users=self.plan.users,
            seeded=not self.random.private,
            data=self.task.sentences(self.config, self.plan, len(self.vocabulary), _tokens(self.dataset)),
            unit=self.task.unit(self.config),
            stated=self.stated,
            hashes={"config": self.config.hash(), DATA_HASH: data},
            given=self.config.items_given,
            prior=None if self.config.previous is None else PreviousRun.open(self.config.previous, self.config).facts(),
            model=self.config.model,
            commitment=commitment(self.random),
            budget=self.folder.read_json(self.folder.budget) if self.folder.budget.exists() else None,
        )


def salted(salt: bytes, data: str, snapshot: str | None) -> str:
    """What the statement holds of the data's hash, and of the state of the table that was read."""
    content = data if snapshot is None else f"{data} snapshot {snapshot}"
    return hmac.new(salt, content.encode(), hashlib.sha256).hexdigest()


def _tokens(dataset: Dataset) -> str:
    """The sentence about the vocabulary of text."""
    tokens = getattr(dataset, "tokens", None)
    return "" if tokens is None else str(tokens.description)
