"""A run that dies in the middle."""

from typing import Any

import pytest

from dpformer.training.trainer import Trainer


class Crash(BaseException):
    """Nothing in the package catches it."""


def crash_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """The process dies inside a later step; what is on disk is what it is."""
    advance = Trainer.advance

    def dying(self: Trainer) -> dict[str, Any]:
        if self.step == steps:
            raise Crash
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", dying)
