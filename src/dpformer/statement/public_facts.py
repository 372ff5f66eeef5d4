"""What a statement says about the data, from the config, the plan and public sizes, never from the data.

So `verify` can rebuild the sentences without the data, and detects a sentence that says anything else.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dpformer.queries.popularity import list_price

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan


def public_description(config: Config, plan: Plan, items: int, tokens: str = "") -> dict[str, Any]:
    """The description from which `data_statement` (or `text_statement`) makes sentences.

    Args:
        config: resolved.
        plan: the plan of the run.
        items: size of the released vocabulary.
        tokens: the sentence on the vocabulary of text.
    """
    if config.task == "lm":
        return {"unit": config.unit, "max_length": config.max_length, "tokens": tokens, **_population(config, plan)}
    return {
        "query": config.query is not None,
        "filters": asdict(config.filters()),
        "vocabulary": {"policy": config.items_policy, "release": list_price(config, plan)},
        "items": items,
        "max_length": config.max_length,
        "split": {"until": config.split_at, "validation": config.validation},
        **_population(config, plan),
    }


def _population(config: Config, plan: Plan) -> dict[str, Any]:
    return {"users": plan.users, "users_declared": config.users is not None}
