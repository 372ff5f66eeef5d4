import math

import pytest
import torch

from dpformer.reattention import adam_error, effective_error
from dpformer.training.optimizer import PrivateOptimizer
from dpformer.training.schedule import warmup_then_decay


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


def test_adam_error_is_how_far_noise_alone_moves_parameters() -> None:
    """Nothing but noise: the deviation of 20,000 parameters after all steps, whatever σ and B."""
    steps, rate = 150, 0.01
    rates = [rate * warmup_then_decay(step, steps, 0.2) for step in range(steps)]
    for sigma, expected_batch_size in ((0.7, 50.0), (4.0, 2000.0)):
        parameter = torch.nn.Parameter(torch.zeros(20_000))
        optimizer = PrivateOptimizer(
            torch.optim.Adam([parameter]),
            noise_multiplier=sigma,
            clip_norm=1.0,
            expected_batch_size=expected_batch_size,
            seed=0,
        )
        for now in rates:
            for group in optimizer.param_groups:
                group["lr"] = now
            optimizer.step()
            optimizer.zero_grad()
        found = parameter.detach().std().item()
        assert adam_error(rates, 3).weights.item() == pytest.approx(found, rel=0.1)
    assert adam_error([], 3).items.tolist() == [0.0, 0.0, 0.0]
