"""All queries that a run may ask, in the order in which they are planned."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dpformer.queries.base import Query

if TYPE_CHECKING:
    from dpformer.runs.config import Config

_added: list[Query] = []
Q = TypeVar("Q", bound=Query)


def all_queries() -> tuple[Query, ...]:
    """Every query: built-in ones, and those that were registered."""
    from dpformer.queries.item_queries import FREQUENCIES, ITEMS  # torch
    from dpformer.queries.metrics import METRICS
    from dpformer.queries.transitions.query import TRANSITIONS

    return (ITEMS, FREQUENCIES, TRANSITIONS, METRICS, *_added)


def register(query: Q) -> Q:
    """Add a query; a label that is taken is refused."""
    if query.label in {known.label for known in all_queries()}:
        raise ValueError(f"a query with the label {query.label!r} already exists")
    _added.append(query)
    return query


def asked_queries(config: Config) -> tuple[Query, ...]:
    """The queries that a config asks."""
    return tuple(query for query in all_queries() if query.asked(config))


def query_of(label: str) -> Query | None:
    """The query of an event; None for an event that no query recorded."""
    return next((query for query in all_queries() if query.label == label), None)
