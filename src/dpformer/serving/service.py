"""What the supervisor and the processes of a model agree on; imports neither torch nor the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpformer.serving.access import Access
from dpformer.serving.limits import Limits

WATCHED = ("model.safetensors", "privacy.json")
AGAIN_SECONDS = 1.0  # between attempts to replace dead processes
CRASHED = 3


@dataclass(frozen=True)
class Service:
    """What to serve, and how."""

    run: Path
    catalog: Path | None = None
    workers: int = 1
    threads: int = 1
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    access_log: str | None = None
    watch: bool = False

    def identity(self) -> tuple[Any, ...]:
        """Changes whenever the files do; names are resolved again, so that a symbolic link may be switched."""
        files = [self.run, *(self.run / name for name in WATCHED), *([self.catalog] if self.catalog else [])]
        return tuple(_identity(path) for path in files)


def _identity(path: Path) -> tuple[Any, ...]:
    try:
        facts = path.stat()
    except OSError:
        return (None,)
    return (facts.st_dev, facts.st_ino, facts.st_mtime_ns, facts.st_size)
