"""The ledger: releases and training steps are events in it, and ε covers all of them together."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.arguments import whole
from dpformer.accounting.events import Event, Gaussian, PoissonGaussian

ADJACENCY = "zero-out-one-user"  # N is public and unchanged; the same sensitivity as adding or removing one user


class Ledger:
    """What touched the data, in order, and what it costs under adding or removing all of one user's data.

    >>> ledger = Ledger()
    >>> ledger.gaussian(8.0, label="frequencies")
    >>> ledger.poisson_gaussian(3.31, sample_rate=1024 / 6040, steps=590, label="training")
    >>> round(ledger.epsilon(1 / 6040), 2)
    4.99

    A ledger can hold what is planned, or what was done so far: record each step as it is taken (`steps=1`; equal events
    are counted together, so the ledger does not grow), or ask a plan for a part of it, `ledger.after(100, "training")`.
    A single step of correlated noise costs as much as a round of them (mechanisms/banded.py): record all of them at
    once.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._events: list[Event] = []
        self.extend(events)

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def add(self, event: Event) -> None:
        """Record an event; if counts add up, one that differs only in its count is merged into the recorded one."""
        if not isinstance(event, Event):
            raise TypeError(f"a ledger holds events, not {event!r}")
        for index, recorded in enumerate(self._events):
            if event.adds_up and type(recorded) is type(event) and recorded.repeated(0) == event.repeated(0):
                self._events[index] = recorded.repeated(recorded.repeats + event.repeats)
                return
        self._events.append(event)

    def extend(self, events: Iterable[Event]) -> None:
        """Record several events, such as those of another ledger."""
        for event in list(events):
            self.add(event)

    def gaussian(
        self, noise_multiplier: float, count: int = 1, label: str = "", *, delta: float = 0.0, private: bool = True
    ) -> None:
        """Record releases of a vector of L2 sensitivity 1 per user with noise on every coordinate; see `Gaussian`."""
        self.add(Gaussian(noise_multiplier, count, label=label, delta=delta, private=private))

    def poisson_gaussian(
        self, noise_multiplier: float, sample_rate: float, steps: int, label: str = "", *, private: bool = True
    ) -> None:
        """Record steps of DP-SGD: noisy sums over Poisson-sampled users; see `PoissonGaussian`."""
        self.add(PoissonGaussian(noise_multiplier, sample_rate, steps, label=label, private=private))

    def after(self, steps: int, label: str) -> "Ledger":
        """What is spent after `steps` repetitions of the event with this label, with all other events unchanged."""
        found = [event for event in self._events if event.label == label]
        if len(found) != 1:
            raise ValueError(f"{len(found)} events have the label {label!r}; there must be one")
        if whole("steps", steps, 0) > found[0].repeats:
            raise ValueError(f"only {found[0].repeats} steps are planned for {label!r}, not {steps}")
        return Ledger(event.repeated(steps) if event is found[0] else event for event in self._events)

    def epsilon(self, delta: float, accountant: str = "pld") -> float:
        """ε at this δ of all events together; see `epsilon_of`."""
        return epsilon_of(self._events, delta, accountant)

    @property
    def private(self) -> bool:
        """Whether the noise of every event was secret; False if any was seeded or absent."""
        return all(event.private and event.noise_multiplier > 0 for event in self._events)

    def to_dict(self) -> dict[str, Any]:
        return {"adjacency": ADJACENCY, "events": [event.to_dict() for event in self._events]}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> "Ledger":
        """The inverse of `to_dict`; anything unknown, missing or out of range is an error."""
        if not isinstance(facts, dict) or set(facts) != {"adjacency", "events"}:
            raise ValueError(f"a ledger has the keys adjacency and events, not {facts!r}")
        if facts["adjacency"] != ADJACENCY:
            raise ValueError(f"adjacency must be {ADJACENCY}, not {facts['adjacency']!r}")
        if not isinstance(facts["events"], list):
            raise ValueError(f"events must be a list, not {facts['events']!r}")
        return cls(Event.from_dict(event) for event in facts["events"])

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        try:
            return cls.from_dict(json.loads(text))
        except RecursionError:
            raise ValueError("a ledger is not nested that deeply") from None

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __len__(self) -> int:
        return len(self._events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._events == other._events

    def __repr__(self) -> str:
        return f"Ledger({self._events!r})"
