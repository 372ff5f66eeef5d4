"""`--model auto`: the kind of model that is likely the most accurate, from options and public numbers alone.

Some options leave only one kind: text, a log in a cluster, an option that only networks have. Otherwise the choice is a
function of the number of users (public in every statement), of the item list if it is public (a catalogue, or
`--assume-items-public`, on which the guarantee is then conditional), and of ε; never of the log. If the item list is
private, so is its length, which is then not used. So two adjacent logs always get the same model, and the choice costs
nothing. docs/results/auto.md has the measurements behind the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpformer.kinds.base import ModelKind
from dpformer.kinds.counts import COUNTS
from dpformer.kinds.network import OF_NETWORKS
from dpformer.kinds.transformer import TRANSFORMER

if TYPE_CHECKING:
    from dpformer.data.attributes import Attributes
    from dpformer.runs.config import Config

AUTO = "auto"
UNDECIDED: ModelKind = COUNTS  # stands for `auto` until it is decided
CANDIDATES: tuple[ModelKind, ...] = (COUNTS, TRANSFORMER)
USERS_PER_ITEM = 15  # the fewest with which a network was better
OF_COUNTS = ("repeat_weight", "previous", "event_weights", "session_gap")
FEWEST_USERS = 3000  # below it, a batch drowns in the noise of a step


@dataclass(frozen=True)
class Choice:
    """A kind of model, and the reason, as the end of a sentence "…, because"."""

    kind: ModelKind
    reason: str

    @property
    def model(self) -> str:
        return self.kind.name


def by_choices(chosen: Mapping[str, Any], explicit: Iterable[str] = ()) -> str:
    """The name of the model implied by other options; `auto` if several are possible.

    Args:
        chosen: all options so far.
        explicit: the names of options given explicitly, as opposed to those of a recipe.
    """
    in_cluster = chosen.get("engine") == "spark" and not chosen.get("cache")
    if in_cluster or any(chosen.get(name) for name in OF_COUNTS):
        return COUNTS.name  # the only kind that supports them
    if chosen.get("task") == "lm" or any(name in OF_NETWORKS for name in explicit):
        return TRANSFORMER.name
    return AUTO


def choose_model(*, users: int, items: int | None, attributes: int = 0, epsilon: float = 5.0) -> Choice:
    """Choose a model.

    Args:
        users: the public number of users.
        items: the number of items, None if it is not public.
        attributes: the number of attributes in the catalogue.
        epsilon: ε; inf without privacy.
    """
    if epsilon == float("inf"):
        return Choice(TRANSFORMER, "without noise a network learns more than counts")
    if items is None:
        return Choice(COUNTS, "without a public item list, counts preserve most of it")
    size = f"{math.floor(10 * users / items) / 10:g} users per item"
    if users >= FEWEST_USERS and users >= USERS_PER_ITEM * items:
        return Choice(TRANSFORMER, f"there are {size}, and {USERS_PER_ITEM} are enough to train a network")
    if users < FEWEST_USERS:
        return Choice(COUNTS, f"{users:,} users are below the {FEWEST_USERS:,} that a network needs")
    more = ", while counts use the catalogue's attributes" if attributes else ""
    return Choice(COUNTS, f"{size} is below the {USERS_PER_ITEM} that a network needs{more}")


def decide(config: Config, *, users: int, items: int | None, attributes: Attributes | None) -> tuple[Config, Choice]:
    """The config with `auto` decided by public numbers.

    Args:
        config: a config whose model is `auto`.
        users: the number of users.
        items: the number of items; used only if the list is public.
        attributes: attributes in the public catalogue.
    """
    public = config.items_policy != "dp"
    choice = choose_model(
        users=users,
        items=items if public else None,
        attributes=len(attributes) if public and attributes is not None else 0,
        epsilon=config.epsilon,
    )
    return config.replace(model=choice.model), choice
