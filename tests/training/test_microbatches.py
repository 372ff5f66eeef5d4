"""How many positions are computed at once."""

import pytest

from dpformer.clipping import head
from dpformer.training.microbatches import FEW, positions_at_once


@pytest.mark.parametrize("items", [3_416, 23_715, head.KEEP // FEW])
def test_residuals_of_a_micro_batch_are_kept(items: int) -> None:
    positions = positions_at_once(16_384, items)
    assert positions * items <= head.KEEP
    assert positions == 16_384 or (positions + 1) * items > head.KEEP


def test_a_huge_vocabulary_computes_again_rather_than_one_position_at_a_time() -> None:
    assert positions_at_once(16_384, 1_000_000) == 16_384


def test_no_more_than_asked_for() -> None:
    assert positions_at_once(40, 10) == 40
