"""From a config to what training starts with: item frequencies or counts, the network, the trainer around it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.data import Dataset, Vocabulary
from dpformer.data.duckdb_sums import transition_sums
from dpformer.models import GRU, LSTM, SequenceModel, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.models.pretrained import Pretrained
from dpformer.privacy import SecureRandom
from dpformer.privacy.events import Event
from dpformer.reattention.error import adam_error
from dpformer.releases.counts import exact_transition_sums, release_transition_sums
from dpformer.releases.frequencies import release_frequencies
from dpformer.runs.config import Config
from dpformer.runs.planning import COUNTS
from dpformer.runs.tasks import task_of
from dpformer.training.device import device_of
from dpformer.training.gradient_sum import GradientSum, tokens_for
from dpformer.training.plan import Plan
from dpformer.training.schedule import warmup_then_decay
from dpformer.training.trainer import Trainer, dropout_key, torch_seed


def load_dataset(config: Config, random: SecureRandom | None = None, vocabulary: Vocabulary | None = None) -> Dataset:
    """The prepared data of a config.

    Args:
        config: which file, and how to read it.
        random: of the run; needed to release a private vocabulary, the same one again on resume.
        vocabulary: of a model that is there already; items outside it are left out.
    """
    return task_of(config).read(config, random, vocabulary)


def item_frequencies(config: Config, plan: Plan, dataset: Dataset) -> tuple[Tensor | None, list[Event]]:
    """The share of users who have each item, (items,) float64: released with noise, or exact without privacy."""
    if not config.needs_frequencies:
        return None, []
    items, offsets = dataset.packed_train()
    noise = plan.noise_of("frequencies")
    if noise is not None:
        release = release_frequencies(items, dataset.num_items, noise, offsets=offsets, seed=config.seed)
        return torch.from_numpy(release.p), [] if release.event is None else [release.event]
    users = np.repeat(np.arange(dataset.num_users), np.diff(offsets))
    pairs = np.unique(users * dataset.num_items + items)  # an item counts once a user
    counts = np.bincount(pairs % dataset.num_items, minlength=dataset.num_items)
    return torch.from_numpy(counts / dataset.num_users), []


def release_counts(config: Config, plan: Plan, dataset: Dataset) -> tuple[TransitionCounts, Tensor, list[Event]]:
    """Transition counts, all of them one release, with its frequencies; exact and without an event if not private."""
    noise = plan.noise_of(COUNTS)
    with transition_sums(dataset, config.engine, config.memory) as sums:
        if noise is None:
            release = exact_transition_sums(sums, dataset.num_items)
        else:
            release = release_transition_sums(sums, dataset.num_items, noise, seed=config.seed)
    model = TransitionCounts.from_release(release, dataset.vocabulary.attributes)
    return model, torch.from_numpy(release.frequencies.p), [] if release.event is None else [release.event]


def build_model(
    config: Config, plan: Plan, num_items: int, frequencies: Tensor | None, random: SecureRandom
) -> SequenceModel:
    """The model with its initial weights, which do not depend on the data but for the released frequencies."""
    assert config.max_length is not None
    torch.manual_seed(torch_seed(random.within("weights")))
    if config.base is not None:
        return Pretrained.read(config.base, num_items, config.max_length, config.lora).to(device_of(config.device))
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
    if frequencies is not None and config.frequency_bias:
        model.set_frequencies(frequencies)
    if isinstance(model, Transformer) and config.reattention:
        _set_error(model, config, plan, frequencies)
    return model.to(device_of(config.device))  # made on the CPU: the same weights for any device


def _set_error(model: Transformer, config: Config, plan: Plan, frequencies: Tensor | None) -> None:
    """How noisy the parameters are; without the frequencies it needs it stays unset, until a state is loaded."""
    if config.reattention_error == "adam":
        steps = range(plan.steps if plan.noise_multiplier else 0)  # without noise there is no error
        rates = [learning_rate(config, plan, step) for step in steps]
        model.set_error(adam_error(rates, model.num_items, scale=config.reattention_scale))
    elif frequencies is not None:
        model.set_privacy(plan.noise_multiplier, plan.expected_batch_size, frequencies, config.reattention_scale)


def make_trainer(config: Config, plan: Plan, dataset: Dataset, model: SequenceModel, random: SecureRandom) -> Trainer:
    """The parts of the plan around a network."""
    tokens = tokens_for(model, config.micro_batch_tokens, dataset.num_items)
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.Adam(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, foreach=True)
    context = f"config {config.hash()} data {dataset.hash}"
    trainer = Trainer(
        users=dataset,
        batches=plan.sampler(seed=config.seed),
        sum=GradientSum(model, plan.clip, tokens),
        optimizer=plan.optimizer(adam, context=context, seed=config.seed),
        schedule=partial(learning_rate, config, plan),
        dropout=dropout_key(random),
    )
    if plan.clip is not None:
        trainer.sum.prove(dataset.num_items)
    return trainer


def learning_rate(config: Config, plan: Plan, step: int) -> float:
    """At step 0, 1, …, T − 1."""
    return config.learning_rate * warmup_then_decay(step, plan.steps, config.warmup)


def build_assistant(config: Config, plan: Plan, num_items: int) -> SequenceModel:
    """The network of another process, whose weights come from the leader."""
    return build_model(config, plan, num_items, None, SecureRandom("assistant"))
