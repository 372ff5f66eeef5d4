"""`audit_run`: every mechanism in the ledger of a run on the same canaries, so that the bound covers all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dpformer.accounting.arguments import delta_of
from dpformer.accounting.events import Event, Gaussian, PoissonGaussian
from dpformer.noise.mechanisms import noise_of
from dpformer.queries.registry import query_of
from dpformer.verification.audit.bound import check_size
from dpformer.verification.audit.observation import Mechanism
from dpformer.verification.audit.observer import Watch
from dpformer.verification.audit.queries import query_part
from dpformer.verification.audit.result import Audit, Part, conclude
from dpformer.verification.audit.training import mechanism_of, training_part

if TYPE_CHECKING:
    from dpformer.training.distributed import Team


def audit_run(
    events: Sequence[Event],
    facts: Mapping[str, Any],
    *,
    canaries: int = 10_000,
    confidence: float = 0.95,
    seed: int | None = None,
    watch: Watch = iter,
    team: Team | None = None,
) -> Audit:
    """Audit all events of a ledger together.

    Args:
        events: events of the ledger; refused if one of them has no audit, since the bound would be incomplete.
        facts: facts of the statement: `delta`, `clip_norm` and `clipping`.
        canaries, confidence, seed, watch, team: as for `audit`.
    """
    began = time.monotonic()
    check_size(canaries, confidence)
    if unknown := [event.label for event in events if not _auditable(event)]:
        raise ValueError(
            f"there is no audit of {unknown[0] or 'an event without a label'}, so the bound would be incomplete"
        )
    if not events:
        raise ValueError("the ledger holds no event, so there is no claim to audit")
    member = np.random.default_rng(seed).random(_enough_for(events, canaries)) < 0.5
    parts = [_part(event, facts, member, seed, watch, team) for event in events]
    return conclude(parts, member, delta_of(facts["delta"]), confidence, began)


def _auditable(event: Event) -> bool:
    return isinstance(event, PoissonGaussian) or (isinstance(event, Gaussian) and query_of(event.label) is not None)


def _enough_for(events: Sequence[Event], wanted: int) -> int:
    """The number of canaries: one that suits the query with restrictions on it."""
    queries = [query for event in events if (query := query_of(event.label)) is not None]
    return max([wanted, *(query.canary_count(wanted) for query in queries)])


def _part(
    event: Event, facts: Mapping[str, Any], member: np.ndarray, seed: int | None, watch: Watch, team: Team | None
) -> Part:
    if isinstance(event, PoissonGaussian):
        return training_part(_training(event, facts), member, seed, watch, team)
    query = query_of(event.label)
    assert query is not None and isinstance(event, Gaussian)
    return query_part(query, event, member, seed)


def _training(event: PoissonGaussian, facts: Mapping[str, Any]) -> Mechanism:
    return mechanism_of(
        event.noise_multiplier,
        event.sample_rate,
        event.steps,
        facts["clip_norm"],
        facts["clipping"],
        noise_of(event.to_dict()),
    )
