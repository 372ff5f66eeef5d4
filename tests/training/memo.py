"""The accountant, remembering its answers: many small runs with the same plan need not be calibrated each."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from dpformer.accounting import accountant, calibration
from dpformer.kinds import planning
from dpformer.statement import build
from dpformer.training import plan

_known: dict[Any, float] = {}


def _remember(name: str, function: Callable[..., float]) -> Callable[..., float]:
    def remembered(*given: Any, **named: Any) -> float:
        freeze = [tuple(value) if isinstance(value, Iterable) else value for value in (*given, *named.values())]
        key = (name, *freeze)
        if key not in _known:
            _known[key] = function(*given, **named)
        return _known[key]

    return remembered


def remember(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Puts the remembering accountant where runs look for it."""
    put(planning, "calibrate", _remember("calibrate", calibration.calibrate))
    for module in (plan, build):
        put(module, "epsilon_of", _remember("epsilon_of", accountant.epsilon_of))


@pytest.fixture(autouse=True, scope="module")
def accountant_remembers() -> Iterator[None]:
    """For every test of a file or folder that imports it."""
    with pytest.MonkeyPatch.context() as patch:
        remember(patch.setattr)
        yield
