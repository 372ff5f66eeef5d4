"""Text: tokens of a chunk, line, document or author; other units, or the end of the text, are held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpformer.accounting.units import UNITS, UnitOfPrivacy
from dpformer.data import Dataset, Vocabulary
from dpformer.data.text import TextDataset, decoder, read_text
from dpformer.data.tokens import Tokens
from dpformer.errors import DpformerError
from dpformer.statement.data import text_statement
from dpformer.statement.public_facts import public_description

if TYPE_CHECKING:
    from dpformer.evaluation.language import LanguageLoss
    from dpformer.runs.config import Config
    from dpformer.runs.evaluation_cache import EvaluationCache
    from dpformer.runs.model_file import Release
    from dpformer.training.plan import Plan

NOT_COVERED = (
    "Measured on held-out text: not covered by the privacy guarantee; keep these numbers as private as the data."
)


@dataclass(frozen=True)
class TextAccuracy:
    """The loss on held-out text."""

    loss: LanguageLoss
    kind = "language"

    def to_dict(
        self, ks: Sequence[int] = (10,), *, samples: int = 1000, names: Sequence[str] | None = None
    ) -> dict[str, Any]:
        return {"covered": False, "note": NOT_COVERED, "metrics": self.loss.to_dict()}


class Text:
    """See `Task`."""

    thing, things = "token", "tokens"
    metadata_keys = frozenset({"text"})

    def read(self, config: Config, vocabulary: Vocabulary | None = None) -> TextDataset:
        return self._read(config, tokens_of(config))

    def _read(self, config: Config, tokens: Tokens) -> TextDataset:
        max_length = config.max_length or config.default_length
        assert config.file is not None and config.unit is not None and max_length is not None
        return read_text(
            config.file,
            unit=config.unit,
            tokens=tokens,
            max_length=max_length,
            id_column=config.user_column,
            units=config.users,
            text_column=config.text_column or "text",
            time_column=config.timestamp_column,
            reading=config.reading(),
        )

    def read_again(self, config: Config, release: Release) -> TextDataset:
        return self._read(config, decoder(release)[0])

    def count_items(self, config: Config) -> int | None:
        return len(tokens_of(config).vocabulary)

    def unit(self, config: Config) -> UnitOfPrivacy:
        assert config.unit is not None
        return UNITS[config.unit]

    def sentences(self, config: Config, plan: Plan, items: int, tokens: str = "") -> list[str]:
        return text_statement(public_description(config, plan, items, tokens))

    def metadata(self, config: Config, dataset: Dataset) -> dict[str, Any]:
        assert isinstance(dataset, TextDataset) and dataset.tokens is not None
        return {"text": {"unit": config.unit, "tokenizer": dataset.tokens.to_json()}}

    def evaluate(self, model: Any, dataset: Dataset, vocabulary: Vocabulary, config: Config) -> dict[str, Any]:
        return {"split": "held-out text", "text": _loss(model, dataset).to_dict()}

    def line(self, record: dict[str, Any]) -> str:
        found = record["text"]
        return (
            f"epoch {record['epoch']:g}: {found['loss']:.4f} nats per token, {found['bits_per_character']:.4f} bits "
            f"per character, perplexity {found['perplexity']:.2f} on held-out text (not covered by ε)"
        )

    def measure(
        self,
        config: Config,
        release: Release,
        other: Config | None = None,
        split: str = "test",
        *,
        filter_seen: bool = True,
        kept: EvaluationCache | None = None,  # unused: measuring a loss takes seconds
    ) -> TextAccuracy:
        if split != "test":
            raise DpformerError(f"split is {split!r}, but text has no validation items: omit it")
        if not filter_seen:
            raise DpformerError("--allow-seen applies to recommendations, but this is a language model: omit it")
        dataset = self.read_again(other or config, release)
        return TextAccuracy(_loss(release.model, dataset))


def tokens_of(config: Config) -> Tokens:
    """The public vocabulary of text."""
    if config.base is not None:
        if not (config.base / "config.json").is_file():
            raise DpformerError(f"{config.base} holds no config.json: give a folder with a Hugging Face checkpoint")
        return Tokens.of_file(config.base / "tokenizer.json")
    if config.tokenizer is not None:
        return Tokens.of_file(config.tokenizer)
    return Tokens.of_characters(config.characters or "ascii")


def _loss(model: Any, dataset: Dataset) -> LanguageLoss:
    from dpformer.evaluation.language import language_loss

    assert isinstance(dataset, TextDataset)
    return language_loss(model, dataset.held_out_text, dataset.held_out_characters)
