from collections.abc import Iterator

import pytest

from dpformer.accounting import calibration, ledger
from dpformer.accounting.accountant import epsilon_of
from dpformer.integrations import session
from tests.training.memo import _remember, remember


@pytest.fixture(autouse=True, scope="module")
def accountant_remembers() -> Iterator[None]:
    """The accountant's answers: many small runs have the same plan."""
    with pytest.MonkeyPatch.context() as patch:
        remember(patch.setattr)
        patch.setattr(session, "calibrate", _remember("calibrate", calibration.calibrate))
        patch.setattr(ledger, "epsilon_of", _remember("epsilon_of", epsilon_of))
        yield
