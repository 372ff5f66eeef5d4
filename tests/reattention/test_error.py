import math

import pytest
import torch

from dpformer.reattention import effective_error


def test_definition() -> None:
    p = torch.tensor([1.0, 0.25, 0.001], dtype=torch.float64)
    error = effective_error(3.0, 100, p, scale=2.0)
    torch.testing.assert_close(error.items, 2.0 * 3.0 / (100 * p))
    assert error.weights.item() == pytest.approx(2.0 * 3.0 / 100)


def test_items_never_seen_are_as_rare_as_the_rarest() -> None:
    error = effective_error(1.0, 10, torch.tensor([0.5, 0.0, 0.02]))
    assert error.items.isfinite().all()
    assert error.items[1] == error.items[2]
    nothing_known = effective_error(2.0, 10, torch.zeros(3))
    torch.testing.assert_close(nothing_known.items, torch.full((3,), 2.0))


def test_no_noise_is_no_error() -> None:
    error = effective_error(0.0, 10, torch.tensor([0.5, 0.0]))
    assert not error.items.any() and not error.weights.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1.0, 10, torch.ones(2)), "noise_multiplier is -1.0"),
        ((math.nan, 10, torch.ones(2)), "noise_multiplier is nan"),
        ((1.0, 0, torch.ones(2)), "expected_batch_size is 0"),
        ((1.0, 10, torch.tensor([3.0, 1.0])), "a frequency is 3.0; give probabilities"),
        ((1.0, 10, torch.tensor([math.nan, 1.0])), "a frequency is nan"),
        ((1.0, 10, torch.tensor([3, 1])), "torch.int64"),
    ],
)
def test_bad_input(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        effective_error(*arguments)
