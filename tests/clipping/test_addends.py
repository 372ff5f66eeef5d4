"""Each user is in a sum at most once, and a sum is of one batch: over micro-batches and over engines on one model."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dpformer as dp
from dpformer.clipping.bounded_sum import Addend, addends_of, check_users, put_bounded, sum_of
from dpformer.noise.mechanisms import INDEPENDENT
from dpformer.sampling.batch import Batch, Origin, Part

DATA = torch.randn(10, 5)
ORIGIN = Origin("a", 10, 0.5, 5, INDEPENDENT, True)


def drawn(*users: int, step: int = 0) -> Batch:
    return Batch(np.array(users), step, ORIGIN)


def add(clipping: dp.PhantomClipping, part: Part | None, users: Tensor | None = None) -> None:
    assert part is not None or users is not None
    with clipping.users(DATA[part.users if users is None else users], part) as user:
        loss = clipping.model(user)[:, 0]  # type: ignore[union-attr]
    clipping.backward(loss, dp.clip(1.0))


def held(model: nn.Module) -> list[list[int]]:
    return [sorted(addend.part.users.tolist()) for addend in addends_of(list(model.parameters())) if addend.part]


def test_a_sum_knows_its_users() -> None:
    model = nn.Linear(5, 2)
    clipping, batch = dp.PhantomClipping(model), drawn(1, 3, 4, 7)
    for part in batch.split(3):
        add(clipping, part)
    assert held(model) == [[1, 3, 4], [7]]
    check_users(addends_of(list(model.parameters())), batch)


def refused(model: nn.Module, call: Callable[[], None], words: str) -> None:
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with pytest.raises(ValueError, match=words):
        call()
    assert all(map(torch.equal, before, [p.grad for p in model.parameters() if p.grad is not None]))


def test_a_second_backward_pass_of_the_same_part() -> None:
    model = nn.Linear(5, 2)
    clipping, batch = dp.PhantomClipping(model), drawn(1, 3)
    add(clipping, batch[:])
    refused(model, lambda: add(clipping, batch[:]), "user 1 is in the sum of step 1 already")


def test_parts_that_overlap() -> None:
    model = nn.Linear(5, 2)
    clipping, batch = dp.PhantomClipping(model), drawn(1, 3, 5)
    add(clipping, batch[:2])
    refused(model, lambda: add(clipping, batch[1:]), "user 3 is in the sum")


def test_two_engines_over_one_model() -> None:
    model, batch = nn.Linear(5, 2), drawn(1, 3, 5)
    add(dp.PhantomClipping(model), batch[:])
    refused(model, lambda: add(dp.PhantomClipping(model), batch[:]), "user 1 is in the sum")


def test_two_passes_that_reach_different_parameters_are_found_by_the_step() -> None:
    first, second = nn.Linear(5, 1), nn.Linear(5, 1)
    model, batch = nn.ModuleList([first, second]), drawn(2)
    clipping = dp.PhantomClipping(model)
    for layer in (first, second):
        with clipping.users(DATA[batch.users], batch[:]) as user:
            loss = layer(user)[:, 0]
        clipping.backward(loss, dp.clip(1.0))
    with pytest.raises(ValueError, match="user 2 is in the sum"):
        check_users(addends_of(list(model.parameters())), batch)


def test_two_batches_are_not_accumulated() -> None:
    model = nn.Linear(5, 2)
    clipping = dp.PhantomClipping(model)
    add(clipping, drawn(1, 3)[:])
    refused(model, lambda: add(clipping, drawn(4, step=1)[:]), "batch of step 1, and now users of the batch of step 2")


def test_named_and_unnamed_users_do_not_mix() -> None:
    model = nn.Linear(5, 2)
    clipping = dp.PhantomClipping(model)
    add(clipping, drawn(1, 3)[:])
    refused(model, lambda: add(clipping, None, torch.tensor([5])), "users are not named")
    model.zero_grad()
    add(clipping, None, torch.tensor([5]))
    refused(model, lambda: add(clipping, drawn(1, 3)[:]), "users are not named")


def test_a_part_has_as_many_users_as_there_are_losses() -> None:
    model = nn.Linear(5, 2)
    clipping = dp.PhantomClipping(model)
    with pytest.raises(ValueError, match="the part has 2 users, but the data have 3"):
        add(clipping, drawn(1, 3)[:], torch.tensor([1, 3, 5]))


def test_after_zero_grad_the_sum_is_empty() -> None:
    model = nn.Linear(5, 2)
    clipping, batch = dp.PhantomClipping(model), drawn(1, 3)
    for set_to_none in (True, False):
        add(clipping, batch[:])
        model.zero_grad(set_to_none)
    assert held(model) == []
    with pytest.raises(ValueError, match="has 2 users, and the gradients hold 0"):
        check_users(addends_of(list(model.parameters())), batch)


def test_all_users_of_a_batch_must_be_there() -> None:
    batch = drawn(1, 3, 5)
    with pytest.raises(ValueError, match="has 3 users, and the gradients hold 2 of them"):
        check_users([Addend(batch[:2])], batch)
    check_users([], drawn())
    check_users([Addend(None)], None)
    with pytest.raises(ValueError, match=r"optimizer.step\(batch\)"):
        check_users([Addend(batch[:])], None)


def test_sums_from_elsewhere_say_whose_they_are() -> None:
    model, batch = nn.Linear(5, 2), drawn(1, 3)
    clipping, parameters = dp.PhantomClipping(model), list(model.parameters())
    add(clipping, batch[:1])
    sums, addends = [sum_of(p) for p in parameters], addends_of(parameters)
    model.zero_grad()
    put_bounded(parameters, sums, 1.0, addends)
    refused(model, lambda: add(clipping, batch[:]), "user 1 is in the sum")
    add(clipping, batch[1:])
    check_users(addends_of(parameters), batch)
