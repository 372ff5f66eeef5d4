"""Noise of a large table is made and added in pieces: each piece has its own, and the same whatever the pieces."""

import numpy as np
import pytest
import torch
from torch import nn

from dpformer.noise import noisy_sums as noise_module
from dpformer.training import PrivateOptimizer


def released(piece: int, threads: int = 1) -> torch.Tensor:
    before = torch.get_num_threads()
    weight = nn.Parameter(torch.zeros(8 * 1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_module, "PIECE", piece)
        torch.set_num_threads(threads)
        try:
            inner = torch.optim.SGD([weight], lr=1.0)
            PrivateOptimizer(
                inner, noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=1.0, key=bytes(range(32))
            ).step()
        finally:
            torch.set_num_threads(before)
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("threads", [1, 2])
def test_every_piece_has_noise_of_its_own(threads: int) -> None:
    pieces = released(1000, threads).double().view(8, 1000).numpy()
    correlations = np.corrcoef(pieces)[np.triu_indices(8, 1)] * 1000**0.5
    assert np.abs(correlations).max() < 4.5
    assert pieces.std() == pytest.approx(1.0, rel=0.05)


def test_pieces_change_no_number() -> None:
    assert torch.equal(released(1000), released(1 << 20)) and torch.equal(released(1000, 2), released(1000))
