"""`--model auto`: which model is likely the most accurate, by public numbers alone.

The choice is a function of the number of users (public in every statement), of the list of items where it is public (a
catalogue, or `--assume-items-public`, whose guarantee is given that list), of ε and of what else the user asked for;
never of the log. Where the list of items is private, its length is too, and has no say. So two neighbouring logs always
get the same model, and the choice costs nothing. docs/results/auto.md has the measurements behind the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpformer.errors import DpformerError

if TYPE_CHECKING:
    from dpformer.data import Dataset, Vocabulary
    from dpformer.runs.config import Config

USERS_PER_ITEM = 15  # the fewest with which a network has won
FEWEST_USERS = 3000  # below it a batch is lost in the noise of a step


@dataclass(frozen=True)
class Choice:
    """A model, and the end of the sentence "…, because"."""

    model: str
    reason: str


def choose_model(*, users: int, items: int | None, attributes: int = 0, epsilon: float = 5.0) -> Choice:
    """The rule.

    Args:
        users: their number, public.
        items: their number, None if it is not public.
        attributes: how many the catalogue gives; 0 without any.
        epsilon: ε; inf without privacy.
    """
    if epsilon == float("inf"):
        return Choice("transformer", "without noise a network learns more than counts")
    if items is None:
        return Choice("counts", "without a public list of items, counts keep the most of it")
    size = f"{users:,} users for {items:,} items"
    if users >= FEWEST_USERS and users >= USERS_PER_ITEM * items:
        return Choice("transformer", f"there are {size}, at least {USERS_PER_ITEM} each: enough to train on")
    if users < FEWEST_USERS:
        return Choice("counts", f"there are {users:,} users, and a network needs {FEWEST_USERS:,}")
    more = ", while counts make use of the catalogue's attributes" if attributes else ""
    return Choice("counts", f"there are {size}, and a network needs {USERS_PER_ITEM} each{more}")


def choose_without_data(config: Config, users: int, items: int | None) -> Config:
    """The config with `auto` decided before the data is read, for a plan."""
    from dpformer.data import read_catalog

    public = config.items_policy != "dp"
    catalog = None if config.catalog is None else read_catalog(config.catalog)
    attributes = None if catalog is None else catalog.attributes
    choice = choose_model(
        users=users,
        items=items if public else None,
        attributes=0 if attributes is None else len(attributes),
        epsilon=config.epsilon,
    )
    return config.replace(model=choice.model)


def with_attributes(config: Config, vocabulary: Vocabulary) -> Config:
    """The config with `attributes` decided: whether counts use those of the catalogue, if it has any. Public."""
    there = vocabulary.attributes is not None and len(vocabulary.attributes) > 0
    if config.attributes and not there:
        raise DpformerError("there is no catalogue that says what items share: give --catalog, or leave attributes out")
    if config.model != "counts" and not config.warm_start:
        return config.replace(attributes=None)
    return config if config.attributes is not None else config.replace(attributes=there or None)


def chosen(config: Config, dataset: Dataset) -> tuple[Config, Dataset, Choice]:
    """The config with `auto` decided, and the data cut to the length that the model trains on."""
    public = config.items_policy != "dp"
    attributes = dataset.vocabulary.attributes if public else None
    choice = choose_model(
        users=dataset.num_users,
        items=dataset.num_items if public else None,
        attributes=0 if attributes is None else len(attributes),
        epsilon=config.epsilon,
    )
    decided = config.replace(model=choice.model)
    return decided, dataset.with_max_length(decided.max_length or decided.default_length), choice
