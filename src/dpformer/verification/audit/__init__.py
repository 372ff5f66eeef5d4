"""Audit: what training gives away about made-up users, beside what is claimed. Names are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpformer.verification.audit.auditing import audit
    from dpformer.verification.audit.checks import Check
    from dpformer.verification.audit.counts import audit_counts
    from dpformer.verification.audit.observation import Mechanism, Observation, observe
    from dpformer.verification.audit.result import Audit

_HOME = {
    "Audit": "result",
    "Check": "checks",
    "Mechanism": "observation",
    "Observation": "observation",
    "audit": "auditing",
    "audit_counts": "counts",
    "observe": "observation",
}

__all__ = ["Audit", "Check", "Mechanism", "Observation", "audit", "audit_counts", "observe"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"dpformer.verification.audit.{_HOME[name]}"), name)
    raise AttributeError(f"module 'dpformer.verification.audit' has no attribute {name!r}")
