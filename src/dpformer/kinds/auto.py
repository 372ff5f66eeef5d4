"""`--model auto`: which kind of model is likely the most accurate, by choices and public numbers alone.

Some choices leave one kind only: text, a log in a cluster, an option that only networks have. Else the choice is a
function of the number of users (public in every statement), of the list of items where it is public (a catalogue, or
`--assume-items-public`, whose guarantee is given that list), and of ε; never of the log. Where the list of items is
private, its length is too, and has no say. So two neighbouring logs always get the same model, and the choice costs
nothing. docs/results/auto.md has the measurements behind the rule.
"""

from __future__ import annotations

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
UNDECIDED: ModelKind = COUNTS  # as what auto is read until it is decided
CANDIDATES: tuple[ModelKind, ...] = (COUNTS, TRANSFORMER)
USERS_PER_ITEM = 15  # the fewest with which a network has won
FEWEST_USERS = 3000  # below it a batch is lost in the noise of a step


@dataclass(frozen=True)
class Choice:
    """A kind of model, and the end of the sentence "…, because"."""

    kind: ModelKind
    reason: str

    @property
    def model(self) -> str:
        return self.kind.name


def by_choices(chosen: Mapping[str, Any], explicit: Iterable[str] = ()) -> str:
    """The model that other choices leave, by name; `auto` if more than one is left.

    Args:
        chosen: all choices so far.
        explicit: the names of those that somebody made, as against those of a recipe.
    """
    if chosen.get("engine") == "spark":
        return COUNTS.name  # what it can add up
    if chosen.get("task") == "lm" or any(name in OF_NETWORKS for name in explicit):
        return TRANSFORMER.name
    return AUTO


def choose_model(*, users: int, items: int | None, attributes: int = 0, epsilon: float = 5.0) -> Choice:
    """The rule.

    Args:
        users: their number, public.
        items: their number, None if it is not public.
        attributes: how many the catalogue gives; 0 without any.
        epsilon: ε; inf without privacy.
    """
    if epsilon == float("inf"):
        return Choice(TRANSFORMER, "without noise a network learns more than counts")
    if items is None:
        return Choice(COUNTS, "without a public list of items, counts keep the most of it")
    size = f"{users:,} users for {items:,} items"
    if users >= FEWEST_USERS and users >= USERS_PER_ITEM * items:
        return Choice(TRANSFORMER, f"there are {size}, at least {USERS_PER_ITEM} each: enough to train on")
    if users < FEWEST_USERS:
        return Choice(COUNTS, f"there are {users:,} users, and a network needs {FEWEST_USERS:,}")
    more = ", while counts make use of the catalogue's attributes" if attributes else ""
    return Choice(COUNTS, f"there are {size}, and a network needs {USERS_PER_ITEM} each{more}")


def decide(config: Config, *, users: int, items: int | None, attributes: Attributes | None) -> tuple[Config, Choice]:
    """The config with `auto` decided by public numbers.

    Args:
        config: whose model is `auto`.
        users: their number.
        items: how many there are; it has a say only if the list is public.
        attributes: of the public catalogue.
    """
    public = config.items_policy != "dp"
    choice = choose_model(
        users=users,
        items=items if public else None,
        attributes=len(attributes) if public and attributes is not None else 0,
        epsilon=config.epsilon,
    )
    return config.replace(model=choice.model), choice
