"""Audit: what training reveals about synthetic users, compared with the claim. Names are imported on first use."""

from typing import TYPE_CHECKING

from dpformer.lazy import lazy_names

if TYPE_CHECKING:
    from dpformer.verification.audit.checks import Check
    from dpformer.verification.audit.membership import MembershipAttack, attack_membership
    from dpformer.verification.audit.observation import Mechanism, Observation
    from dpformer.verification.audit.observer import observe
    from dpformer.verification.audit.queries import audit_query
    from dpformer.verification.audit.result import Audit
    from dpformer.verification.audit.run import audit_run
    from dpformer.verification.audit.training import audit

_HOME = {
    "Audit": "result",
    "Check": "checks",
    "MembershipAttack": "membership",
    "Mechanism": "observation",
    "Observation": "observation",
    "attack_membership": "membership",
    "audit": "training",
    "audit_query": "queries",
    "audit_run": "run",
    "observe": "observer",
}

__all__ = [
    "Audit",
    "Check",
    "Mechanism",
    "MembershipAttack",
    "Observation",
    "attack_membership",
    "audit",
    "audit_query",
    "audit_run",
    "observe",
]

__getattr__ = lazy_names(__name__, _HOME)
