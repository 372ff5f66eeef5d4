"""A query: one touch of the data besides training, from the plan to the audit.

Everything that a run knows about one kind of question stands in one object:

    planned    `asked`, `share`, `event`: whether a config asks it, its share of the budget, and what it costs
    run        `run` gives the value and the event that goes into the ledger; `exact` the same without privacy
    said       `sentence`, `words`: what the data was counted for, in the privacy statement
    kept       `arrays` are the noisy numbers as released; `restore` makes the value of them again
    verified   `checks`: whether the released numbers have the noise of the ledger
    audited    `canaries`: what the query shows of made-up users

A new query is one file with one subclass, registered in `queries.registry`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from dpformer.accounting.events import Event, Gaussian
from dpformer.accounting.units import UnitOfPrivacy
from dpformer.findings import Finding
from dpformer.format_number import plain, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from dpformer.data import Dataset, Vocabulary
    from dpformer.noise import SecureRandom
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan

ALARM = 1e-6  # p-value below which numbers are not what they claim to be
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Question:
    """What a query may look at."""

    config: Config
    dataset: Dataset
    ranks: Callable[[], Tensor] | None = None  # (U,) of held-out items under the trained model, for `after_training`


class Answer(NamedTuple):
    """What a query gives: a value that may be published, and what it costs. The event is None without privacy."""

    value: Any
    event: Event | None


@dataclass(frozen=True)
class Inspection:
    """What `verify` has at hand about a run. What is computed from a stranger's files is a function: it may fail."""

    config: Config
    statement: Mapping[str, Any]
    plan: Callable[[], Plan]  # of the config, calibrated again
    events: Callable[[], list[Event]]  # the ledger
    arrays: Callable[[], Arrays | None]  # releases.safetensors; None if it is not there
    vocabulary: Callable[[], Vocabulary]  # the items of the model
    dataset: Dataset | None  # None: the data was not read
    ranks: Callable[[], Tensor]  # of the dataset's held-out items under the model


@dataclass(frozen=True)
class Canaries:
    """What one release shows of made-up users, less what the attacker knows. Half of them, at random, take part."""

    estimate: np.ndarray  # (canaries,) 1[j takes part] + deviation·N(0, 1)
    deviation: float
    noise: np.ndarray  # (rows, some) numbers released where nobody takes part, over their deviation: noise alone
    others: dict[str, np.ndarray] = field(default_factory=dict)  # further noise over its deviation, by name
    many: np.ndarray | None = None  # (canaries,) bool: those who add to many cells, where a norm is more than a maximum
    alone: tuple[int, int, float] | None = None  # users with items nobody else has: released, asked, chance at most


class Query(ABC):
    """One kind of question that a run asks of the data."""

    label: ClassVar[str]  # of its event in the ledger; it addresses its random numbers too
    sentence: ClassVar[str]  # what the data was counted for, in words
    after_training: ClassVar[bool] = False  # it is about the trained model
    stated: ClassVar[str] = ""  # the field of the statement that holds its value; none by default
    share_option: ClassVar[str] = ""  # the field of the config with its share of the budget

    # Planned.

    @abstractmethod
    def asked(self, config: Config) -> bool:
        """Whether a config asks it."""

    def share(self, config: Config) -> float:
        """Its share of the budget, in (0, 1); of a query that a kind of model is made of, nothing: it gets the rest."""
        return float(getattr(config, self.share_option))

    def failure(self, config: Config) -> float:
        """δ that it spends outright, besides its noise."""
        return 0.0

    def event(self, config: Config, noise_multiplier: float) -> Gaussian:
        """What it will cost."""
        return Gaussian(noise_multiplier, label=self.label, delta=self.failure(config), private=config.seed is None)

    # Run.

    @abstractmethod
    def run(self, question: Question, event: Event, random: SecureRandom) -> Answer:
        """Asks it, with the noise of the planned event. The same random numbers give the same noise."""

    def exact(self, question: Question) -> Any:
        """The value without noise, for a run without privacy."""
        raise NotImplementedError(f"{self.label} is not asked without privacy")

    # Said.

    def words(self, event: Mapping[str, Any], facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        """Its sentence in the privacy statement, from its event there."""
        return touch(self.sentence, event, unit)

    def facts(self, value: Any) -> dict[str, Any]:
        """Its value for the statement, under `stated`."""
        return dict(value.to_dict())

    # Kept.

    def arrays(self, value: Any, config: Config) -> dict[str, np.ndarray]:
        """The noisy numbers as released, for releases.safetensors; names are unique over all queries."""
        return {}

    def array_kinds(self, name: str) -> tuple[type, int] | None:
        """The type and the number of dimensions of one of its arrays; None if it has none of that name."""
        return None

    def private_arrays(self, value: Any) -> dict[str, np.ndarray]:
        """What a resumed run needs besides `arrays`, and nobody else may see."""
        return {}

    def restore(self, arrays: Arrays, config: Config, plan: Plan) -> Any:
        """The value, from `arrays` (and `private_arrays`, if there). What no release could be is a ValueError."""
        return None

    # Verified.

    def problem(self, seen: Inspection, arrays: Arrays) -> str:
        """What is wrong with the released numbers, whatever the data was; nothing if all is right."""
        return ""

    def checks(self, seen: Inspection) -> Iterator[Callable[[], Finding]]:
        """Whether its noise is that of the ledger, and what was made of it is right."""
        yield from ()

    # Audited.

    def canary_count(self, wanted: int) -> int:
        """At least as many canaries as wanted, where not every number will do."""
        return wanted

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        """Runs the query, with the noise of `event`, on canaries of whom `member` (canaries, bool) take part.

        A seed is for tests only.
        """
        raise NotImplementedError(f"there is no audit of {self.label}")


def touch(sentence: str, event: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
    """The sentence of the statement on one release of sensitivity 1."""
    return (
        f"The data was counted once for {sentence}, with random noise of deviation "
        f"{plain(event['noise_multiplier'])} where one {unit.name} can add at most 1 (alone ε = "
        f"{round_up(event['epsilon_alone'])}); the ε above includes it."
    )
