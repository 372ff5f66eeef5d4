"""The list of faults speaks of the source as it is: a fault that can no longer be put in would prove nothing."""

from pathlib import Path

import pytest
from fuzz.mutations import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_fault_can_be_put_in(fault: Fault) -> None:
    text = Path(ROOT, "src", "dpformer", fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1 and fault.new != fault.old
    file, _, name = fault.test.partition("::")
    assert f"def {name}" in Path(ROOT, "tests", file).read_text(encoding="utf-8")
