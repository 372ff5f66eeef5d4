"""A query: one touch of the data besides training, from the plan to the audit.

Everything that a run needs to know about one kind of query is in one object:

    planned    `asked`, `share`, `event`: whether a config needs it, its share of the budget, and its cost
    run        `run` returns the value and the event for the ledger; `exact` the value without privacy
    said       `sentence`, `words`: the sentences of the privacy statement
    kept       `arrays` are the noisy numbers as released; `restore` rebuilds the value from them
    verified   `checks`: whether the released numbers have the noise recorded in the ledger
    audited    `canaries`: what the query reveals about synthetic users

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
    from dpformer.data import Dataset, Vocabulary
    from dpformer.data.attributes import Attributes
    from dpformer.evaluation import ServedRanks
    from dpformer.noise import SecureRandom
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan

ALARM = 1e-6  # p-value below which a check fails
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Question:
    """What a query may read."""

    config: Config
    dataset: Dataset
    ranks: Callable[[], ServedRanks] | None = None  # held-out items under the trained model, for `after_training`


class Answer(NamedTuple):
    """The result of a query: a value that may be published, and its cost. The event is None without privacy."""

    value: Any
    event: Event | None


@dataclass(frozen=True)
class Inspection:
    """What `verify` knows about a run. Values computed from untrusted files are functions, because they may fail."""

    config: Config
    statement: Mapping[str, Any]
    plan: Callable[[], Plan]  # the plan of the config, recalibrated
    events: Callable[[], list[Event]]  # events in the ledger
    arrays: Callable[[], Arrays | None]  # releases.safetensors; None if missing
    vocabulary: Callable[[], Vocabulary]  # the items of the model
    attributes: Callable[[], Attributes | None]  # public attributes of the model's items; None: no catalogue was read
    dataset: Dataset | None  # None: the data was not read
    ranks: Callable[[], ServedRanks]  # ranks of the dataset's held-out items under the model


@dataclass(frozen=True)
class Canaries:
    """What one release reveals about synthetic users, minus what the attacker knows. A random half takes part."""

    estimate: np.ndarray  # (canaries,) 1[j takes part] + deviation·N(0, 1)
    deviation: float
    # (rows, some) pure noise: values released where no canary takes part, over their standard deviation.
    noise: np.ndarray
    others: dict[str, np.ndarray] = field(default_factory=dict)  # other noise over its standard deviation, by name
    many: np.ndarray | None = (
        None  # (canaries,) bool: canaries that contribute to many cells, where the norm exceeds the maximum
    )
    alone: tuple[int, int, float] | None = (
        None  # users with unique items: (number released, number of users, bound on the probability)
    )


class Query(ABC):
    """One kind of query that a run asks of the data."""

    label: ClassVar[str]  # label of its event in the ledger; it also addresses its random numbers
    sentence: ClassVar[str]  # what the data was queried for, in words
    after_training: ClassVar[bool] = False  # whether it is about the trained model
    stated: ClassVar[str] = ""  # the field of the statement with its value, if any
    share_option: ClassVar[str] = ""  # the config field with its share of the budget

    # Planned.

    @abstractmethod
    def asked(self, config: Config) -> bool:
        """Whether a config needs it."""

    def share(self, config: Config) -> float:
        """Its share of the budget, in (0, 1); 0 for the query that fits the model, which gets the rest."""
        return float(getattr(config, self.share_option))

    def failure(self, config: Config) -> float:
        """The δ that it spends outright, besides its noise."""
        return 0.0

    def event(self, config: Config, noise_multiplier: float) -> Gaussian:
        """Its planned event."""
        return Gaussian(noise_multiplier, label=self.label, delta=self.failure(config), private=config.seed is None)

    # Run.

    @abstractmethod
    def run(self, question: Question, event: Event, random: SecureRandom) -> Answer:
        """Run it with the noise of the planned event. The same random numbers give the same noise."""

    def exact(self, question: Question) -> Any:
        """The value without noise, for a run without privacy."""
        raise NotImplementedError(f"{self.label} cannot be queried without privacy")

    # Said.

    def words(self, event: Mapping[str, Any], facts: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
        """Its sentence in the privacy statement, from its event there."""
        return touch(self.sentence, event, unit)

    def facts(self, value: Any) -> dict[str, Any]:
        """Its value for the statement, as `stated`."""
        return dict(value.to_dict())

    # Kept.

    def arrays(self, value: Any, config: Config) -> dict[str, np.ndarray]:
        """The noisy numbers as released, for releases.safetensors; names are unique across queries."""
        return {}

    def array_kinds(self, name: str) -> tuple[type, int] | None:
        """The type and number of dimensions of one of its arrays; None if it has none of that name."""
        return None

    def private_arrays(self, value: Any) -> dict[str, np.ndarray]:
        """What a resumed run needs besides `arrays`, and must stay private."""
        return {}

    def restore(self, arrays: Arrays, config: Config, plan: Plan) -> Any:
        """The value, from `arrays` (and `private_arrays`, if present). Invalid arrays raise ValueError."""
        return None

    # Verified.

    def problem(self, seen: Inspection, arrays: Arrays) -> str:
        """What is wrong with the released numbers, regardless of the data; empty if nothing."""
        return ""

    def checks(self, seen: Inspection) -> Iterator[Callable[[], Finding]]:
        """Checks that its noise is that of the ledger, and that derived values are correct."""
        yield from ()

    # Audited.

    def canary_count(self, wanted: int) -> int:
        """The number of canaries to use, at least `wanted`, if not every number is possible."""
        return wanted

    def canaries(self, event: Gaussian, member: np.ndarray, seed: int | None = None) -> Canaries:
        """Run the query, with the noise of `event`, on canaries, of which `member` (canaries, bool) take part.

        A seed is for tests only.
        """
        raise NotImplementedError(f"there is no audit of {self.label}")


def touch(sentence: str, event: Mapping[str, Any], unit: UnitOfPrivacy) -> str:
    """The sentence of the statement about one release of sensitivity 1."""
    return (
        f"The data was queried once for {sentence}, with noise of standard deviation "
        f"{plain(event['noise_multiplier'])} where one {unit.name} can contribute at most 1 (ε = "
        f"{round_up(event['epsilon_alone'])} on its own); the ε above includes it."
    )
