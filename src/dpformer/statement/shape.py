"""Reading `privacy.json`: an untrusted file until it has the shape of a statement.

Whether it is *true* is for `verify` to check; here it only has to be complete enough to be shown.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpformer.errors import DpformerError
from dpformer.evaluation.metrics import released
from dpformer.noise.mechanisms import noise_of

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=1e-300, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Event(_Part):
    kind: str
    label: str
    noise_multiplier: Number
    epsilon_alone: Number


class _Metrics(_Part):
    of: str
    deviation: Number

    @model_validator(mode="after")
    def _every_metric(self) -> "_Metrics":
        values = self.model_extra or {}
        for label in (metric.label() for metric in released()):
            if type(values.get(label)) is not float or not 0 <= values[label] <= 1:
                raise ValueError(f"{label} is {values.get(label)!r}, not a number from 0 to 1")
        return self


class _Attack(_Part):
    false_positive_rate: Probability
    true_positive_rate: Probability
    precision: dict[str, Probability]


class _Tuning(_Part):
    mean_runs: Number


class _Budget(_Part):
    epsilon: Number
    delta: Probability
    spent: Number
    runs: Annotated[int, Field(ge=1)]
    entry: Annotated[int, Field(ge=1)] | None = None  # its number in the ledger; ledgers before SQLite had none
    hash: str | None = None


class _Prior(_Part):
    runs: Annotated[int, Field(ge=1)]
    statement: str
    delta: Probability
    epsilon: Number
    events: list[_Event]


class _Statement(_Part):
    private: bool
    epsilon: Number | None
    delta: Probability | None
    unit: Literal["user", "example", "chunk", "line", "document", "author"]
    adjacency: str
    users: Annotated[int, Field(ge=1)]
    accountant: str | None
    sample_rate: Probability | None
    steps: Annotated[int, Field(ge=0)] | None
    noise_multiplier: Number | None
    clipping: str | None
    clip_norm: Number | None
    events: list[_Event]
    random_source: str
    data: list[str]
    not_covered: list[str]
    hashes: dict[str, str]
    versions: dict[str, str]
    headline: str
    words: list[str]
    metrics: _Metrics | None = None
    tuning: _Tuning | None = None
    budget: _Budget | None = None
    prior: _Prior | None = None
    attack: _Attack | None = None
    epsilon_one_run: Number | None = None
    nist_sp_800_226: dict[str, str] = {}


def check_shape(facts: dict[str, Any], path: Path) -> dict[str, Any]:
    """The same facts, or one sentence on what is missing or has the wrong type."""
    try:
        found = _Statement.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        where, what = ".".join(map(str, first["loc"])), " ".join(first["msg"].split())
        raise DpformerError(f"{path} is not a privacy statement: {where}: {what}") from None
    try:
        noise_of(facts)
    except ValueError as error:
        raise DpformerError(f"{path} is not a privacy statement: {error}") from None
    needed = (found.epsilon, found.delta) if found.private or found.epsilon is not None else (0, 0)
    steps = (found.sample_rate, found.noise_multiplier, found.clip_norm) if found.steps and found.epsilon else ()
    tuned = (found.epsilon_one_run,) if found.tuning is not None else ()
    if None in (*needed, *steps, *tuned):
        raise DpformerError(f"{path} is not a privacy statement: a number that its claims require is missing")
    return facts
