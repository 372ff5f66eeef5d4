"""The options of a run: the sections of all rooms in one flat, frozen value; unknown keys are refused.

Options come from a recipe, a TOML file and flags, each overriding the one before. None means that the value is chosen
once the public facts are known (`Config.resolve`): the resolved config is written to the run folder as `config.toml`,
and reading that file gives the same config back.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from dpformer.data.options import FILTERS, OF_FORMAT, OF_LOGS, READING, WEIGHING, DataOptions
from dpformer.errors import DpformerError
from dpformer.kinds import auto
from dpformer.kinds.base import ModelKind
from dpformer.kinds.options import ModelOptions
from dpformer.kinds.recipes import RECIPES
from dpformer.kinds.registry import KINDS, named_by, trained_names
from dpformer.options import Options
from dpformer.queries.options import PrivacyOptions
from dpformer.runs.config_file import nearest, one_sentence, read_toml, toml_value, without_removed
from dpformer.runs.options import RunOptions
from dpformer.statement.deployment import Deployment
from dpformer.training.options import TrainingOptions

SECTIONS: tuple[type[Options], ...] = (DataOptions, ModelOptions, PrivacyOptions, TrainingOptions, RunOptions)

# Where a run computes rather than what it computes. These are not part of the hash, so that a log may be moved and
# another machine may resume a run. The contents of the data are bound by their own hash.
WHERE = (
    "file",
    "snapshot",
    "catalog",
    "cache",
    "tokenizer",
    "base",
    "previous",
    *RunOptions.model_fields,
    "memory",
    "engine",
)
UNHASHED = (*WHERE, "deployment")  # nor what the owner says about the model


class Config(RunOptions, TrainingOptions, PrivacyOptions, ModelOptions, DataOptions):
    """All options of a run. A frozen value: two equal configs on the same data and keys give the same model."""

    deployment: Deployment | None = Field(None)  # a section of its own

    @property
    def default_length(self) -> int | None:
        """Training items per history unless `max_length` is set; None: whole histories."""
        return self.kind.default_length(self)

    @property
    def kind(self) -> ModelKind:
        """The kind of model; `auto` counts as one of its candidates until it is decided."""
        return auto.UNDECIDED if self.model == auto.AUTO else KINDS[self.model]

    def on_file(self, file: Path | None, *, unfiltered: bool = False, **given: Any) -> Config:
        """The same options for another log on this machine, except for those given here.

        Options for the format of a file (delimiter, table, …) apply only to a log of the same format.

        Args:
            file: the other log.
            unfiltered: without the filters of this config.
            given: other options of `READING`.
        """
        if unknown := [name for name in given if name not in READING]:
            near = nearest(unknown[0], READING)
            raise DpformerError(f"unknown option {unknown[0]!r} for reading a log; the nearest is {near!r}")
        dropped = [*(OF_FORMAT if self._of_other_format(file) else ()), *(FILTERS if unfiltered else ())]
        dropped += ["snapshot", *WEIGHING] if file != self.file else []
        reset = {name: Config.model_fields[name].default for name in dropped}
        engine = None if self.engine == "spark" else self.engine
        return self.replace(**{**reset, "engine": engine, **given, "file": file})

    def _of_other_format(self, file: Path | None) -> bool:
        from dpformer.data.readers.formats import same_format  # DuckDB

        if self.task != "recommend" or file is None:
            return False
        return self.engine == "spark" or not same_format(file, self.file, self.format)

    @property
    def items_policy(self) -> str:
        """The source of the item list: a public `catalog`, `dp` (released from the data), or `assumed-public`."""
        if self.catalog is not None or self.synthetic or self.task == "lm":
            return "catalog"
        return "assumed-public" if self.assume_items_public or not self.private else "dp"

    @property
    def items_given(self) -> bool:
        """Whether the guarantee is conditional on the item list, which was taken from the data unprotected."""
        return self.private and self.items_policy == "assumed-public"

    @property
    def filter_seen(self) -> bool:
        """Whether the model is meant for recommendations without items of the history."""
        return not self.repeat_weight

    @property
    def needs_frequencies(self) -> bool:
        """Whether the model needs a query for item frequencies, which transition counts include."""
        return self.kind.needs_frequencies(self)

    # Validation.

    @model_validator(mode="before")
    @classmethod
    def _choose_model(cls, given: dict[str, Any]) -> dict[str, Any]:
        """`auto` is decided by other options, or once the public facts are known; a path names a checkpoint."""
        name = given.get("model", auto.AUTO)
        if str(name) in KINDS:
            return given
        if name == auto.AUTO:
            return {**given, "model": auto.by_choices(given)}
        choices = named_by(Path(str(name)))
        if choices is None:
            known = ", ".join([auto.AUTO, *KINDS])
            raise ValueError(f"model is {str(name)!r}; it must be one of {known}, or a folder")
        return {**choices, **given, "model": choices["model"], "base": choices["base"]}

    @model_validator(mode="after")
    def _check(self) -> Config:
        """Contradictions between options. Messages are shown to users verbatim."""
        self.kind.refuse(self)
        self._check_task()
        self._check_engine()
        self.check_data()
        self.check_model()
        if self.catalog is not None and self.assume_items_public and self.recipe == "default":
            raise ValueError("catalog and assume_items_public are both given, but a catalogue is public: omit one")
        self.check_privacy()
        if self.private:
            self._check_shares()
        return self

    def _check_shares(self) -> None:
        """Every query needs a share of the budget, and something must remain for the model."""
        from dpformer.queries.registry import asked_queries  # torch

        queries = [query for query in asked_queries(self) if query is not self.kind.release]
        for query in queries:
            if not query.share(self):
                raise ValueError(self.kind.without_share(self, query.share_option or query.label))
        if sum(query.share(self) for query in queries) >= 1:
            names = " and ".join(query.share_option or query.label for query in queries)
            raise ValueError(f"{names} leave nothing for training: lower them")

    def _check_engine(self) -> None:
        if self.engine != "spark":
            return
        if self.task != "recommend":
            raise ValueError("engine is spark, which reads logs of items, not text: omit engine")
        if self.cache is None and (self.kind.trains or self.private_metrics):
            name = "private_metrics" if self.private_metrics else f"model {self.model}"
            raise ValueError(f"{name} needs histories on this machine: give --cache FOLDER, where Spark writes them")
        if self.cache is None and self.snapshot is not None:
            raise ValueError("snapshot names histories that --cache holds; in a cluster, a state is chosen in --query")
        if self.split == "time":
            raise ValueError("split is time, which engine spark does not support: filter by time in --query")
        if self.file is None and self.table is None and self.query is None:
            raise ValueError("engine is spark: give --table db.events, --query, or Parquet files")

    def _check_task(self) -> None:
        if self.task == "recommend":
            given = [
                name for name in ("unit", "characters", "tokenizer", "text_column") if getattr(self, name) is not None
            ]
            if given:
                raise ValueError(f"{given[0]} applies to text: give --task lm, or omit it")
            return
        if self.file is None:
            raise ValueError("--task lm needs a file of text")
        if self.unit is None:
            raise ValueError("the unit of privacy is missing: give --unit chunk, line, document or author")
        if self.characters is not None and self.tokenizer is not None:
            raise ValueError("characters and tokenizer are both given: choose one")
        if not self.kind.text:
            raise ValueError(f"{self.model} support items of users only; text needs --model {trained_names()}")
        for name in (*OF_LOGS, "private_metrics", "warm_start", "previous"):
            if getattr(self, name) != Config.model_fields[name].default:
                raise ValueError(f"{name} applies to logs of items, not to text: omit it")

    # From files and flags.

    @classmethod
    def make(cls, path: Path | None = None, **flags: Any) -> Config:
        """The config of a TOML file (if any), overridden by flags, on top of the recipe that they name."""
        given = without_removed(read_toml(path)) if path is not None else {}
        given.update({name: value for name, value in flags.items() if value is not None})
        _name_previous(given)
        _refuse_unknown(given, path)
        _refuse_ignored(given)
        recipe = given.get("recipe", "default")
        if recipe not in RECIPES:
            raise DpformerError(f"recipe is {recipe!r}; it must be one of {', '.join(RECIPES)}")
        chosen = {**RECIPES[recipe], **given}
        if chosen.get("model", auto.AUTO) == auto.AUTO:
            chosen["model"] = auto.by_choices(chosen, explicit=given)
        return cls._checked(chosen)

    def replace(self, **changes: Any) -> Config:
        """The same config with some options changed, validated again."""
        return self._checked({**dict(self), **changes})

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> Config:
        try:
            return cls(**values)
        except ValidationError as error:
            raise DpformerError(one_sentence(error)) from None

    def resolve(self, *, users: int, threads: int) -> Config:
        """The config with all open options set, given the public number of users. Paths become absolute."""
        if self.model == auto.AUTO:
            raise ValueError("the model is not chosen yet: see kinds/auto.py")
        from dpformer.data.sources.urls import resolved  # numpy
        from dpformer.training.device import device_of  # torch

        return self.replace(
            file=self.file and resolved(self.file),
            catalog=self.catalog and self.catalog.resolve(),
            cache=self.cache and self.cache.resolve(),
            tokenizer=self.tokenizer and self.tokenizer.resolve(),
            base=self.base and self.base.resolve(),
            previous=self.previous and self.previous.resolve(),
            delta=self.delta or 1 / (users if self.recipe.startswith("paper") else 10 * users),
            threads=self.threads or threads,
            device=str(device_of(self.device)),
            **self.kind.resolved(self, users),
        )

    # To the run folder.

    def to_toml(self) -> str:
        """Every option under its section as a comment, except None and those that do not apply to this model."""
        lines: list[str] = []
        for section in SECTIONS:
            chosen = {name: getattr(self, name) for name in section.model_fields if name not in self.kind.silent}
            lines += ["", f"# {section.section}"]
            lines += [f"{name} = {toml_value(value)}" for name, value in chosen.items() if value is not None]
        if self.deployment is not None:
            filled = self.deployment.filled().items()
            lines += ["", "[deployment]"] + [f"{name} = {toml_value(value)}" for name, value in filled]
        return "\n".join(lines[1:]) + "\n"

    def hash(self) -> str:
        """SHA-256 of the options that define the result and differ from their default; excludes `UNHASHED`."""
        defaults = {name: field.default for name, field in Config.model_fields.items()}
        defaults["model"] = auto.UNDECIDED.name  # the default before `auto`, which is never hashed
        excluded = {*UNHASHED, *(self.kind.silent if self.base is not None else ())}  # nor in config.toml
        values = {name: value for name, value in self if name not in excluded and value != defaults[name]}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def section_of(name: str) -> str:
    """The title of the section that declares an option."""
    return next(section.section for section in SECTIONS if name in section.model_fields)


def _name_previous(given: dict[str, Any]) -> None:
    """`warm_start` is a share or a run folder, which is the option `previous`."""
    warm = given.get("warm_start")
    if not isinstance(warm, str | Path):
        return
    try:
        given["warm_start"] = float(str(warm))
    except ValueError:
        given["previous"] = Path(given.pop("warm_start"))


def _refuse_unknown(given: dict[str, Any], path: Path | None) -> None:
    for name in given:
        if name not in Config.model_fields:
            place = f" in {path}" if path is not None else ""
            near = nearest(name, Config.model_fields)
            raise DpformerError(f"unknown key {name!r}{place}; the nearest valid key is {near!r}")


def _refuse_ignored(given: dict[str, Any]) -> None:
    """Refuse an option that would have no effect."""
    name = given.get("model", auto.AUTO)
    named = None if name == auto.AUTO or str(name) in KINDS else named_by(Path(str(name)))
    kind = KINDS.get(str(name) if named is None else named["model"])
    ignored = [] if kind is None else [option for option in kind.silent if option in given]
    if kind is not None and ignored:
        raise DpformerError(kind.ignores(ignored[0], str(name)))
