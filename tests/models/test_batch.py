import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpformer.models import Batch


def test_inputs_and_targets_are_shifted_by_one_and_padded_on_the_right() -> None:
    batch = Batch.from_histories([[3, 1, 4], [5, 9], [7], []], max_length=10)
    assert batch.items.tolist() == [[3, 1], [5, 0], [0, 0], [0, 0]]
    assert batch.targets.tolist() == [[1, 4], [9, -1], [-1, -1], [-1, -1]]
    assert batch.lengths.tolist() == [2, 1, 0, 0]
    assert len(batch) == 4 and batch.items.dtype == torch.int64


def test_the_last_transitions_are_kept() -> None:
    batch = Batch.from_histories([np.arange(9)], max_length=3)
    assert batch.items.tolist() == [[5, 6, 7]] and batch.targets.tolist() == [[6, 7, 8]]
    scores = Batch.for_scores([np.arange(9), np.arange(2)], max_length=3)
    assert scores.items.tolist() == [[6, 7, 8], [0, 1, 0]] and scores.lengths.tolist() == [3, 2]
    assert (scores.targets == -1).all()


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=5), st.integers(1, 6))
def test_every_kept_transition_is_there_once(histories: list[list[int]], max_length: int) -> None:
    batch = Batch.from_histories(histories, max_length)
    for row, history in enumerate(histories):
        n = int(batch.lengths[row])
        assert n == min(max_length, max(0, len(history) - 1))
        pairs = list(zip(batch.items[row, :n].tolist(), batch.targets[row, :n].tolist(), strict=True))
        assert pairs == list(itertools.pairwise(history))[-n:] if n else pairs == []
        assert (batch.targets[row, n:] == -1).all() and (batch.items[row, n:] == 0).all()


def test_empty_batch_and_bad_length() -> None:
    assert Batch.from_histories([], 5).items.shape == (0, 1)
    with pytest.raises(ValueError, match="max_length is 0"):
        Batch.from_histories([[1, 2]], 0)
