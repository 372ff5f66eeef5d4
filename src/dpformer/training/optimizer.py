"""The noisy step: noise on the sum, once; divide by the expected batch size; then any torch optimizer."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpformer.accounting.arguments import not_negative, positive, sample_rate_of, whole
from dpformer.accounting.events import ASSUMED, PoissonGaussian
from dpformer.clipping.bits import all_finite
from dpformer.clipping.bounded import Bound, bounds_of, joint_bound, sum_of
from dpformer.noise.fingerprint import Fingerprint
from dpformer.noise.mechanisms import INDEPENDENT, Noise, NoiseHistory, noise_of
from dpformer.noise.noisy_sums import Numbers, SecureRandom, in_turn, release_sums
from dpformer.sampling.poisson import PoissonBatches

SAVED = ("noise_multiplier", "clip_norm", "expected_batch_size")
ADDRESSING = 2  # how noise is found: a version that finds it otherwise would add other noise to a step taken again


class PrivateOptimizer(torch.optim.Optimizer):
    """Any torch optimizer, on the noisy mean of clipped gradients.

    A step releases, for every trainable parameter and once per logical batch, however many parts it was computed in,

        ĝ = (Σ_{u in batch} c_u·g_u + σ·C·N(0, I)) / B

    and hands it to the inner optimizer as `p.grad`. Before, `p.grad` must hold the *sum* of the users' clipped
    gradients, each of norm at most C over all parameters together; None counts as zero. `PhantomClipping` makes such
    sums and marks them: a gradient without its mark, or changed since, is refused (bounded.py).
    B is the *expected* batch size, public and in general no whole number: the realised one is private. An empty batch
    is a normal step.

    | here | paper |
    | --- | --- |
    | `noise_multiplier` | σ_dp |
    | `clip_norm` | C |
    | `expected_batch_size` | B |

    The noise of a step is a function of a secret key, the step, `context`, the arguments here and the weights at which
    the gradient was taken. So a run that is resumed repeats its noise exactly; and one that is resumed with anything
    changed that reached the weights, or under another `context`, gets other noise (noise that is used twice with
    different data can be subtracted). Sum and noise are added in float64 and rounded to a public grid (`public_grid`).

    Args:
        inner: the optimizer to step; its parameter groups and state stay its own.
        noise_multiplier: σ; 0 means no noise and no privacy, and is marked so.
        clip_norm: C, what one user's contribution is bounded by.
        expected_batch_size: B = q·n.
        assume_clipped: take gradients from anywhere, on the caller's word that each user is bounded by C. `event` and
            `description` say that it was assumed.
        noise: with `Banded(b)`, N(0, I) is not independent from step to step but correlated over b of them: less in
            sums of steps. The batches must be those of one `PoissonBatches(noise=…)`, with the same noise, in order,
            one step each, the empty ones too; save both states after a step. It keeps b − 1 copies of the parameters
            in float64.
        context: names the data and the configuration, such as a hash: put in what a resumed run must agree on.
        key: 32 secret bytes, to share between processes that step alike; by default new ones.
        seed: for tests only: marks the noise as not private.
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
        # Not super().__init__: parameter groups, state and hooks are those of the inner optimizer.
        if isinstance(inner, PrivateOptimizer):
            raise ValueError("the inner optimizer is private already: noise would be added twice")
        self.inner = inner
        self.noise_multiplier = not_negative("noise_multiplier", noise_multiplier)
        self.clip_norm = positive("clip_norm", clip_norm)
        self.expected_batch_size = positive("expected_batch_size", expected_batch_size)
        self.assume_clipped = assume_clipped
        self.noise = noise
        if noise.correlated and not self.noise_multiplier:
            raise ValueError(f"{noise.choice}, and there is no noise that could be correlated: leave it out")
        self.steps = 0
        facts = [
            type(inner).__qualname__,
            repr(sorted(inner.defaults.items())),
            *map(str, self._settings().values()),
        ]
        self._random = SecureRandom("noise of the step", key=key, seed=seed).within(repr(facts)).within(context)
        self._fingerprint = Fingerprint(self._random)
        self._past = NoiseHistory(noise)

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Adds the noise, divides, steps the inner optimizer, counts. Nothing happens if a gradient is refused."""
        if closure is not None:
            raise ValueError("a private step takes no closure: evaluating it again would release the gradient again")
        parameters = self._parameters()
        marks: list[Bound | None] = bounds_of(parameters) if self._asks_for_bounds else [None] * len(parameters)
        self._check(parameters, marks)
        if self._asks_for_bounds:
            self._check_bounded(parameters, marks)
        self._past.check([tuple(real(p).shape) for p in parameters])
        self._past.add(self._release(parameters))
        self.steps += 1  # what is released is counted, even if the inner step then fails
        self.inner.step()

    def _parameters(self) -> list[Tensor]:
        """What the inner optimizer can move."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        return [parameter for parameter in every if parameter.requires_grad or parameter.grad is not None]

    @property
    def _asks_for_bounds(self) -> bool:
        """Without noise nothing is promised."""
        return self.noise_multiplier > 0 and not self.assume_clipped

    @staticmethod
    def _check(parameters: list[Tensor], marks: list[Bound | None]) -> None:
        """Refuses gradients to which noise cannot be added; the engine has looked at most of them already."""
        seen = [mark is not None and mark.finite for mark in marks]
        having = [
            (p, p.grad) for p, is_seen in zip(parameters, seen, strict=True) if p.grad is not None and not is_seen
        ]
        for parameter, gradient in having:
            if gradient.layout != torch.strided:
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse; noise is on all of it: "
                    "sparse=False"
                )
        if all_finite([real(gradient) for _, gradient in having]):
            return
        parameter = next(parameter for parameter, gradient in having if not all_finite([real(gradient)]))
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is not finite; a user who is not finite "
            "must be left out of the sum (PhantomClipping does so)"
        )

    def _check_bounded(self, parameters: list[Tensor], marks: list[Bound | None]) -> None:
        """Noise of σC hides a user only in a sum to which everybody adds at most C."""
        bound = joint_bound(parameters, marks)
        if bound > self.clip_norm:
            raise ValueError(
                f"gradients were clipped to {bound}, but the noise is for clip_norm={self.clip_norm}: use the same"
            )

    def _noise(self, parameters: list[Tensor]) -> Iterator[Numbers | None]:
        """The noise of each parameter, one after the other; independent noise is made only as it is added."""
        if not self.noise_multiplier:
            yield from [None] * len(parameters)
            return
        counts = [real(parameter).numel() for parameter in parameters]
        for place, numbers in enumerate(in_turn(self._address(parameters), self.steps, counts)):
            if self.noise.correlated:
                numbers = replace(numbers, ready=self._past.correlated(numbers.all(), place))
            yield numbers

    def _address(self, parameters: list[Tensor]) -> SecureRandom:
        """The noise to be added at these weights."""
        return self._random.within(self._fingerprint(map(real, parameters)))

    def _release(self, parameters: list[Tensor]) -> list[Tensor]:
        """p.grad ← (p.grad + σC·noise) / B, in float64, rounded to a public grid before the division.

        Gives correlated noise back, to be remembered; independent noise is never held.
        """
        latest: list[Tensor] = []
        copied: list[tuple[Tensor, Tensor]] = []  # sums that are not the gradient itself
        later: list[tuple[Tensor, Numbers]] = []  # small ones are released together
        for parameter, numbers in zip(parameters, self._noise(parameters), strict=True):
            whole = sum_of(parameter)
            if parameter.grad is None or whole is None:
                parameter.grad = whole = torch.zeros_like(parameter)
            elif whole is parameter.grad and 0 in whole.stride():  # expanded: one place in memory for many numbers
                parameter.grad = whole = whole.clone(memory_format=torch.contiguous_format)
            flat = real(whole).reshape(-1)
            if whole is not parameter.grad or not whole.is_contiguous():
                copied.append((real(parameter.grad), flat))
            if numbers is None:
                flat.div_(self.expected_batch_size)
            elif numbers.ready is None:
                later.append((flat, numbers))
            else:
                release_sums([(flat, numbers)], self.noise_std, self.expected_batch_size)
            if self.noise.correlated and numbers is not None:
                latest.append(numbers.all().view(real(parameter).shape))
        if later:
            release_sums(later, self.noise_std, self.expected_batch_size)
        for gradient, flat in copied:
            gradient.copy_(flat.view(gradient.shape))
        return latest

    # What can be asked.

    @property
    def noise_std(self) -> float:
        """σ·C: the deviation of the noise on the sum."""
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
        assumed = f" ({ASSUMED})" if self.assume_clipped else ""
        kind = f" ({self.noise.name})" if self.noise.correlated else ""
        noise = f"Gaussian noise of {self.noise_multiplier:g} times the clip norm on every sum{kind}{assumed}"
        return f"{noise}, {self._random.description}"

    def event(self, batches: PoissonBatches | float, label: str = "training") -> PoissonGaussian:
        """The steps taken so far, for a `Ledger`: of these batches, or of Poisson samples at this rate.

        Correlated noise protects only users who take turns, so with it the batches have to be shown, and every step
        must have been one of them.
        """
        if not isinstance(batches, PoissonBatches):
            rate, private, drawn_for = sample_rate_of(batches), self.private, noise_of({})
        else:
            rate, private, drawn_for = batches.sample_rate, self.private and batches.private, batches.noise
        if drawn_for != self.noise:
            raise ValueError(
                f"the steps have {self.noise.name}, and users were drawn for {drawn_for.name}: give PoissonBatches and "
                "PrivateOptimizer the same noise, and the batches to event()"
            )
        if self.noise.groups > 1 and isinstance(batches, PoissonBatches) and not batches.goes_with(self.steps):
            raise ValueError(
                f"{self.steps} steps were taken, and {batches.step} of {batches.steps} batches given out: with "
                f"{self.noise.name} each batch, an empty one too, is one step, and one PoissonBatches lasts for all of "
                "training"
            )
        if self.assume_clipped:
            label = f"{label} ({ASSUMED})"
        return self.noise.event(self.noise_multiplier, rate, self.steps, label=label, private=private)

    # An optimizer in all else: the inner one's groups, state and hooks.

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
        counted = {"steps": self.steps, "random": self._random.state_dict(), "addressing": ADDRESSING}
        return {"inner": self.inner.state_dict(), **self._settings(), **past, **counted}

    def _settings(self) -> dict[str, Any]:
        """What the counted steps were taken with."""
        return {**{name: getattr(self, name) for name in SAVED}, **self.noise.settings()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the other left off. σ, C, B and the mechanism must be those of the counted steps."""
        expected = {"inner", "steps", "random", *self._settings(), *(["past"] if self.noise.correlated else [])}
        if set(state) == expected or state.get("addressing", ADDRESSING) != ADDRESSING:
            raise ValueError(
                "this state was saved by another version of dpformer, which finds the noise of a step otherwise: go on "
                "with that version"
            )
        expected.add("addressing")
        if set(state) != expected:
            raise ValueError(f"a private optimizer's state has the keys {sorted(expected)}, not {sorted(state)}")
        for name, value in self._settings().items():
            if state[name] != value:
                raise ValueError(f"{name} was {state[name]} when this state was saved, now it is {value}")
        steps, random = whole("steps", state["steps"], 0), self._random.with_state(state["random"])
        past = NoiseHistory(self.noise)
        past.load(state.get("past", []), steps)
        self.inner.load_state_dict(state["inner"])
        self._past = past
        self.steps, self._random, self._fingerprint = steps, random, Fingerprint(random)


def real(t: Tensor) -> Tensor:
    """The real numbers of a tensor: a complex one has two for each, and the same length."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
