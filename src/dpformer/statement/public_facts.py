"""What a statement says about the data: made from the config, the plan and sizes that are public, never from the data.

So `verify` can make the same sentences again without the data, and a sentence that says anything else is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpformer.queries.counts import LABEL as COUNTS
from dpformer.queries.counts import deviation_of, round_of_items
from dpformer.queries.frequencies import LABEL as FREQUENCIES
from dpformer.queries.items import LABEL as ITEMS
from dpformer.queries.items import MOST_ITEMS, threshold_for

if TYPE_CHECKING:
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan


def public_description(config: Config, plan: Plan, items: int, tokens: str = "") -> dict[str, Any]:
    """What `data_statement`, or of text `text_statement`, says in sentences.

    Args:
        config: resolved.
        plan: of the run.
        items: size of the released vocabulary.
        tokens: the sentence on the vocabulary of text.
    """
    if config.task == "lm":
        return {"unit": config.unit, "max_length": config.max_length, "tokens": tokens, **_population(config, plan)}
    return {
        "query": config.query is not None,
        "filters": {"min_rating": config.min_rating, "min_user_actions": config.min_user_actions},
        "vocabulary": {"policy": config.items_policy, "release": list_price(config, plan)},
        "items": items,
        "max_length": config.max_length,
        "split": {"validation": config.validation},
        **_population(config, plan),
    }


def _population(config: Config, plan: Plan) -> dict[str, Any]:
    return {"users": plan.users, "users_declared": config.users is not None}


def popularity_noise(config: Config, plan: Plan, *, again: bool = False) -> float:
    """The standard deviation of the noise on the popularity of items: released by itself, or as a round of counts.

    Args:
        config: resolved.
        plan: of the run.
        again: it is the mean of two releases.
    """
    event = next(event for event in plan.events if event.label in (ITEMS, COUNTS, FREQUENCIES))
    if event.label != COUNTS:
        return event.noise_multiplier
    first = round_of_items(listed=config.items_policy == "dp", again=again)
    return deviation_of(first, event.noise_multiplier)


def list_price(config: Config, plan: Plan) -> dict[str, Any] | None:
    """Noise, threshold and δ of a released list of items; None if it is not released from the data."""
    if config.items_policy != "dp":
        return None
    event = next(event for event in plan.events if event.label in (ITEMS, COUNTS))
    noise = popularity_noise(config, plan)
    threshold = threshold_for(event.failure, noise)
    return {"noise_multiplier": noise, "delta": event.failure, "threshold": threshold, "max_items": MOST_ITEMS}
