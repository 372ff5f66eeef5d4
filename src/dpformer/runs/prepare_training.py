"""From a config to what training starts with: item frequencies or counts, the network, the trainer around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpformer.accounting.events import Event, Gaussian
from dpformer.data import Dataset, Vocabulary
from dpformer.errors import DpformerError
from dpformer.models import GRU, LSTM, SequenceModel, Transformer
from dpformer.models.pretrained import Pretrained
from dpformer.models.sequence import popularity_scale
from dpformer.noise import SecureRandom
from dpformer.queries.counts import LABEL as COUNTS
from dpformer.queries.counts import TransitionRelease, exact_transition_sums, release_transition_sums
from dpformer.queries.frequencies import LABEL as FREQUENCIES
from dpformer.queries.frequencies import FrequencyRelease, estimate, of_items, release_frequencies
from dpformer.queries.items import LABEL as ITEMS
from dpformer.queries.items import release_items
from dpformer.queries.transition_sums import transition_sums
from dpformer.reattention.error import EffectiveError, adam_error, effective_error
from dpformer.runs.config import Config
from dpformer.runs.tasks import task_of
from dpformer.statement.public_facts import list_price, popularity_noise
from dpformer.training.device import device_of
from dpformer.training.gradient_sum import GradientSum, tokens_for
from dpformer.training.plan import Plan
from dpformer.training.schedule import warmup_then_decay
from dpformer.training.trainer import Trainer, dropout_key, torch_seed


def load_dataset(config: Config, vocabulary: Vocabulary | None = None) -> Dataset:
    """The prepared data of a config, with all its items. Nothing is released by reading it.

    Args:
        config: which file, and how to read it.
        vocabulary: of a model that is there already; items outside it are left out.
    """
    return task_of(config).read(config, vocabulary)


@dataclass(frozen=True)
class Released:
    """What was released of the data before training, and what that costs. All of it is covered by the guarantee."""

    item_list: np.ndarray | None = None  # (M,) int64: released items, by their number in the data; None: all
    frequency_release: FrequencyRelease | None = None
    transitions: TransitionRelease | None = None
    exact_frequencies: Tensor | None = None  # (M,) float64, without privacy

    @property
    def frequencies(self) -> Tensor | None:
        """The share of users who have each item, (M,) float64."""
        return self.exact_frequencies if self.frequency_release is None else torch.from_numpy(self.frequency_release.p)

    @property
    def events(self) -> list[Event]:
        found = self.transitions or self.frequency_release
        return [] if found is None or found.event is None else [found.event]

    def vocabulary(self, dataset: Dataset) -> Vocabulary:
        """The items of the model."""
        if self.item_list is None:
            return dataset.vocabulary
        return Vocabulary([dataset.vocabulary.ids[number] for number in self.item_list.tolist()], None, "dp")

    def state(self) -> dict[str, Any]:
        """For the checkpoint; of transition counts only what the model file needs at the end."""
        tensors = {
            "listed": self.item_list,
            "counts": None if self.frequency_release is None else self.frequency_release.counts,
        }
        return {
            "exact": self.exact_frequencies,
            **{n: None if v is None else torch.from_numpy(v) for n, v in tensors.items()},
        }


def release_before_training(config: Config, plan: Plan, dataset: Dataset, random: SecureRandom) -> Released:
    """The list of items, their popularity, transition counts: what the config asks for, each once.

    The noise is a function of the run's key, the config and the data: a run that died afterwards releases the same
    numbers again.
    """
    random = random.within(f"releases config {config.hash()} data {dataset.hash}")
    planned = {event.label: event for event in plan.releases}
    if COUNTS in planned:
        event = planned[COUNTS]
        with transition_sums(dataset, config.engine, config.memory) as sums:
            release = release_transition_sums(
                sums,
                dataset.num_items,
                event.noise_multiplier,
                delta=event.failure,
                described=config.model == "counts" and bool(config.attributes),
                random=random.within(COUNTS),
            )
        return _enough(Released(release.item_list, release.frequencies, release), config, plan)
    if config.model == "counts":  # without privacy
        with transition_sums(dataset, config.engine, config.memory) as sums:
            exact = exact_transition_sums(sums, dataset.num_items)
        return Released(None, None, exact, torch.from_numpy(exact.frequencies.p))
    items, offsets = dataset.packed_train() if planned else (np.zeros(0, np.int64), np.zeros(1, np.int64))
    if ITEMS in planned:
        event = planned[ITEMS]
        found = release_items(items, offsets, event.noise_multiplier, delta=event.failure, random=random.within(ITEMS))
        return _enough(Released(found.items, of_items(found, plan.users)), config, plan)
    if FREQUENCIES in planned:
        noise = planned[FREQUENCIES].noise_multiplier
        numbers = random.within(FREQUENCIES)
        return Released(None, release_frequencies(items, dataset.num_items, noise, offsets=offsets, random=numbers))
    return Released(exact_frequencies=_exact_frequencies(dataset) if config.needs_frequencies else None)


def released_before(config: Config, plan: Plan, state: dict[str, Any]) -> Released:
    """What was released before a checkpoint was saved: nothing is drawn again."""
    if state["counts"] is None:
        return Released(exact_frequencies=state["exact"])
    counts, event = state["counts"].numpy(), next(e for e in plan.releases if e.label in (COUNTS, ITEMS, FREQUENCIES))
    assert isinstance(event, Gaussian)
    p, detected = estimate(counts, popularity_noise(config, plan), plan.users)
    listed = None if state["listed"] is None else state["listed"].numpy()
    return Released(listed, FrequencyRelease(p, counts, detected, event, plan.users))


def _enough(released: Released, config: Config, plan: Plan) -> Released:
    price = list_price(config, plan)
    if price is not None and released.item_list is not None and len(released.item_list) < 2:
        raise DpformerError(
            f"{len(released.item_list)} of the items are common enough to be released (threshold "
            f"{price['threshold']:.1f} at noise of standard deviation {price['noise_multiplier']:.3g}): give a public "
            "--catalog, more data, or a larger --epsilon"
        )
    return released


def _exact_frequencies(dataset: Dataset) -> Tensor:
    """Without privacy."""
    items, offsets = dataset.packed_train()
    users = np.repeat(np.arange(dataset.num_users), np.diff(offsets))
    pairs = np.unique(users * dataset.num_items + items)  # an item counts once a user
    counts = np.bincount(pairs % dataset.num_items, minlength=dataset.num_items)
    return torch.from_numpy(counts / dataset.num_users)


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
    if config.row_exponent:
        _scale_rows(model, config.row_exponent, frequencies)
    if frequencies is not None and config.frequency_bias:
        model.set_frequencies(frequencies)
    if isinstance(model, Transformer) and config.reattention:
        _set_error(model, config, plan, frequencies)
    return model.to(device_of(config.device))  # made on the CPU: the same weights for any device


def _scale_rows(model: SequenceModel, exponent: float, frequencies: Tensor | None) -> None:
    """Without frequencies the scale is not a number, until a state is loaded."""
    if frequencies is None:
        model.row_scale = torch.full_like(model.bias, math.nan)
    else:
        model.scale_rows(popularity_scale(frequencies, exponent))


def _set_error(model: Transformer, config: Config, plan: Plan, frequencies: Tensor | None) -> None:
    """How noisy the parameters are; without the frequencies it needs it stays unset, until a state is loaded."""
    if config.reattention_error == "adam":
        steps = range(plan.steps if plan.noise_multiplier else 0)  # without noise there is no error
        rates = [learning_rate(config, plan, step) for step in steps]
        error = adam_error(rates, model.num_items, scale=config.reattention_scale)
    elif frequencies is not None:
        noise, batch_size = plan.noise_multiplier * plan.noise.step_deviation(plan.steps), plan.expected_batch_size
        error = effective_error(noise, batch_size, frequencies, scale=config.reattention_scale)
    else:
        return
    if model.row_scale is not None:  # a row is s times what the noise is added to
        error = EffectiveError(error.items * model.row_scale, error.weights)
    model.set_error(error)


def make_trainer(config: Config, plan: Plan, dataset: Dataset, model: SequenceModel, random: SecureRandom) -> Trainer:
    """The parts of the plan around a network."""
    tokens = tokens_for(model, config.micro_batch_tokens, dataset.num_items)
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.Adam(parameters, lr=config.learning_rate, weight_decay=config.weight_decay, foreach=True)
    context = f"config {config.hash()} data {dataset.hash}"
    trainer = Trainer(
        users=dataset,
        batches=plan.sampler(seed=config.seed),
        sum=GradientSum(model, plan.clip, tokens, config.bf16),
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
