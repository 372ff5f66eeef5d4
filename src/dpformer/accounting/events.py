"""Events: what touches the data, and how noisily. Each kind is one small frozen class.

All assume zero-out adjacency: adding or removing one user's data while the number of users stays public. A new kind is
a dataclass with `kind`, the name of the field that counts its repetitions, and `once()`, its dp-accounting event.
Training events are defined with their noise, in noise/mechanisms/.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from dpformer.accounting.arguments import delta_of, not_negative, sample_rate_of, whole

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# Labels of training events whose assumptions the caller vouches for.
ASSUMED_CLIPPED = "that sums hold each user of their batch once, and clipped, is assumed, not checked"
ASSUMED_ONCE = "without sampling; that each user counts once in a step is assumed, not checked"
ASSUMED_RATE = "that users were sampled at this rate, each once in a step, is assumed, not checked"
ASSUMED_EXACT = "that gradients of users are exact, with the engine's self-check off, is assumed, not checked"
ASSUMPTIONS = (ASSUMED_CLIPPED, ASSUMED_ONCE, ASSUMED_RATE, ASSUMED_EXACT)
KINDS: dict[str, "type[Event]"] = {}  # by name; a ledger may hold these


@dataclass(frozen=True)
class Event:
    """One mechanism, repeated. `label` says what for; `private` is False if the noise was seeded (tests)."""

    kind: ClassVar[str]
    counted_by: ClassVar[str]  # the field with the number of repetitions
    adds_up: ClassVar[bool] = True  # whether m repetitions and n more cost the same as m + n
    noise_multiplier: float
    label: str = field(default="", kw_only=True)
    private: bool = field(default=True, kw_only=True)

    def __init_subclass__(cls) -> None:
        KINDS[cls.kind] = cls

    def __post_init__(self) -> None:
        self._set("noise_multiplier", not_negative("noise_multiplier", self.noise_multiplier))
        self._set(self.counted_by, whole(self.counted_by, getattr(self, self.counted_by), 0))
        if not isinstance(self.label, str):
            raise ValueError(f"label must be a string, not {self.label!r}")
        if not isinstance(self.private, bool):
            raise ValueError(f"private must be true or false, not {self.private!r}")

    def _set(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)  # NumPy numbers become Python's, so that equal events have equal JSON

    @property
    def repeats(self) -> int:
        return int(getattr(self, self.counted_by))

    @property
    def compositions(self) -> int:
        """How many of `once()` the event costs."""
        return self.repeats

    @property
    def failure(self) -> float:
        """δ that one repetition spends outright, besides its noise: it is subtracted from the total δ."""
        return 0.0

    def repeated(self, times: int) -> "Event":
        """The same mechanism, `times` times."""
        changes: dict[str, Any] = {self.counted_by: times}
        return replace(self, **changes)

    def once(self) -> "DpEvent":
        """One repetition, for dp-accounting; called only if there is noise, since ε is infinite without."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    @staticmethod
    def from_dict(facts: dict[str, Any]) -> "Event":
        """The inverse of `to_dict`; an unknown kind, an unknown key or a missing one is an error."""
        import_module("dpformer.noise.mechanisms")  # registers the events of correlated noise
        if not isinstance(facts, dict) or not isinstance(facts.get("kind"), str) or facts["kind"] not in KINDS:
            raise ValueError(f"an event must have a kind, one of {', '.join(KINDS)}, not {facts!r}")
        kind = KINDS[facts["kind"]]
        given, known = set(facts) - {"kind"}, {field.name for field in fields(kind)}
        if given != known:
            raise ValueError(f"a {kind.kind} event has the keys {sorted(known)}, not {sorted(given)}")
        return kind(**{name: facts[name] for name in known})


@dataclass(frozen=True)
class Gaussian(Event):
    """`count` releases of a vector of L2 sensitivity 1 per user, with N(0, noise_multiplier²) on every coordinate.

    `delta` is the failure probability of each release besides the noise (the threshold of a released item list).
    """

    kind = "gaussian"
    counted_by = "count"
    count: int = 1
    delta: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta != 0:
            self._set("delta", delta_of(self.delta))

    @property
    def failure(self) -> float:
        return self.delta

    def once(self) -> "DpEvent":
        return _gaussian(self.noise_multiplier)


@dataclass(frozen=True)
class PoissonGaussian(Event):
    """`steps` noisy sums, each over users who are in it independently with probability `sample_rate` (DP-SGD).

    In units of the clip norm: the sum has sensitivity 1, the noise has standard deviation `noise_multiplier`.
    """

    kind = "poisson_gaussian"
    counted_by = "steps"
    sample_rate: float
    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("sample_rate", sample_rate_of(self.sample_rate))

    def once(self) -> "DpEvent":
        import dp_accounting

        gaussian = _gaussian(self.noise_multiplier)
        if self.rate == 1:  # everyone takes part: no amplification, and Gaussians compose in closed form
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.rate, gaussian)

    @property
    def rate(self) -> float:
        """The probability that a user takes part in one of the `compositions`."""
        return self.sample_rate


def _gaussian(noise_multiplier: float) -> "DpEvent":
    import dp_accounting

    return dp_accounting.GaussianDpEvent(noise_multiplier)
