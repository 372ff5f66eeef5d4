"""The dry run: the plan of a config and what it will take, from public numbers only.

Time and memory are measured, not guessed: one micro-batch of random histories of full length goes through the very
code that trains. No private data is touched.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from dpformer.accounting.units import USER
from dpformer.data import Dataset
from dpformer.engines.sums import COUNTERS, WINDOW, ArraySums, gathered
from dpformer.errors import DpformerError
from dpformer.format_number import round_up
from dpformer.noise import SecureRandom
from dpformer.noise.mechanisms import noise_of
from dpformer.progress import peak_memory
from dpformer.queries.counts import LABEL as COUNTS
from dpformer.queries.counts import ROUNDS, release_transition_sums
from dpformer.runs.choice import choose_without_data
from dpformer.runs.config import Config
from dpformer.runs.ledger_file import delta_notes
from dpformer.runs.planning import make_plan
from dpformer.runs.prepare_training import build_model, make_trainer
from dpformer.runs.tasks import task_of
from dpformer.runs.tasks.recommend import SYNTHETIC_USERS
from dpformer.training.plan import Plan

COUNTED, COUNTED_USERS = 50, 4000  # items a user, and users, of an estimate of counts


def dry_run(config: Config, users: int | None = None, items: int | None = None) -> dict[str, Any]:
    """The plan as a dict, with an estimate if the number of items is known.

    Args:
        config: the choices.
        users: the number of users, public; by default the declared one, and that of the synthetic default is known.
        items: the number of items, public; a catalogue tells it.
    """
    users = users or config.users
    if config.synthetic:
        users = users or SYNTHETIC_USERS
    if users is None:
        raise DpformerError("a dry run does not read the data, so it cannot count users: give --users N")
    items = items or task_of(config).count_items(config)
    if config.model == "auto":
        config = choose_without_data(config, users, items)
    config = config.resolve(users=users, threads=torch.get_num_threads())
    plan = make_plan(config, users)
    epsilon = plan.epsilon if plan.noise_multiplier else None
    notes = delta_notes(plan.delta if epsilon is not None else None, users)
    facts = {"model": config.model, **plan.to_dict(), "sample_rate": plan.sample_rate, "epsilon": epsilon}
    facts["notes"] = notes
    if items is None:
        return {**facts, "estimate": None}
    return {**facts, "estimate": estimate(config, plan, items) if plan.steps else estimate_counts(config, plan, items)}


def estimate_counts(config: Config, plan: Plan, items: int) -> dict[str, Any]:
    """Seconds and peak bytes of transition counts, if users have `COUNTED` items each, or as many as are trained on.

    Some users with random histories, popular items first, go through the code that counts; noise on pairs without data
    costs the same for them as for all. To this comes what adding up one user takes, for every other user. Memory is
    that of a block of the pairs of items that occur, a full one at worst.
    """
    users, length = min(plan.users, COUNTED_USERS), min(config.max_length or COUNTED, COUNTED)
    histories = (items ** np.random.default_rng(0).random(users * length)).astype(np.int64) - 1  # Zipf's law
    histories, offsets = np.clip(histories, 0, items - 1), np.arange(0, users * length + 1, length)
    sums = ArraySums.packed(histories, offsets)
    noise = plan.noise_of(COUNTS) or 1.0
    began = time.monotonic()
    release_transition_sums(sums, items, noise * users / plan.users, seed=0)  # as many pairs stay, in proportion
    seconds = time.monotonic() - began
    if plan.users > users:
        one = ArraySums.packed(histories[:length], offsets[:2])
        each = max(0.0, _seconds_of_sums(sums, items) - _seconds_of_sums(one, items)) / (users - 1)
        seconds += each * (plan.users - users)
    pairs = min(items * (items - 1) // 2, plan.users * length * WINDOW, COUNTERS)
    return {
        "parameters": None,
        "seconds": seconds,
        "memory": peak_memory() + 4 * plan.users * length + 2 * 16 * pairs,
        "items_a_user": length,
    }


def _seconds_of_sums(sums: ArraySums, items: int) -> float:
    """Of the exact sums of all rounds."""
    places = np.arange(items)
    began = time.monotonic()
    sums.items(items)
    cells = gathered(sums.all_pairs(places))[0]
    for this in ROUNDS[1:]:
        sums.pairs(places, cells, this.directed)
    return time.monotonic() - began


def estimate(config: Config, plan: Plan, items: int) -> dict[str, Any]:
    """Parameters, seconds for all steps if every history has full length, and peak bytes of memory."""
    assert config.max_length is not None and config.threads is not None
    rows = min(int(plan.expected_batch_size), max(1, config.micro_batch_tokens // max(1, config.max_length - 1)))
    generator = np.random.default_rng(0)
    histories = generator.integers(0, items, (rows, config.max_length))
    dataset = Dataset.from_histories(list(histories), items, max_length=config.max_length)
    frequencies = torch.full((items,), min(1.0, config.max_length / items))
    random = SecureRandom("estimate")
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_model(config, plan, items, frequencies, random)
            trainer = make_trainer(config, plan, dataset, model, random)
            trainer.add_gradients(np.arange(rows))  # the first time includes proofs and page faults
            began = time.monotonic()
            trainer.add_gradients(np.arange(rows))
            seconds = time.monotonic() - began
    finally:
        torch.set_num_threads(before)
    per_user = seconds / rows
    data = 4 * plan.users * config.max_length
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "parameters": parameters,
        "seconds": per_user * plan.expected_batch_size * plan.steps,
        "memory": peak_memory()
        + data
        + 8 * parameters * (len(plan.noise.coefficients()) - 1),  # the noise of past steps
    }


def plan_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """A plan for people: names and values."""
    rows = [("model", facts["model"]), ("users N", f"{facts['users']:,} (public)")]
    if facts["steps"]:
        rows.append(("expected batch B", f"{facts['expected_batch_size']:,}"))
        rows.append(("sample rate q", f"{facts['sample_rate']:.5g}"))
        rows.append(("steps T", f"{facts['steps']:,}"))
    return [*rows, *_budget(facts), *_effort(facts)]


def _budget(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if facts["epsilon"] is None:
        return [("NOT PRIVATE", "no clipping and no noise: epsilon is inf")]
    rows = [
        ("ε", f"{round_up(facts['epsilon'])} (asked for: {facts['epsilon_target']:g})"),
        ("δ", f"{facts['delta']:.3g}"),
    ]
    if facts["steps"]:
        rows.append(("noise multiplier σ", f"{facts['noise_multiplier']:g}"))
        rows += noise_of(facts).rows(facts["sample_rate"], USER)
        rows.append(("clip norm C", f"{facts['clip_norm']:g}"))
    rows += [
        (f"for {event['label']}", f"noise multiplier {event['noise_multiplier']:g}") for event in facts["releases"]
    ]
    return rows if facts["private"] else [*rows, ("NOT PRIVATE", "noise comes from a seed")]


def _effort(facts: dict[str, Any]) -> list[tuple[str, str]]:
    estimate = facts["estimate"]
    if estimate is None:
        return [("time, memory", "not known: give --items, or --catalog")]
    if not facts["steps"]:
        return [
            ("time", f"about {estimate['seconds'] / 60:,.1f} min, if users have {estimate['items_a_user']} items each"),
            ("memory", f"at most {estimate['memory'] / 2**30:.1f} GiB"),
        ]
    return [
        ("parameters", f"{estimate['parameters']:,}"),
        ("time", f"at most {estimate['seconds'] / 60:,.1f} min, if every user fills --max-length"),
        ("memory", f"about {estimate['memory'] / 2**30:.1f} GiB"),
    ]
