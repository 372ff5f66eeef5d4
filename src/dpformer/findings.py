"""What was looked at, and how it was found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from dpformer.errors import DpformerError, out_of_memory


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: right, wrong, or (None) not checked, and why not."""

    name: str
    ok: bool | None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.ok is not None:  # numpy's False is not Python's, and would pass
            object.__setattr__(self, "ok", bool(self.ok))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_check(check: Callable[[], Finding]) -> Finding:
    """A check's finding; what a tampered file makes it trip over is a finding too."""
    try:
        return check()
    except Exception as error:  # a stranger's file can be wrong in any way
        if out_of_memory(error):  # which says nothing about the run
            raise DpformerError(f"there is not enough memory to check {_name(check)}: free some") from None
        return Finding(_name(check), False, " ".join(f"{type(error).__name__}: {error}".split())[:300])


def _name(check: Callable[[], Finding]) -> str:
    return getattr(check, "__name__", "check").strip("_").replace("_", " ")


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
