"""The noisy step: add noise to the sum, once; divide by the expected batch size; apply any torch optimizer."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from dpformer import compat
from dpformer.accounting.arguments import not_negative, positive
from dpformer.accounting.events import ASSUMED_CLIPPED, Event
from dpformer.clipping.bounded_sum import (
    Addend,
    Addends,
    Bound,
    addends_of,
    bounds_of,
    check_users,
    joint_bound,
    sum_of,
)
from dpformer.kernels.checksum import all_finite
from dpformer.noise.fingerprint import Fingerprint
from dpformer.noise.mechanisms import INDEPENDENT, Noise, NoiseHistory
from dpformer.noise.noisy_sums import Numbers, SecureRandom, fill_in_turn, in_turn, release_sums
from dpformer.sampling.batch import Batch
from dpformer.training.inner_step import only_private
from dpformer.training.steps_taken import StepsTaken

SAVED = ("noise_multiplier", "clip_norm", "expected_batch_size")
FIXED = {*SAVED, "inner", "noise", "assume_clipped"}  # settings of the counted steps
ADDRESSING = 3  # how noise is addressed: a version that differs would add other noise to a repeated step


class PrivateOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, applied to the noisy mean of clipped gradients.

    A step releases, for every trainable parameter and once per logical batch, regardless of micro-batches,

        ĝ = (Σ_{u in batch} c_u·g_u + σ·C·N(0, I)) / B

    and passes it to the inner optimizer as `p.grad`. Before, `p.grad` must hold the *sum* of the users' clipped
    gradients, each of norm at most C over all parameters together; None counts as zero. `PhantomClipping` makes such
    sums and marks them: a gradient without its mark, or changed since, is refused (clipping/bounded_sum.py).
    B is the *expected* batch size, public and in general not an integer: the actual size is private. An empty batch
    is a normal step.

    `step(batch)` checks that the sum holds exactly the users of a batch of `PoissonBatches`, each once, and takes one
    step per batch, in order. Only such steps are accounted for as Poisson samples (`events`). A step without a batch
    claims nothing about its users.

    | here | paper |
    | --- | --- |
    | `noise_multiplier` | σ_dp |
    | `clip_norm` | C |
    | `expected_batch_size` | B |

    The noise of a step is a function of a secret key, the step, the arguments here and every bit of the sum to which it
    is added. So a resumed run repeats its noise exactly, and one that is resumed on other data gets other noise as
    soon as a sum differs: noise on two different sums could be subtracted. (RFC 6979 does the same for signatures.) Sum
    and noise are added in float64 and rounded to a public grid (`public_grid`).

    Args:
        inner: the optimizer to step; it keeps its parameter groups and state.
        noise_multiplier: σ; 0 means no noise and no privacy, and is marked as such.
        clip_norm: C, the bound on one user's contribution.
        expected_batch_size: B = q·n.
        assume_clipped: accept gradients from anywhere; the caller vouches that each user of the step's batch is in
            them once and bounded by C. `events` and `description` say that this was assumed.
        noise: with `Banded(b)`, N(0, I) is not independent from step to step but correlated over b of them: less in
            sums of steps. The batches must be those of one `PoissonBatches(noise=…)`, with the same noise; save both
            states after a step. It keeps b − 1 copies of the parameters in float64.
        context: further text on which the noise depends; privacy does not require any.
        key: 32 secret bytes, to be shared between processes that take the same steps; by default new ones.
        seed: for tests only: marks the noise as not private.

    σ, C and B cannot be changed: for a schedule create another optimizer around the same `inner`, and add up the events
    of both. `inner` may step only inside a private step. Other changes of the weights are not detected.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        *,
        noise_multiplier: float,
        clip_norm: float,
        expected_batch_size: float,
        assume_clipped: bool = False,
        noise: Noise = INDEPENDENT,
        context: str = "",
        key: bytes | None = None,
        seed: int | None = None,
    ) -> None:
        # Not super().__init__: parameter groups, state and hooks belong to the inner optimizer.
        if isinstance(inner, PrivateOptimizer):
            raise ValueError("the inner optimizer is already private: noise would be added twice")
        only_private(inner)
        self.inner = inner
        self.noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        self.clip_norm = positive("clip_norm", clip_norm)
        self.expected_batch_size = positive("expected_batch_size", expected_batch_size)
        self.assume_clipped = assume_clipped
        self.noise = noise
        if noise.correlated and not self.noise_multiplier:
            raise ValueError(f"{noise.choice}, but there is no noise to correlate: omit it")
        facts = [
            type(inner).__qualname__,
            repr(sorted(inner.defaults.items())),
            *map(str, self._settings().values()),
        ]
        self._random = SecureRandom("noise of the step", key=key, seed=seed).within(repr(facts)).within(context)
        self._taken = StepsTaken(noise)
        self._fingerprint = Fingerprint(self._random)
        self._past = NoiseHistory(noise)

    # The step.

    @torch.no_grad()
    def step(self, batch: Batch | None = None) -> None:  # type: ignore[override]
        """Add the noise, divide, step the inner optimizer, count. Nothing happens if a gradient is refused.

        Args:
            batch: a batch of `PoissonBatches`, whose users are in the gradients; None claims no sampling.
        """
        refuse_other(batch)
        self._check_due(batch)
        parameters = self._parameters()
        marks: list[Bound | None] = bounds_of(parameters) if self._asks_for_bounds else [None] * len(parameters)
        finite = self._check(parameters, marks)
        held: Addends = ()
        if self._asks_for_bounds:
            self._check_bounded(parameters, marks)
            held = addends_of(parameters, marks)
            self._check_users(held, batch)
        self._past.check([tuple(real(p).shape) for p in parameters])
        self._release(parameters, finite, batch)
        self._finish(batch, held)

    def _check_users(self, held: Sequence[Addend], batch: Batch | None) -> None:
        """Refuse a sum that does not belong to the batch."""
        check_users(held, batch)

    def _check_due(self, batch: Batch | None) -> None:
        """Refuse a batch whose step is not the next one."""
        if batch is not None:
            batch.check_due()
        self._taken.check(batch)

    def _finish(self, batch: Batch | None, held: Sequence[Addend]) -> None:
        """Count the step and move the weights: a release is counted even if the inner step then fails."""
        self._taken.count(batch, all(addend.self_checked for addend in held))
        with only_private(self.inner):
            self.inner.step()

    def _parameters(self) -> list[Tensor]:
        """The parameters that the inner optimizer can move."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        return [parameter for parameter in every if parameter.requires_grad or parameter.grad is not None]

    @property
    def _asks_for_bounds(self) -> bool:
        """Whether gradients need a bound: without noise there is no guarantee anyway."""
        return self.noise_multiplier > 0 and not self.assume_clipped

    @staticmethod
    def _check(parameters: list[Tensor], marks: list[Bound | None]) -> Tensor | None:
        """Refuse gradients to which noise cannot be added; most were already checked by the engine.

        Returns whether all gradients on a device are finite, () there, which is read before anything is released.
        """
        seen = [mark is not None and mark.finite for mark in marks]
        having = [
            (p, p.grad) for p, is_seen in zip(parameters, seen, strict=True) if p.grad is not None and not is_seen
        ]
        for parameter, gradient in having:
            if gradient.layout != torch.strided:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, but noise is added to "
                    "every entry: sparse=False"
                )
        if not all_finite([real(gradient) for _, gradient in having if gradient.is_cpu]):
            raise not_finite(parameters)
        return finite_on_device([real(gradient) for _, gradient in having if not gradient.is_cpu])

    def _check_bounded(self, parameters: list[Tensor], marks: list[Bound | None]) -> None:
        """Noise of σC hides a user only in a sum to which each user adds at most C."""
        bound = joint_bound(parameters, marks)
        if bound > self.clip_norm:
            raise ValueError(
                f"gradients were clipped to {bound}, but the noise is for clip_norm={self.clip_norm}: use the same "
                "value"
            )

    def _noise(self, sums: list[Tensor], address: SecureRandom) -> list[Numbers]:
        """The noise of each sum; independent noise is generated only when it is added.

        Args:
            sums: to which it will be added.
            address: their random numbers.
        """
        counts = [real(one).numel() for one in sums]
        every = list(in_turn(address, self.steps, counts))
        if not self.noise.correlated:
            return every
        flat = torch.empty(sum(counts), dtype=torch.float64, device=place_of_noise(sums))
        fill_in_turn(flat, every)
        parts = self._past.correlated(flat)
        return [replace(numbers, ready=part) for numbers, part in zip(every, parts, strict=True)]

    def _address(self, sums: list[Tensor], finite: Tensor | None = None) -> SecureRandom:
        """The random numbers for the noise on exactly these sums, which are refused if they are not finite."""
        fingerprint, is_finite = self._fingerprint.read(map(real, sums), finite)
        if not is_finite:
            raise not_finite(self._parameters())
        return self._random.within(fingerprint)

    def _release(self, parameters: list[Tensor], finite: Tensor | None, batch: Batch | None) -> None:
        """p.grad ← (p.grad + σC·noise) / B, in float64, rounded to a public grid before the division."""
        sums = [summed(parameter) for parameter in parameters]
        copied: list[tuple[Tensor, Tensor]] = []  # gradients and sums that are separate from them
        flats = [real(whole).reshape(-1) for whole in sums]
        for parameter, whole, flat in zip(parameters, sums, flats, strict=True):
            if whole is not parameter.grad or not whole.is_contiguous():
                gradient = real(cast(Tensor, parameter.grad))
                copied.append((gradient, flat.view(gradient.shape)))
        if self.noise_multiplier:
            address = self._address(sums, finite)
            self._taken.bind(batch, address.identity)
            noise = self._noise(sums, address)
            release_sums(zip(flats, noise, strict=True), self.noise_std, self.expected_batch_size)
        elif finite is not None and not bool(finite):
            raise not_finite(parameters)
        elif flats:
            compat.divide_all(flats, self.expected_batch_size)
        if copied:
            gradients, released = zip(*copied, strict=True)
            compat.copy_all(list(gradients), list(released))

    # Properties.

    @property
    def noise_std(self) -> float:
        """σ·C: the standard deviation of the noise on the sum."""
        return self.noise_multiplier * self.clip_norm

    @property
    def private(self) -> bool:
        """False with a seed or without noise."""
        return self._random.private and self.noise_multiplier > 0

    @property
    def description(self) -> str:
        """One sentence for privacy statements."""
        if not self.noise_multiplier:
            return "no noise: NOT private"
        assumed = f" ({ASSUMED_CLIPPED})" if self.assume_clipped else ""
        kind = f" ({self.noise.name})" if self.noise.correlated else ""
        noise = f"Gaussian noise of {self.noise_multiplier:g} times the clip norm on every sum{kind}{assumed}"
        return f"{noise}, {self._random.description}"

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self._taken.total

    def events(self, sample_rate: float | None = None, *, label: str = "training") -> tuple[Event, ...]:
        """The steps taken so far, for a `Ledger`: one event per sampler, and one for steps without a batch.

        Args:
            sample_rate: the probability that a user was in a step without a batch, as vouched for by the caller; the
                event
                says that it is assumed. By default those steps are accounted for as if all users had been in them.
            label: purpose, for the ledger.
        """
        if sample_rate is not None and not isinstance(sample_rate, float | int):
            raise ValueError(
                f"events() needs no {type(sample_rate).__name__}: the optimizer knows the samplers of its steps: pass "
                "the batch to each step, `optimizer.step(batch)`"
            )
        assumed = ASSUMED_CLIPPED if self.assume_clipped else ""
        return self._taken.events(
            self.noise_multiplier, sample_rate, label=label, assumed=assumed, private=self.private
        )

    def event(self, sample_rate: float | None = None, *, label: str = "training") -> Event:
        """The single event of all steps; see `events`."""
        found = self.events(sample_rate, label=label)
        if len(found) != 1:
            raise ValueError(
                f"the {self.steps} steps are {len(found)} events, not one: use `Ledger(optimizer.events())`"
            )
        return found[0]

    # Otherwise an optimizer with the inner one's groups, state and hooks.

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIXED and name in self.__dict__:
            raise AttributeError(
                f"{name} is fixed, since all steps are accounted for with it: for a schedule create another "
                "PrivateOptimizer around the same inner optimizer, continue with it, and add up the events of both"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not yet set
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:g}" for name, value in self._settings().items())
        return f"PrivateOptimizer({values})\n{self.inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("copying a private optimizer would use its noise twice; use state_dict() to resume")

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The inner state, the count and the secret key: keep it private. For `torch.load(weights_only=True)`."""
        past = {"past": self._past.state()} if self.noise.correlated else {}
        counted = {
            "steps": self.steps,
            **self._taken.state(),
            "random": self._random.state_dict(),
            "addressing": ADDRESSING,
        }
        return {"inner": self.inner.state_dict(), **self._settings(), **past, **counted}

    def _settings(self) -> dict[str, Any]:
        """The settings of the counted steps."""
        return {**{name: getattr(self, name) for name in SAVED}, **self.noise.settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state. σ, C, B and the mechanism must be those of the counted steps."""
        if "random" in state and state.get("addressing") != ADDRESSING:
            raise ValueError(
                "this state was saved by another version of dpformer, which addresses noise differently: resume with "
                "that version"
            )
        expected = set(PrivateOptimizer.state_dict(self)) - {"unchecked"}
        if set(state) - {"unchecked"} != expected:
            raise ValueError(f"a private optimizer's state has the keys {sorted(expected)}, not {sorted(state)}")
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(f"{name} was {state[name]} when this state was saved, now it is {value}")
        random = self._random.with_state(state["random"])
        counted: dict[str, Any] = {name: state[name] for name in ("sampled", "unsampled", "unchecked") if name in state}
        taken = StepsTaken.load(self.noise, counted)
        if state["steps"] != taken.total:
            raise ValueError(f"steps was {state['steps']} when this state was saved, but {taken.total} are counted")
        past = NoiseHistory(self.noise)
        past.load(state.get("past", []), taken.total)
        self.inner.load_state_dict(state["inner"])
        self._past, self._taken = past, taken
        self._random, self._fingerprint = random, Fingerprint(random)


def refuse_other(batch: object) -> None:
    """Refuse anything but a batch or None."""
    if callable(batch):
        raise ValueError("a private step takes no closure: evaluating it again would release the gradient again")
    if batch is not None and not isinstance(batch, Batch):
        raise ValueError(
            f"a step takes a batch yielded by PoissonBatches, not {type(batch).__name__}: only it knows who was drawn"
        )


def finite_on_device(gradients: list[Tensor]) -> Tensor | None:
    """() bool, on their device: whether all numbers are finite, in few launches; None if there are none."""
    gradients = [gradient for gradient in gradients if gradient.numel()]
    if not gradients:
        return None
    return torch.stack(compat.norms_of_all(gradients, math.inf)).isfinite().all()  # NaN if one is


def not_finite(parameters: list[Tensor]) -> ValueError:
    """The refusal, which names the first parameter that is to blame."""
    parameter = next(p for p in parameters if p.grad is not None and not all_finite([real(p.grad)]))
    return ValueError(
        f"the gradient of a parameter of shape {tuple(parameter.shape)} is not finite; a user who is not finite must "
        "be removed from the sum (as PhantomClipping does)"
    )


def place_of_noise(sums: list[Tensor]) -> torch.device:
    """The device of the sums, where noise is made; the CPU if that lacks float64 (MPS), or if they are on several."""
    devices = {one.device for one in sums}
    return devices.pop() if len(devices) == 1 and not any(d.type == "mps" for d in devices) else torch.device("cpu")


def summed(parameter: Tensor) -> Tensor:
    """The sum that a step releases for a parameter; None, in `p.grad`, becomes zero."""
    whole = sum_of(parameter)
    if parameter.grad is None or whole is None:
        parameter.grad = whole = torch.zeros_like(parameter)
    elif whole is parameter.grad and 0 in whole.stride():  # expanded: many entries share memory
        parameter.grad = whole = whole.clone(memory_format=torch.contiguous_format)
    return whole


def real(t: Tensor) -> Tensor:
    """A view of a tensor as real numbers, two per complex entry."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
