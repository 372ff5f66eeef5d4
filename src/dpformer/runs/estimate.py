"""The dry run: the plan of a config and what it will take, from public numbers alone.

Time and memory are measured, not guessed: one micro-batch of random histories of full length runs through the same
code that trains. No private data is touched.
"""

from __future__ import annotations

from typing import Any

import torch

from dpformer.accounting.units import USER
from dpformer.data import read_catalog
from dpformer.errors import DpformerError
from dpformer.format_number import round_up
from dpformer.kinds import auto
from dpformer.kinds.registry import KINDS
from dpformer.noise.mechanisms import noise_of
from dpformer.runs.config import Config
from dpformer.runs.notes import delta_notes
from dpformer.runs.planning import make_plan
from dpformer.runs.tasks import task_of
from dpformer.runs.tasks.recommend import SYNTHETIC_USERS


def dry_run(config: Config, users: int | None = None, items: int | None = None) -> dict[str, Any]:
    """The plan as a dict, with a time estimate if the number of items is known.

    Args:
        config: the options.
        users: the public number of users; by default the declared one, or that of the synthetic data.
        items: the public number of items; a catalogue implies it.
    """
    users = users or config.users
    if config.synthetic:
        users = users or SYNTHETIC_USERS
    if users is None:
        raise DpformerError("a dry run does not read the data, so it cannot count users: give --users N")
    items = items or task_of(config).count_items(config)
    if config.model == auto.AUTO:
        attributes = None if config.catalog is None else read_catalog(config.catalog).attributes
        config, _ = auto.decide(config, users=users, items=items, attributes=attributes)
    config = config.resolve(users=users, threads=torch.get_num_threads())
    plan = make_plan(config, users)
    epsilon = plan.epsilon if plan.noise_multiplier else None
    notes = delta_notes(plan.delta if epsilon is not None else None, users)
    facts = {"model": config.model, **plan.to_dict(), "sample_rate": plan.sample_rate, "epsilon": epsilon}
    facts["notes"] = notes
    if items is None:
        return {**facts, "estimate": None}
    return {**facts, "estimate": config.kind.estimate(config, plan, items)}


def plan_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """A plan as names and values for printing."""
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
        ("ε", f"{round_up(facts['epsilon'])} (target: {facts['epsilon_target']:g})"),
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
        return [("time, memory", "unknown: give --items, or --catalog")]
    return KINDS[facts["model"]].effort(estimate)
