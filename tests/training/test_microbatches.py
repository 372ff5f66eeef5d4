"""How many positions are computed at once."""

import pytest

from dpformer.clipping import parameter_norms
from dpformer.models import softmax_head
from dpformer.training.microbatches import FEW, positions_at_once


@pytest.mark.parametrize("items", [3_416, 23_715, softmax_head.KEEP // FEW])
def test_residuals_of_a_micro_batch_are_kept(items: int) -> None:
    positions = positions_at_once(16_384, items, 100_000, 200)
    assert positions * items <= softmax_head.KEEP
    assert positions == 16_384 or (positions + 1) * items > softmax_head.KEEP


def test_a_huge_vocabulary_computes_again_rather_than_one_position_at_a_time() -> None:
    assert positions_at_once(16_384, 1_000_000, 100_000, 50) == 16_384


def test_no_more_than_asked_for() -> None:
    assert positions_at_once(40, 10, 1000, 50) == 40


def test_gradients_of_a_large_encoder_are_kept_too() -> None:
    encoder = 10_600_000  # the paper's language model
    positions = positions_at_once(16_384, 65, encoder, 256)
    assert positions // 256 * encoder <= parameter_norms.KEEP < (positions // 256 + 1) * encoder
    assert positions_at_once(16_384, 65, 10**9, 256) == FEW
