"""A batch knows its users and can be stepped on once."""

import copy
import pickle

import numpy as np
import pytest
import torch

from dpformer.noise.mechanisms import INDEPENDENT
from dpformer.sampling.batch import Batch, Due, Origin, Part
from dpformer.sampling.poisson import PoissonBatches

ORIGIN = Origin("a", 100, 0.1, 5, INDEPENDENT, True)


def batch(*users: int) -> Batch:
    return Batch(np.array(users, dtype=np.int64), 2, ORIGIN)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_split_has_every_user_once_in_order(size: int) -> None:
    drawn = batch(1, 4, 9, 16, 25, 36, 49)
    parts = list(drawn.split(size))
    assert torch.equal(torch.cat([part.users for part in parts]), drawn.users)
    assert all(part.batch is drawn and 1 <= len(part) <= size for part in parts)
    assert drawn.users.dtype == torch.int64 and len(drawn) == 7


def test_an_empty_batch_has_no_parts() -> None:
    assert list(batch().split(3)) == [] and len(batch()) == 0
    assert len(batch().part([])) == 0


def test_parts_may_be_in_any_order_and_split_again() -> None:
    drawn = batch(3, 5, 8)
    part = drawn.part(np.array([8, 3]))
    assert part.users.tolist() == [8, 3]
    assert [one.users.tolist() for one in part.split(1)] == [[8], [3]]
    assert drawn[1:].users.tolist() == [5, 8] and drawn[0::2].users.tolist() == [3, 8]


def test_a_part_has_users_of_its_batch_each_once() -> None:
    with pytest.raises(ValueError, match="user 4 was not drawn for step 3"):
        batch(3, 5).part([3, 4])
    with pytest.raises(ValueError, match="user 9 was not drawn"):
        Part(torch.tensor([9]), batch(3, 5))
    with pytest.raises(ValueError, match="user 0 was not drawn"):
        Part(torch.tensor([0]), batch())
    with pytest.raises(ValueError, match="user 5 occurs twice"):
        batch(3, 5).part([5, 3, 5])


@pytest.mark.parametrize("users", [[[1, 2]], [0.5], [True, False]])
def test_users_are_indices(users: list[object]) -> None:
    with pytest.raises(ValueError, match="users must be indices"):
        batch(1, 2).part(torch.tensor(users))


@pytest.mark.parametrize("users", [(2, 1), (1, 1)])
def test_a_batch_is_ascending(users: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending and distinct"):
        batch(*users)


def test_the_token_is_for_one_step() -> None:
    drawn = Batch(np.array([1]), 2, ORIGIN, Due(2))
    drawn.check_due()
    drawn.consume()
    for again in (drawn.consume, drawn.check_due):
        with pytest.raises(ValueError, match="the batch of step 3 has been used"):
            again()


def test_tokens_are_consumed_in_order() -> None:
    """`batch(0)` repeatedly, a replayed batch, a small one that is skipped."""
    batches = PoissonBatches(100, 0.1, 5)
    batches.batch(0).consume()
    with pytest.raises(ValueError, match="the batch of step 1 has been used"):
        batches.batch(0).consume()
    with pytest.raises(ValueError, match="the batch of step 2 was skipped, and now that of step 3 comes"):
        batches.batch(2).consume()
    with pytest.raises(ValueError, match="was not drawn by PoissonBatches"):
        batch(1).consume()


def test_a_token_is_not_copied() -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(batch(1))  # type: ignore[operator]


def test_a_split_of_no_size_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        batch(1).split(0)
