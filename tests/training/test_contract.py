"""A step is what was sampled, or its price says otherwise: each of these was once accepted, and priced too low."""

import copy
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dpformer as dp
from dpformer.accounting import Gaussian, PoissonGaussian
from dpformer.accounting.events import ASSUMED_EXACT, ASSUMED_ONCE, ASSUMED_RATE
from dpformer.sampling import Batch, Part
from dpformer.sampling.batch import Due
from dpformer.statement.build import statement
from dpformer.training.steps_taken import USED
from dpformer.verification import standalone

N, Q, STEPS = 40, 0.3, 12
DATA = torch.randn(N, 5, generator=torch.Generator().manual_seed(0))


class Loop:
    """The README's loop in pieces."""

    def __init__(self, **changes: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(5, 2)
        self.clipping = dp.PhantomClipping(self.model)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        settings = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": Q * N} | changes
        self.optimizer = dp.PrivateOptimizer(self.inner, **settings)
        self.batches = dp.PoissonBatches(N, Q, STEPS)

    def add(self, part: Part | None, users: torch.Tensor | None = None) -> None:
        with self.clipping.users(DATA[part.users if part is not None else users], part) as user:
            loss = self.model(user).square().sum(1)
        self.clipping.backward(loss, dp.clip(1.0))

    def step(self, batch: Batch | None) -> None:
        self.optimizer.step(batch)
        self.optimizer.zero_grad()

    def whole(self, batch: Batch) -> None:
        for part in batch.split(7):
            self.add(part)
        self.step(batch)


def test_the_loop_is_priced_by_what_happened() -> None:
    loop = Loop()
    for batch in loop.batches:
        loop.whole(batch)
    assert loop.optimizer.events() == (PoissonGaussian(1.0, Q, STEPS, label="training"),)


# What is refused.


def accumulated(loop: Loop, batches: Iterator[Batch]) -> None:
    """Four batches in one step were priced at ε = 5.00; the mixture has 32.5."""
    loop.add(next(batches)[:])
    loop.add(next(batches)[:])


def replayed(loop: Loop, batches: Iterator[Batch]) -> None:
    batch = next(batches)
    loop.whole(batch)
    loop.whole(batch)


def batch_0_for_ever(loop: Loop, batches: Iterator[Batch]) -> None:
    for _ in range(2):
        loop.whole(loop.batches.batch(0))


def a_small_one_skipped(loop: Loop, batches: Iterator[Batch]) -> None:
    loop.whole(next(batches))
    next(batches)
    loop.whole(next(batches))


def everybody_beside_a_sampler(loop: Loop, batches: Iterator[Batch]) -> None:
    batch = next(batches)
    loop.add(None, torch.arange(N))
    loop.step(batch)


def everybody_by_hand(loop: Loop, batches: Iterator[Batch]) -> None:
    everybody = Batch(torch.arange(N), 0, loop.batches.origin)
    loop.add(everybody[:])
    loop.step(next(batches))


def a_batch_made_by_hand(loop: Loop, batches: Iterator[Batch]) -> None:
    loop.whole(Batch(torch.arange(N), 0, loop.batches.origin))


def a_user_left_out(loop: Loop, batches: Iterator[Batch]) -> None:
    batch = next(batches)
    loop.add(batch[1:])
    loop.step(batch)


def a_part_twice(loop: Loop, batches: Iterator[Batch]) -> None:
    batch = next(batches)
    loop.add(batch[:])
    loop.add(batch[:3])


def a_part_made_by_hand(loop: Loop, batches: Iterator[Batch]) -> None:
    batch = next(batches)
    loop.add(batch[:])
    loop.add(Part(batch.users[:1].clone(), batch))


def two_engines(loop: Loop, batches: Iterator[Batch]) -> None:
    batch = next(batches)
    loop.add(batch[:])
    loop.clipping = dp.PhantomClipping(loop.model)
    loop.add(batch[:])


def one_batch_for_two_optimizers(loop: Loop, batches: Iterator[Batch]) -> None:
    """Two noisy sums of one sample, priced as two samples."""
    other, batch = Loop(), next(batches)
    loop.whole(batch)
    other.whole(batch)


def a_second_sampler_in_the_sum(loop: Loop, batches: Iterator[Batch]) -> None:
    loop.add(next(batches)[:])
    loop.add(dp.PoissonBatches(N, Q, STEPS).batch(0)[:])


def parts_without_their_batch(loop: Loop, batches: Iterator[Batch]) -> None:
    loop.add(next(batches)[:])
    loop.step(None)


def indices(loop: Loop, batches: Iterator[Batch]) -> None:
    loop.step(next(batches).users)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trick", "words"),
    [
        (accumulated, "batches cannot be accumulated"),
        (replayed, "has been used"),
        (batch_0_for_ever, "has been used"),
        (a_small_one_skipped, "empty or small ones are steps too"),
        (everybody_beside_a_sampler, "users are not named"),
        (everybody_by_hand, "the gradients hold 40 of them"),
        (a_batch_made_by_hand, "was not drawn by PoissonBatches"),
        (a_user_left_out, "add all of them"),
        (a_part_twice, "is in the sum of step 1 already"),
        (a_part_made_by_hand, "is in the sum of step 1 already"),
        (two_engines, "is in the sum of step 1 already"),
        (one_batch_for_two_optimizers, "has been used"),
        (a_second_sampler_in_the_sum, "batches cannot be accumulated"),
        (parts_without_their_batch, r"optimizer.step\(batch\)"),
        (indices, "not Tensor: only it knows who was drawn"),
    ],
)
def test_what_is_refused(trick: Callable[[Loop, Iterator[Batch]], None], words: str) -> None:
    loop = Loop()
    with pytest.raises(ValueError, match=words):
        trick(loop, iter(loop.batches))
    assert loop.optimizer.steps <= 1


@pytest.mark.parametrize("name", ["users", "step", "origin"])
def test_a_batch_cannot_be_changed_after_the_draw(name: str) -> None:
    """Cut to a maximum size it was priced as before; with an origin of rate 0.01 at a thirtieth; renumbered it came
    again in each step."""
    loop = Loop()
    batch, other = loop.batches.batch(0), dp.PoissonBatches(N, 0.01, STEPS).batch(1)
    with pytest.raises(AttributeError, match=f"{name} of a batch is fixed.*lower the sample rate"):
        setattr(batch, name, getattr(other, name))
    drawn = batch.users
    batch.users.resize_(1)
    batch.users.zero_()
    batch[:].users.zero_()
    assert torch.equal(batch.users, drawn) and torch.equal(batch[:].users, drawn)
    memory = drawn.numpy().copy()
    part = batch.part(memory)
    memory[:] = 0
    assert torch.equal(part.users, drawn)


def test_every_bounded_parameter_is_in_the_step() -> None:
    """A second, plain optimizer moved the rest of the model without noise, and the events did not say so."""
    loop = Loop()
    weight = torch.optim.SGD([loop.model.weight], lr=0.1)
    loop.optimizer = dp.PrivateOptimizer(weight, noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=Q * N)
    with pytest.raises(ValueError, match="would get no noise: give all of them to one PrivateOptimizer"):
        loop.whole(loop.batches.batch(0))
    loop.model.bias.requires_grad_(False)
    loop.model.zero_grad()
    loop.clipping = dp.PhantomClipping(loop.model)
    loop.whole(loop.batches.batch(0))
    assert loop.optimizer.steps == 1


# What is priced without amplification.


def test_four_batches_in_a_step_without_their_names() -> None:
    """On the caller's word: no sampling, so that the price is above that of the mixture."""
    sigma, steps, delta = 3.2923, 590, 1 / 6040
    sampled = dp.Ledger([PoissonGaussian(sigma, 1024 / 6040, steps)]).epsilon(delta)
    assert sampled == pytest.approx(5.0, abs=0.01)
    loop = Loop(noise_multiplier=sigma)
    for at in range(4):
        loop.add(None, torch.arange(10 * at, 10 * at + 10))
    loop.step(None)
    (event,) = loop.optimizer.events()
    assert event == Gaussian(sigma, 1, label=f"training ({ASSUMED_ONCE})")
    assert dp.Ledger([event.repeated(steps)]).epsilon(delta) > 32.5


def test_a_rate_on_the_callers_word_is_assumed_everywhere() -> None:
    """`event(0.001)` gave an event like any other."""
    loop = Loop()
    loop.step(None)
    event = loop.optimizer.event(0.001)
    assert event == PoissonGaussian(1.0, 0.001, 1, label=f"training ({ASSUMED_RATE})")
    facts = statement(
        [event], delta=1e-3, target=10.0, clipping="clip", clip_norm=1.0, expected_batch_size=12.0,
        users=N, seeded=False, data=[], hashes={},
    )  # fmt: skip
    assert "ASSUMED: that users were sampled at this rate" in facts["headline"]
    assert any("rests on an assumption" in sentence for sentence in facts["words"])
    loop.whole(loop.batches.batch(0))
    with pytest.raises(ValueError, match="needs no PoissonBatches"):
        loop.optimizer.events(loop.batches)  # type: ignore[arg-type]


def test_a_self_check_that_was_off_is_in_events_statement_and_state() -> None:
    loop = Loop()
    loop.whole(loop.batches.batch(0))
    assert loop.optimizer.event().label == "training"
    loop.clipping = dp.PhantomClipping(loop.model, self_check=False)
    loop.whole(loop.batches.batch(1))
    (event,) = loop.optimizer.events()
    assert event.label == f"training ({ASSUMED_EXACT})" and event.repeats == 2
    facts = statement(
        [event], delta=1e-3, target=10.0, clipping="clip", clip_norm=1.0, expected_batch_size=12.0,
        users=N, seeded=False, data=[], hashes={},
    )  # fmt: skip
    assert "ASSUMED: that gradients of users are exact, with the engine's self-check off" in facts["headline"]
    assert any("rests on an assumption" in sentence for sentence in facts["words"])
    silent = {**facts, "headline": facts["headline"].partition(" ASSUMED")[0]}
    for one, holds in ((facts, True), (silent, False)):  # the standalone verifier asks for it, too
        assert standalone.Published.headline(SimpleNamespace(facts=one))[0] == holds  # type: ignore[arg-type]
    resumed = Loop()
    resumed.optimizer.load_state_dict(loop.optimizer.state_dict())
    assert resumed.optimizer.events() == loop.optimizer.events(), "a resumed run says it too"


def test_steps_of_two_samplers_are_two_events() -> None:
    loop = Loop()
    for batches in (loop.batches, dp.PoissonBatches(N, 0.1, 2)):
        for batch in batches:
            loop.whole(batch)
    assert [(event.repeats, event.sample_rate) for event in loop.optimizer.events()] == [(STEPS, Q), (2, 0.1)]  # type: ignore[attr-defined]


def test_a_sampler_that_was_resumed_without_its_optimizer_is_refused() -> None:
    """The steps before the crash were in nobody's ledger: 7 of 12 steps were priced."""
    loop, again = Loop(), Loop()
    for batch in loop.batches:
        loop.whole(batch)
        if batch.step == 4:
            break
    USED.clear()  # another process
    again.batches.load_state_dict(loop.batches.state_dict())
    with pytest.raises(ValueError, match="restore the states of sampler and optimizer together"):
        again.whole(again.batches.batch(5))
    assert again.optimizer.steps == 0


def test_draws_that_are_used_again_are_refused() -> None:
    """Twelve samples, each in two noisy sums, were priced as 24 samples: at σ = 0.5 that is far too little."""
    loop = Loop()
    start = loop.batches.state_dict()
    for batch in loop.batches:
        loop.whole(batch)
    other = Loop()
    other.batches.load_state_dict(start)
    with pytest.raises(ValueError, match="in another noisy sum already, and 12 steps of this sampler were taken"):
        other.whole(other.batches.batch(0))
    key = bytes(range(32))
    for number in range(2):  # two samplers with one key
        other = Loop()
        other.batches = dp.PoissonBatches(N, Q, STEPS, key=key)
        if number:
            with pytest.raises(ValueError, match="create a sampler with a new key"):
                other.whole(other.batches.batch(0))
        else:
            other.whole(other.batches.batch(0))


def test_a_run_may_be_repeated_with_all_of_its_keys() -> None:
    """A replay makes the same releases, so it is nothing new."""
    key, models = bytes(range(1, 33)), []
    for _ in range(2):
        loop = Loop(key=key)
        loop.batches = dp.PoissonBatches(N, Q, STEPS, key=key)
        for batch in loop.batches:
            loop.whole(batch)
        models.append(loop.model.weight.detach())
    assert torch.equal(*models)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_other_sums_are_no_repetition(rolled_back: bool) -> None:
    """With the same keys and other weights each draw was in two noisy sums, of which the events counted one."""
    key = bytes(range(2 + rolled_back, 34 + rolled_back))
    loop = Loop(key=key)
    loop.batches = dp.PoissonBatches(N, Q, STEPS, key=key)
    states = copy.deepcopy(loop.optimizer.state_dict()), loop.batches.state_dict()
    for batch in loop.batches:
        loop.whole(batch)
    again = loop
    if rolled_back:  # to the first step, with the weights of the last
        again.optimizer.load_state_dict(states[0])
        again.batches.load_state_dict(states[1])
    else:
        again = Loop(key=key)
        again.batches = dp.PoissonBatches(N, Q, STEPS, key=key)
        again.model.weight.data.add_(1.0)
    before = again.model.weight.detach().clone()
    with pytest.raises(ValueError, match="the draw of step 1 is in another noisy sum already"):
        again.whole(again.batches.batch(0))
    assert torch.equal(again.model.weight, before) and again.optimizer.steps == 0


@pytest.mark.parametrize("name", ["n", "sample_rate", "steps", "noise"])
def test_what_batches_are_drawn_with_cannot_be_assigned(name: str) -> None:
    """The rate was changed in the ledger, and the draws were as before."""
    loop = Loop()
    loop.whole(loop.batches.batch(0))
    with pytest.raises(AttributeError, match=f"{name} is fixed"):
        setattr(loop.batches, name, 0.001)
    loop.whole(loop.batches.batch(1))
    assert loop.optimizer.events() == (PoissonGaussian(1.0, Q, 2, label="training"),)


def test_a_resumed_run_goes_on_with_its_series() -> None:
    loop, again = Loop(), Loop()
    for batch in loop.batches:
        loop.whole(batch)
        if batch.step == 4:
            break
    again.optimizer.load_state_dict(loop.optimizer.state_dict())
    with pytest.raises(ValueError, match="restore the states of sampler and optimizer together"):
        forgotten = dp.PoissonBatches(N, Q, STEPS)
        forgotten.load_state_dict({**loop.batches.state_dict(), "step": 0, "taken": 0})
        again.whole(forgotten.batch(0))
    again.optimizer.zero_grad()
    again.batches.load_state_dict(loop.batches.state_dict())
    for batch in again.batches:
        again.whole(batch)
    assert again.optimizer.events() == (PoissonGaussian(1.0, Q, STEPS, label="training"),)


# σ, C and B, and the inner step.


@pytest.mark.parametrize("name", ["noise_multiplier", "clip_norm", "expected_batch_size", "noise", "assume_clipped"])
def test_what_is_accounted_for_cannot_be_assigned(name: str) -> None:
    """A schedule of σ from 0.5 to 3.1 was priced at its last value: 0.106 instead of more than 1.69."""
    optimizer = Loop().optimizer
    with pytest.raises(AttributeError, match=f"{name} is fixed.*for a schedule create another PrivateOptimizer"):
        setattr(optimizer, name, 3.1)
    with pytest.raises(AttributeError):
        optimizer.steps = 0  # type: ignore[misc]


def test_a_schedule_of_noise_is_an_optimizer_each() -> None:
    loop, events = Loop(noise_multiplier=0.5), []
    for batch in loop.batches:
        if batch.step == 6:
            events += loop.optimizer.events()
            loop.optimizer = dp.PrivateOptimizer(
                loop.inner, noise_multiplier=3.1, clip_norm=1.0, expected_batch_size=Q * N
            )
        loop.whole(batch)
    events += loop.optimizer.events()
    assert events == [PoissonGaussian(0.5, Q, 6, label="training"), PoissonGaussian(3.1, Q, 6, label="training")]


def test_the_inner_optimizer_does_not_step_by_itself() -> None:
    """It moved the weights, and nobody counted."""
    loop = Loop()
    loop.add(loop.batches.batch(0)[:])
    before = loop.model.weight.detach().clone()
    with pytest.raises(RuntimeError, match="without noise and uncounted"):
        loop.inner.step()
    with pytest.raises(RuntimeError, match="without noise and uncounted"):
        loop.optimizer.inner.step()
    assert torch.equal(loop.model.weight, before)
    loop.optimizer.step(loop.batches.batch(0))
    assert loop.optimizer.steps == 1 and not torch.equal(loop.model.weight, before)


def test_a_step_that_fails_in_the_inner_optimizer_closes_the_door_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    handle = loop.inner.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.step(None)
    handle.remove()
    assert loop.optimizer.steps == 1
    with pytest.raises(RuntimeError, match="uncounted"):
        loop.inner.step()


def test_a_token_is_given_up_for_a_release_alone() -> None:
    """A step that was refused can be taken again."""
    loop, batch = Loop(), Batch(torch.tensor([1, 2]), 0, Loop().batches.origin, due := Due())
    loop.add(batch[:1])
    with pytest.raises(ValueError, match="hold 1 of them"):
        loop.optimizer.step(batch)
    assert due.step == 0 and loop.optimizer.steps == 0 and math.isfinite(float(loop.model.weight.detach().sum()))
    loop.add(batch[1:])
    loop.step(batch)
    assert due.step == 1 and loop.optimizer.steps == 1
