"""The choices of a run: one flat list, from recipe, TOML file and flags, the later winning; unknown keys are refused.

What is None here is decided when the public facts are known (`Config.resolve`): the resolved config is written to the
run folder as `config.toml`, and reading that file gives the same config back.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dpformer.errors import DpformerError
from dpformer.files import read_text
from dpformer.kinds import auto
from dpformer.kinds.base import ModelKind
from dpformer.kinds.registry import KINDS, named_by, trained_names
from dpformer.kinds.transformer import TRANSFORMER, error_by_frequency
from dpformer.statement.deployment import Deployment, sentence

if TYPE_CHECKING:
    from dpformer.data import Columns, Filters, Reading
    from dpformer.noise import Noise

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Section = Literal["Data", "Model", "Privacy", "Training"]
OF_READING = (
    "format", "columns", "delimiter", "quotes", "encoding", "order", "skip_bad_rows", "table", "query", "memory",
)  # fmt: skip
OF_COLUMNS = ("user_column", "item_column", "timestamp_column", "rating_column")
FILTERS = ("where", "since", "until", "min_rating", "min_user_actions")
READING = (*OF_COLUMNS, *OF_READING, *FILTERS)  # options of every command that reads a log
# What describes the format of one file, and says nothing about a file of another format.
OF_FORMAT = ("format", "columns", "delimiter", "quotes", "encoding", "table", "query")
_OF_LOGS = (
    "item_column", "timestamp_column", "rating_column", *FILTERS, "split", "catalog", *OF_READING,
    "attributes", "drop_unknown_items", "assume_items_public", "private_metrics", "warm_start", "validation", "cache",
    "row_exponent",
)  # fmt: skip

# Where it runs, not what comes out: not part of the hash, so that a log may be moved and another machine may go on.
# The contents of the data are bound by their own hash.
WHERE = ("file", "catalog", "cache", "tokenizer", "base", "threads", "device", "checkpoint_seconds", "memory", "engine")
UNHASHED = (*WHERE, "deployment")  # nor what is said about the model

# A recipe is a named set of defaults. "default": the model that is likely the most accurate at the same ε (choice.py);
# with `--model transformer`, the settings of the fields below.
# "paper": Delving into Differentially Private Transformer (ICML 2024).
RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "model": TRANSFORMER.name,
        "max_length": 200,
        "dim": 64,
        "heads": 1,
        "blocks": 2,
        "dropout": 0.2,
        "shared": True,
        "norm": "post",
        "frequency_bias": False,
        "clipping": "normalize",
        "clip_norm": 1.0,
        "batch_size": 1024,
        "epochs": 100,
        "learning_rate": 3e-3,
        "weight_decay": 1e-5,
        "warmup": 0.2,
        "assume_items_public": True,
    },
}
# The paper's language model, of characters (TinyShakespeare); smaller sizes by flags.
RECIPES["paper-lm"] = {
    **RECIPES["paper"],
    "task": "lm",
    "assume_items_public": False,  # tokens are public
    "max_length": 256,
    "dim": 384,
    "heads": 6,
    "blocks": 6,
    "batch_size": None,
    "learning_rate": 1e-3,
}


def _choice(section: Section, default: Any, text: str) -> Any:
    return Field(default, description=text, json_schema_extra={"section": section})


class Config(BaseModel):
    """All choices of a run. A frozen value: two equal configs on the same data and keys give the same model."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    file: Path | None = _choice(
        "Data",
        None,
        "The log: a file, folder, glob, database, URL, or - for standard input; without one, the synthetic default.",
    )
    task: Literal["recommend", "lm"] = _choice("Data", "recommend", "recommend: items of users; lm: text.")
    unit: Literal["chunk", "line", "document", "author"] | None = _choice(
        "Data", None, "Text: what is protected: chunk, line, document or author."
    )
    characters: str | None = _choice(
        "Data", None, "Text: ascii, latin, greek, cyrillic, or Unicode ranges such as U+000A,U+0020-U+007E (ascii)."
    )
    tokenizer: Path | None = _choice("Data", None, "Text: a public tokenizer.json, instead of characters.")
    user_column: str | None = _choice("Data", None, "Column of user ids.")
    item_column: str | None = _choice("Data", None, "Column of item ids.")
    timestamp_column: str | None = _choice("Data", None, "Column of timestamps.")
    rating_column: str | None = _choice("Data", None, "Column of ratings.")
    format: str | None = _choice("Data", None, "Format of the log (inferred from its name).")
    columns: str | None = _choice("Data", None, "The header that the log lacks: user,item,timestamp, or user,items.")
    delimiter: str | None = _choice("Data", None, "Between the fields of CSV (the one in its header).")
    quotes: bool = _choice("Data", True, "CSV fields may stand in quotes.")
    encoding: str = _choice("Data", "utf-8", "Of the log: utf-8, utf-16, latin-1.")
    order: Literal["time", "file"] = _choice("Data", "time", "By the column of times, or file: rows are in order.")
    skip_bad_rows: bool = _choice("Data", False, "Leave out and count rows that cannot be read.")
    table: str | None = _choice("Data", None, "Table of a database.")
    query: str | None = _choice("Data", None, "SQL that gives the log: of a database, or of Parquet as table log.")
    engine: Literal["numpy", "duckdb", "spark"] | None = _choice(
        "Data", None, "What adds up counts (by size; the same sums); spark reads the log too: --table db.events."
    )
    memory: str | None = _choice("Data", None, "Limit of the engine that reads, such as 4GB (half of the machine's).")
    where: str | None = _choice(
        "Data", None, "Keep the rows for which a condition on their own columns is true: \"event = 'purchase'\"."
    )
    since: str | None = _choice("Data", None, "Keep interactions from this date (or number) on.")
    until: str | None = _choice(
        "Data", None, "Keep interactions before this date (or number); with split time, test on those after it."
    )
    split: Literal["last", "time"] = _choice(
        "Data", "last", "Test on the last item of each user, or (time) on the first item after --until."
    )
    min_rating: float | None = _choice("Data", None, "Leave out lower ratings.")
    min_user_actions: Limit = _choice("Data", 0, "Leave out the interactions of users with fewer.")
    users: Annotated[int, Field(ge=2)] | None = _choice(
        "Data", None, "Declared number of users, N (counted in the log, before any filter)."
    )
    catalog: Path | None = _choice("Data", None, "Public file of all items, with titles or without.")
    attributes: bool | None = _choice(
        "Data", None, "Counts: use what the catalogue says about items besides titles and ids (if it says anything)."
    )
    drop_unknown_items: bool = _choice("Data", False, "Leave out items that the catalogue lacks.")
    assume_items_public: bool = _choice(
        "Data", False, "Take the list of items from the data, unprotected, instead of releasing it within ε and δ."
    )
    max_length: Count | None = _choice(
        "Data", None, "Items of a user to train on, the last ones (counts: all; networks 200)."
    )
    validation: bool = _choice("Data", False, "Hold out a validation item too.")
    cache: Path | None = _choice("Data", None, "Folder in which prepared data is kept. It is private.")

    recipe: str = _choice("Model", "default", f"A named set of defaults: {', '.join(RECIPES)}.")
    model: str = _choice(
        "Model",
        auto.AUTO,
        "auto: by public numbers alone (users, items, attributes, ε), and a network for text or if a choice of "
        f"networks is given; {'; '.join(kind.summary for kind in KINDS.values())}.",
    )
    base: Path | None = _choice("Model", None, "The checkpoint that `--model FOLDER` names.")
    lora: Limit = _choice("Model", 0, "Checkpoints: train low-rank adapters of this rank; 0: all weights.")
    dim: Count = _choice("Model", 64, "Width of embeddings and hidden states.")
    heads: Count = _choice("Model", 1, "Attention heads.")
    blocks: Count = _choice("Model", 2, "Transformer blocks.")
    dropout: Share = _choice("Model", 0.2, "Dropout.")
    norm: Literal["post", "pre"] = _choice("Model", "post", "LayerNorm after each sum, or before each layer.")
    shared: bool = _choice("Model", True, "One matrix is input embedding and softmax weight.")
    reattention: bool | None = _choice("Model", None, "Correct attention for noise (Transformer: on; with bands off).")
    reattention_variant: Literal["renormalised", "literal"] = _choice(
        "Model", "renormalised", "Renormalised rows, or the paper's formula."
    )
    reattention_error: Literal["gradient", "adam"] = _choice(
        "Model",
        "gradient",
        "Effective error: noise of a gradient by item frequency (the paper's), or what Adam makes of all steps' noise.",
    )
    reattention_scale: NotNegative = _choice("Model", 1.0, "Scale of the effective error; 1 is the paper's.")
    frequency_bias: bool = _choice("Model", True, "Start from the released popularity of items.")
    row_exponent: Share | None = _choice(
        "Model", None, "Scale item rows by released popularity to this power, so that noise moves rare ones less."
    )

    epsilon: Annotated[float, Field(gt=0)] = _choice("Privacy", 5.0, "ε of everything together; inf: not private.")
    delta: Annotated[float, Field(gt=0, lt=1)] | None = _choice(
        "Privacy", None, "δ (a tenth of 1 / number of users; recipe paper: 1 / number of users)."
    )
    clipping: Literal["normalize", "clip"] = _choice("Privacy", "normalize", "How each user's gradient is bounded.")
    clip_norm: Positive = _choice("Privacy", 1.0, "C, the bound on each user's gradient.")
    frequency_share: Share = _choice("Privacy", 0.01, "Share of the budget for item frequencies.")
    bands: Count = _choice(
        "Privacy", 1, "Steps over which noise is correlated, for less of it in sums of steps; 1: independent noise."
    )
    warm_start: Share = _choice(
        "Privacy", 0.0, "Share of the budget for transition counts from which a network's items start; 0: from nothing."
    )
    items_share: Annotated[float, Field(gt=0, lt=1)] = _choice(
        "Privacy", 0.1, "Networks without a catalogue: share of the budget for the list of items and their popularity."
    )
    private_metrics: bool = _choice(
        "Privacy", False, "Release accuracy on held-out items with noise at the end, within ε."
    )
    metrics_share: Share = _choice("Privacy", 0.01, "Share of the budget for private metrics.")
    seed: Limit | None = _choice("Privacy", None, "Repeatable run, for tests: NOT private.")

    batch_size: Count | None = _choice("Training", None, "Expected users in a batch (1024, at most a quarter).")
    epochs: Count | None = _choice("Training", None, "Expected passes over the users (100; synthetic 10).")
    learning_rate: Positive = _choice("Training", 5e-3, "Adam's, at its highest.")
    weight_decay: NotNegative = _choice("Training", 1e-5, "Adam's L2 penalty.")
    warmup: Share = _choice("Training", 0.2, "Share of the steps in which the rate grows; then it falls to 0.")
    evaluate_every: Limit = _choice("Training", 0, "Epochs between evaluations; 0: none. Not covered by ε.")
    micro_batch_tokens: Count = _choice("Training", 8_192, "Positions at once, at most; changes rounding only.")
    bf16: bool = _choice(
        "Training",
        False,
        "Forward passes in bfloat16; the rest in float32.",
    )
    threads: Count | None = _choice("Training", None, "CPU threads (all).")
    device: str | None = _choice("Training", None, "Where to compute: cpu, cuda (a GPU if there is one).")
    checkpoint_seconds: NotNegative = _choice("Training", 60.0, "Time between checkpoints.")

    deployment: Deployment | None = Field(None, json_schema_extra={"section": "Deployment"})  # a section of its own

    def reading(self) -> Reading:
        """How the log is to be read, as declared."""
        from dpformer.data.reading import Reading  # numpy

        return Reading(**{name: getattr(self, name) for name in OF_READING})

    def filters(self) -> Filters:
        """What is left out of the log."""
        from dpformer.data.filters import Filters  # numpy

        values = {name: getattr(self, name) for name in FILTERS}
        return Filters(**{**values, "until": None} if self.split == "time" else values)

    @property
    def split_at(self) -> str | None:
        """The cut of a split by time."""
        return self.until if self.split == "time" else None

    def log_columns(self) -> Columns:
        """Names of the log's columns."""
        from dpformer.data.columns import Columns  # numpy

        return Columns(self.user_column, self.item_column, self.timestamp_column, self.rating_column)

    @property
    def private(self) -> bool:
        """Whether noise is added at all; with a seed it is, and still nothing is promised."""
        return math.isfinite(self.epsilon)

    @property
    def noise(self) -> Noise:
        """How the noise of steps is correlated."""
        from dpformer.noise.mechanisms import noise_of  # torch

        return noise_of({name: getattr(self, name) for name in type(self).model_fields})

    @property
    def default_length(self) -> int | None:
        """Items of a history to train on, unless `max_length` says; None: whole histories."""
        return self.kind.default_length(self)

    @property
    def kind(self) -> ModelKind:
        """The kind of model; `auto` counts as one of its candidates until it is decided."""
        return auto.UNDECIDED if self.model == auto.AUTO else KINDS[self.model]

    def on_file(self, file: Path | None, *, unfiltered: bool = False, **given: Any) -> Config:
        """The same choices for another log on this machine, apart from those that are given here.

        What describes the format of a file (delimiter, table, …) applies only to a log of the same format.

        Args:
            file: the other log.
            unfiltered: without the filters of this config.
            given: other options of `READING`.
        """
        if unknown := [name for name in given if name not in READING]:
            near = nearest(unknown[0], READING)
            raise DpformerError(f"unknown option {unknown[0]!r} for reading a log; the nearest is {near!r}")
        dropped = [*(OF_FORMAT if self._of_other_format(file) else ()), *(FILTERS if unfiltered else ())]
        reset = {name: Config.model_fields[name].default for name in dropped}
        engine = None if self.engine == "spark" else self.engine
        return self.replace(**{**reset, "engine": engine, **given, "file": file})

    def _of_other_format(self, file: Path | None) -> bool:
        from dpformer.data.readers.formats import same_format  # DuckDB

        if self.task != "recommend" or file is None:
            return False
        return self.engine == "spark" or not same_format(file, self.file, self.format)

    @property
    def synthetic(self) -> bool:
        """Whether there is no log: the synthetic default, made up and public. Spark has logs without a file."""
        return self.file is None and self.engine != "spark"

    @property
    def items_policy(self) -> str:
        """How the list of items comes about: a public `catalog`, `dp` (released from the data), or `assumed-public`."""
        if self.catalog is not None or self.synthetic or self.task == "lm":
            return "catalog"
        return "assumed-public" if self.assume_items_public or not self.private else "dp"

    @property
    def items_given(self) -> bool:
        """Whether the guarantee is given the list of items, which was taken from the data unprotected."""
        return self.private and self.items_policy == "assumed-public"

    @property
    def needs_frequencies(self) -> bool:
        """Whether the model needs item frequencies, which transition counts bring along."""
        return self.kind.needs_frequencies(self)

    @model_validator(mode="before")
    @classmethod
    def _choose_model(cls, given: dict[str, Any]) -> dict[str, Any]:
        """`auto` is decided by other choices, or when the public facts are known; a path names a checkpoint."""
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
        """What no single key can show. Messages are shown to users as they are."""
        self.kind.refuse(self)
        self._check_task()
        self._check_engine()
        self._check_urls()
        if self.format is not None:
            self.reading()  # the table of formats knows which there are
        if self.where or self.since or self.until:
            self.filters()
        if self.split == "time":
            self._check_split()
        if self.dim % self.heads:
            raise ValueError(f"heads is {self.heads}; it must divide dim, which is {self.dim}")
        if self.catalog is not None and self.assume_items_public and self.recipe == "default":
            raise ValueError("catalog and assume_items_public are both given; a catalogue is public: choose one")
        if self.private_metrics and not (self.private and self.metrics_share):
            raise ValueError("private_metrics needs a budget: give a finite epsilon and metrics_share above 0")
        if self.warm_start and not self.private:
            raise ValueError("warm_start needs a budget: give a finite epsilon, or leave it out")
        if self.noise.correlated and not self.private:
            raise ValueError(f"{self.noise.choice}; it is for networks trained with noise: leave it out")
        if self.private:
            self._check_shares()
        return self

    def _check_shares(self) -> None:
        """Every query gets something, and something is left for the model."""
        from dpformer.queries.registry import asked_queries  # torch

        queries = [query for query in asked_queries(self) if query is not self.kind.release]
        for query in queries:
            if not query.share(self):
                raise ValueError(self._without_share(query.share_option or query.label))
        if sum(query.share(self) for query in queries) >= 1:
            names = " and ".join(query.share_option or query.label for query in queries)
            raise ValueError(f"{names} leave nothing for training: lower them")

    def _without_share(self, option: str) -> str:
        if option != "frequency_share":
            return f"{option} is 0, and what it pays for is asked: give more"
        asker, fix = (
            ("Re-Attention", "--no-re-attention")
            if error_by_frequency(self)
            else ("frequency_bias" if self.frequency_bias else "row_exponent", "switch it off")
        )
        return f"{asker} needs item frequencies: give frequency_share above 0, or {fix}"

    def _check_split(self) -> None:
        if not self.until:
            raise ValueError("split is time: give the moment before which is training with --until, such as 2024-06-01")
        if self.validation:
            raise ValueError("split is time, which holds no validation items: leave validation out")
        if self.order == "file":
            raise ValueError("split is time, and order is file: give a column of times")
        from dpformer.data.time_window import Bound

        Bound.parse(self.until, "until")

    def _check_engine(self) -> None:
        if self.engine != "spark":
            return
        if self.task != "recommend" or self.kind.trains:
            raise ValueError(f"engine is spark, which adds up counts, and model is {self.model}: leave engine out")
        if self.private_metrics or self.cache is not None:
            name = "private_metrics" if self.private_metrics else "cache"
            raise ValueError(f"{name} needs histories on this machine, and engine spark leaves them where they are")
        if self.split == "time":
            raise ValueError("split is time, which is not for engine spark: filter by time in --query")
        if self.file is None and self.table is None and self.query is None:
            raise ValueError("engine is spark: give --table db.events, --query, or Parquet files")

    def _check_urls(self) -> None:
        """A URL with a secret is refused before it is written anywhere."""
        if self.file is None:
            return
        from dpformer.data.sources.urls import url_of

        url = url_of(self.file)
        if url is not None and self.engine == "spark":
            raise ValueError(f"engine is spark, and file is {url}: name a table that Spark knows with --table")

    def _check_task(self) -> None:
        if self.task == "recommend":
            given = [name for name in ("unit", "characters", "tokenizer") if getattr(self, name) is not None]
            if given:
                raise ValueError(f"{given[0]} is for text: give --task lm, or leave it out")
            return
        if self.file is None:
            raise ValueError("--task lm needs a file of text")
        if self.unit is None:
            raise ValueError("say what is protected: give --unit chunk, line, document or author")
        if self.characters is not None and self.tokenizer is not None:
            raise ValueError("characters and tokenizer are both given: choose one")
        if not self.kind.text:
            raise ValueError(f"{self.model} are for items of users; text needs --model {trained_names()}")
        for name in _OF_LOGS:
            if getattr(self, name) != Config.model_fields[name].default:
                raise ValueError(f"{name} is for logs of items, not for text: leave it out")

    # From files and flags.

    @classmethod
    def make(cls, path: Path | None = None, **flags: Any) -> Config:
        """The config of a TOML file (if any) with flags on top, and beneath both the recipe they name."""
        given = _read(path) if path is not None else {}
        given.update({name: value for name, value in flags.items() if value is not None})
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
        """The same config with some choices changed, and checked again."""
        return self._checked({**dict(self), **changes})

    @classmethod
    def _checked(cls, values: dict[str, Any]) -> Config:
        try:
            return cls(**values)
        except ValidationError as error:
            raise DpformerError(_sentence(error)) from None

    def resolve(self, *, users: int, threads: int) -> Config:
        """The config with nothing left open, given the public number of users. Paths become absolute."""
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
            delta=self.delta or 1 / (users if self.recipe.startswith("paper") else 10 * users),
            threads=self.threads or threads,
            device=str(device_of(self.device)),
            **self.kind.resolved(self, users),
        )

    # To the run folder.

    def to_toml(self) -> str:
        """Every choice with its section as a comment; left out are those that are None or say nothing of this model."""
        lines: list[str] = []
        for section in get_args(Section):
            chosen = {name: getattr(self, name) for name in fields_of(section) if name not in self.kind.silent}
            lines += ["", f"# {section}"] + [f"{n} = {_toml(v)}" for n, v in chosen.items() if v is not None]
        if self.deployment is not None:
            lines += ["", "[deployment]"] + [f"{n} = {_toml(v)}" for n, v in self.deployment.filled().items()]
        return "\n".join(lines[1:]) + "\n"

    def hash(self) -> str:
        """SHA-256 of the choices that define the result and are not at their default. `UNHASHED` is excluded."""
        defaults = {name: field.default for name, field in Config.model_fields.items()}
        defaults["model"] = auto.UNDECIDED.name  # the default before `auto`, which is never what is hashed
        left_out = {*UNHASHED, *(self.kind.silent if self.base is not None else ())}  # config.toml has not these either
        values = {name: value for name, value in self if name not in left_out and value != defaults[name]}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def fields_of(section: Section) -> list[str]:
    """The names of a section's choices, in order."""
    return [name for name, field in Config.model_fields.items() if section_of(name) == section and field]


def section_of(name: str) -> str:
    extra = Config.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["section"])


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DpformerError(f"{path} is not TOML: {error}") from None


def _refuse_unknown(given: dict[str, Any], path: Path | None) -> None:
    for name in given:
        if name not in Config.model_fields:
            place = f" in {path}" if path is not None else ""
            near = nearest(name, Config.model_fields)
            raise DpformerError(f"unknown key {name!r}{place}; the nearest valid key is {near!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that was probably meant: the first that begins so, or else the most similar one."""
    names = list(known)
    beginning = [other for other in names if other.startswith(name)]
    return [*beginning, *difflib.get_close_matches(name, names, n=1, cutoff=0)][0]


def _refuse_ignored(given: dict[str, Any]) -> None:
    """An option that would do nothing is a mistake."""
    name = given.get("model", auto.AUTO)
    named = None if name == auto.AUTO or str(name) in KINDS else named_by(Path(str(name)))
    kind = KINDS.get(str(name) if named is None else named["model"])
    ignored = [] if kind is None else [option for option in kind.silent if option in given]
    if kind is not None and ignored:
        raise DpformerError(kind.ignores(ignored[0], str(name)))


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    if first["loc"][0] == "deployment":
        return sentence(error)
    wanted = first["msg"].removeprefix("Input should be ").removeprefix("Input ")
    return f"{first['loc'][0]} is {first['input']!r}; it must be {wanted}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # a TOML string is a JSON string
