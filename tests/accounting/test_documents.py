"""The examples of the documentation and the docstrings run, and give the numbers they print."""

import doctest
import re
from pathlib import Path

import pytest

from dpformer.accounting import calibration, ledger
from dpformer.sampling import poisson

ACCOUNTING = Path(__file__).parents[2] / "docs" / "privacy" / "accounting.md"


def test_accounting_page() -> None:
    text = ACCOUNTING.read_text()
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, names)
    assert names["steps"] == 590
    assert names["sigma"] == pytest.approx(3.294, abs=6e-4) and "# 3.294" in text
    assert names["ledger"].epsilon(1 / 6040) == pytest.approx(4.99, abs=0.01)


@pytest.mark.parametrize("module", [calibration, ledger, poisson])
def test_docstrings(module: object) -> None:
    failed, tried = doctest.testmod(module)  # type: ignore[arg-type]
    assert tried > 0 and failed == 0
