"""Findings of checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dpformer.errors import DpformerError, out_of_memory


@dataclass(frozen=True)
class Finding:
    """The result of one check: right, wrong, or (None) not checked, and why not."""

    name: str
    ok: bool | None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.ok is not None:  # NumPy's False is not `False`, and would pass
            object.__setattr__(self, "ok", bool(self.ok))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_check(check: Callable[[], Finding]) -> Finding:
    """A check's finding; an error caused by a tampered file is a finding too."""
    try:
        return check()
    except Exception as error:  # an untrusted file may cause any error
        if out_of_memory(error):  # says nothing about the run
            raise DpformerError(f"out of memory while checking {_name(check)}: free some") from None
        return Finding(_name(check), False, " ".join(f"{type(error).__name__}: {error}".split())[:300])


def _name(check: Callable[[], Finding]) -> str:
    return getattr(check, "__name__", "check").strip("_").replace("_", " ")


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
