"""From a config to what training starts with: the data, the item frequencies, the model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.data import Columns, Dataset, Filters, PrivateVocabulary, Vocabulary, prepare, read_catalog, synthetic
from dpformer.data.text import TextDataset, read_text
from dpformer.data.tokens import Tokens
from dpformer.models import GRU, LSTM, SequenceModel, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.privacy import Ledger, SecureRandom
from dpformer.reattention.error import adam_error
from dpformer.releases import release_frequencies
from dpformer.releases.counts import release_transitions
from dpformer.runs.config import Config
from dpformer.training.device import device_of
from dpformer.training.plan import COUNTS, VOCABULARY_DELTA, Plan, other_events
from dpformer.training.schedule import warmup_then_decay

SYNTHETIC_USERS, SYNTHETIC_ITEMS = 6000, 400  # of the synthetic default: made up, so public


def load_dataset(config: Config, random: SecureRandom | None = None, vocabulary: Vocabulary | None = None) -> Dataset:
    """The prepared data of a config.

    Args:
        config: which file, and how to read it.
        random: of the run; needed to release a private vocabulary, the same one again on resume.
        vocabulary: of a model that is there already; items outside it are left out.
    """
    if config.task == "lm":
        return _load_text(config)
    max_length = config.max_length or config.default_length
    if config.file is None:
        return synthetic(0, SYNTHETIC_USERS, SYNTHETIC_ITEMS, max_length=max_length, validation=config.validation)
    private = _private_vocabulary(config) if vocabulary is None else None
    catalog = read_catalog(config.catalog) if config.catalog is not None else None
    return prepare(
        config.file,
        columns=Columns(config.user_column, config.item_column, config.timestamp_column, config.rating_column),
        vocabulary=vocabulary or private or catalog,
        drop_unknown_items=config.drop_unknown_items or vocabulary is not None,
        filters=Filters(config.min_rating, config.min_user_actions, config.min_item_actions),
        max_length=max_length,
        validation=config.validation,
        cache=None if private is not None else config.cache,  # a release belongs to one run and its key
        normal=_normal(random) if private is not None and random is not None else None,
    )


def _load_text(config: Config) -> TextDataset:
    max_length = config.max_length or config.default_length
    assert config.file is not None and config.unit is not None and max_length is not None
    tokens = tokens_of(config)
    return read_text(config.file, unit=config.unit, tokens=tokens, max_length=max_length, id_column=config.user_column)


def tokens_of(config: Config) -> Tokens:
    """The public vocabulary of text."""
    if config.tokenizer is not None:
        return Tokens.of_file(config.tokenizer)
    return Tokens.of_characters(config.characters or "ascii")


def _normal(random: SecureRandom) -> Callable[[int], np.ndarray]:
    """Standard normal numbers, other ones at each call, and the same ones again in the same run."""
    calls, numbers = count(), random.within("vocabulary")
    return lambda size: numbers.normal(size, step=next(calls))


def _private_vocabulary(config: Config) -> PrivateVocabulary | None:
    if not config.private_vocabulary or not config.private:
        return None
    assert config.delta is not None
    noise = next(event.noise_multiplier for event in other_events(config) if event.label == "vocabulary")
    return PrivateVocabulary(noise_multiplier=noise, delta=VOCABULARY_DELTA * config.delta)


def item_frequencies(config: Config, plan: Plan, dataset: Dataset) -> Tensor | None:
    """The share of users who have each item, (items,) float64: released with noise, or exact without privacy."""
    if not config.needs_frequencies:
        return None
    items, offsets = dataset.packed_train()
    noise = plan.noise_of("frequencies")
    if noise is not None:
        release = release_frequencies(items, dataset.num_items, noise, offsets=offsets, seed=config.seed)
        return torch.from_numpy(release.p)
    users = np.repeat(np.arange(dataset.num_users), np.diff(offsets))
    pairs = np.unique(users * dataset.num_items + items)  # an item counts once a user
    counts = np.bincount(pairs % dataset.num_items, minlength=dataset.num_items)
    return torch.from_numpy(counts / dataset.num_users)


def release_counts(config: Config, plan: Plan, dataset: Dataset) -> tuple[TransitionCounts, Tensor, Ledger]:
    """Transition counts, all of them one release, with its frequencies, and the ledger of all but training."""
    items, offsets = dataset.packed_train()
    noise = plan.noise_of(COUNTS)
    assert noise is not None
    release = release_transitions(items, offsets, dataset.num_items, noise, seed=config.seed)
    ledger = Ledger([release.event if event.label == COUNTS else event for event in plan.others])
    return TransitionCounts.from_release(release), torch.from_numpy(release.frequencies.p), ledger


def build_model(
    config: Config, plan: Plan, num_items: int, frequencies: Tensor | None, random: SecureRandom
) -> SequenceModel:
    """The model with its initial weights, which do not depend on the data but for the released frequencies."""
    assert config.max_length is not None
    torch.manual_seed(torch_seed(random.within("weights")))
    common: dict[str, Any] = {"dim": config.dim, "shared": config.shared, "dropout": config.dropout}
    model: SequenceModel
    if config.model == "transformer":
        model = Transformer(
            num_items,
            config.max_length,
            heads=config.heads,
            blocks=config.blocks,
            norm=config.norm,
            reattention=config.reattention_variant if config.reattention else False,
            **common,
        )
    else:
        model = {"gru": GRU, "lstm": LSTM}[config.model](num_items, config.max_length, **common)
    model.half_life = config.half_life
    if frequencies is not None and config.frequency_bias:
        model.set_frequencies(frequencies)
    if isinstance(model, Transformer) and config.reattention:
        _set_error(model, config, plan, frequencies)
    return model.to(device_of(config.device))  # made on the CPU: the same weights for any device


def _set_error(model: Transformer, config: Config, plan: Plan, frequencies: Tensor | None) -> None:
    """How noisy the parameters are; without the frequencies it needs it stays unset, until a state is loaded."""
    if config.reattention_error == "adam":
        steps = range(plan.steps if plan.noise_multiplier else 0)  # without noise there is no error
        rates = [config.learning_rate * warmup_then_decay(step, plan.steps, config.warmup) for step in steps]
        model.set_error(adam_error(rates, model.num_items, scale=config.reattention_scale))
    elif frequencies is not None:
        model.set_privacy(plan.noise_multiplier, plan.expected_batch_size, frequencies, config.reattention_scale)


def torch_seed(random: SecureRandom, step: int = 0, stream: int = 0) -> int:
    """A seed for torch's generator, a function of the run's secret and of where it is used."""
    return int(random.words(1, step=step, stream=stream)[0] >> np.uint64(1))
