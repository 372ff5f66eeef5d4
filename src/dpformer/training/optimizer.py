"""The noisy step: noise on the sum, once; divide by the expected batch size; then any torch optimizer."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.bounded import joint_bound, sum_of
from dpformer.privacy.arguments import bands_of, not_negative, positive, sample_rate_of, whole
from dpformer.privacy.banded import coefficients
from dpformer.privacy.events import ASSUMED, PoissonGaussian, training_event
from dpformer.privacy.fingerprint import Fingerprint
from dpformer.privacy.noise import AHEAD, NoiseAhead, Numbers, SecureRandom, release_sum
from dpformer.privacy.sampling import PoissonBatches

SAVED = ("noise_multiplier", "clip_norm", "expected_batch_size")


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
        bands: with more than one, N(0, I) is not independent from step to step but correlated over as many (banded.py):
            less noise in sums of steps. The batches must be those of one `PoissonBatches(bands=…)`, with as many, in
            order, one step each, the empty ones too; save both states after a step. It keeps bands − 1 copies of the
            parameters in float64.
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
        bands: int = 1,
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
        self.bands = bands_of(bands)
        if self.bands > 1 and not self.noise_multiplier:
            raise ValueError(f"bands is {bands}, and there is no noise that could be correlated: leave it out")
        self.steps = 0
        facts = [
            type(inner).__qualname__,
            repr(sorted(inner.defaults.items())),
            *map(str, map(self.__dict__.get, self._saved)),
        ]
        self._random = SecureRandom("noise of the step", key=key, seed=seed).within(repr(facts)).within(context)
        self._fingerprint = Fingerprint(self._random)
        self._ahead = NoiseAhead()
        self._weights = coefficients(self.bands).tolist()
        self._past: deque[list[Tensor]] = deque(maxlen=self.bands - 1)  # the noise of the last steps, the latest first

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Adds the noise, divides, steps the inner optimizer, counts. Nothing happens if a gradient is refused."""
        if closure is not None:
            raise ValueError("a private step takes no closure: evaluating it again would release the gradient again")
        parameters = self._parameters()
        for parameter in parameters:
            self._check(parameter)
        self._check_bounded(parameters)
        self._check_past(parameters)
        latest: list[Tensor] = []
        for parameter, numbers in zip(parameters, self._noise(parameters), strict=True):
            self._release(parameter, numbers)
            if self.bands > 1 and numbers is not None:
                latest.append(numbers.all().view(parameter.shape))
        self._past.appendleft(latest)
        self.steps += 1  # what is released is counted, even if the inner step then fails
        self.inner.step()
        sizes = [p.numel() for p in parameters]
        here = all(p.device.type == "cpu" for p in parameters)  # elsewhere it would have to be copied
        if self.noise_multiplier and here and sum(sizes) <= AHEAD:
            self._ahead.prepare(self._address(parameters), self.steps, sizes)

    def _parameters(self) -> list[Tensor]:
        """What the inner optimizer can move."""
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        return [parameter for parameter in every if parameter.requires_grad or parameter.grad is not None]

    def _check(self, parameter: Tensor) -> None:
        shape, gradient = tuple(parameter.shape), parameter.grad
        if parameter.is_complex():
            raise ValueError(f"a parameter of shape {shape} is complex; noise is defined for real ones only")
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise ValueError(
                f"the gradient of a parameter of shape {shape} is sparse; noise is on all of it: sparse=False"
            )
        if not bool(torch.isfinite(gradient).all()):
            raise ValueError(
                f"the gradient of a parameter of shape {shape} is not finite; a user who is not finite must be left "
                "out of the sum (PhantomClipping does so)"
            )

    def _check_bounded(self, parameters: list[Tensor]) -> None:
        """Noise of σC hides a user only in a sum to which everybody adds at most C."""
        if not self.noise_multiplier or self.assume_clipped:  # without noise nothing is promised
            return
        bound = joint_bound(parameters)
        if bound > self.clip_norm:
            raise ValueError(
                f"gradients were clipped to {bound}, but the noise is for clip_norm={self.clip_norm}: use the same"
            )

    def _noise(self, parameters: list[Tensor]) -> Iterator[Numbers | None]:
        """The noise of each parameter, one after the other; independent noise is made only as it is added."""
        if not self.noise_multiplier:
            yield from [None] * len(parameters)
            return
        taken = self._ahead.take(self._address(parameters), self.steps, [p.numel() for p in parameters])
        for place, numbers in enumerate(taken):
            yield numbers if self.bands == 1 else replace(numbers, ready=self._correlated(numbers.all(), place))

    def _correlated(self, noise: Tensor, place: int) -> Tensor:
        """The noise of this step, from independent numbers and the noise of the steps before (banded.py)."""
        for weight, past in zip(self._weights[1:], self._past, strict=False):  # in the first steps there are fewer
            noise.sub_(past[place].view(-1), alpha=weight)
        return noise.div_(self._weights[0])

    def _check_past(self, parameters: list[Tensor]) -> None:
        """Noise can be taken back only where it was added."""
        shapes = [tuple(p.shape) for p in parameters]
        if any([tuple(noise.shape) for noise in step] != shapes for step in self._past):
            raise ValueError(
                f"with bands={self.bands} the same parameters must be trained in every step, and they have changed"
            )

    def _address(self, parameters: list[Tensor]) -> SecureRandom:
        """The noise to be added at these weights."""
        return self._random.within(self._fingerprint(parameters))

    def _release(self, parameter: Tensor, numbers: Numbers | None) -> None:
        """p.grad ← (p.grad + σC·noise) / B, in float64, rounded to a public grid before the division."""
        whole = sum_of(parameter)
        if parameter.grad is None or whole is None:
            parameter.grad = whole = torch.zeros_like(parameter)
        sums = whole.reshape(-1)
        if numbers is None:
            sums.div_(self.expected_batch_size)
        else:
            release_sum(sums, numbers, self.noise_std, self.expected_batch_size)
        if whole is not parameter.grad or not whole.is_contiguous():  # else `sums` is a view of it
            parameter.grad.copy_(sums.view(parameter.shape))

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
        over = "every sum" if self.bands == 1 else f"every sum, correlated over {self.bands} steps"
        noise = f"Gaussian noise of {self.noise_multiplier:g} times the clip norm on {over}{assumed}"
        return f"{noise}, {self._random.description}"

    def event(self, batches: PoissonBatches | float, label: str = "training") -> PoissonGaussian:
        """The steps taken so far, for a `Ledger`: of these batches, or of Poisson samples at this rate.

        Correlated noise protects only users who take turns, so with bands it has to be shown the batches, and every
        step must have been one of them.
        """
        if not isinstance(batches, PoissonBatches):
            rate, turns, private = sample_rate_of(batches), 1, self.private
        else:
            rate, turns, private = batches.sample_rate, batches.bands, self.private and batches.private
        if turns != self.bands:
            raise ValueError(
                f"noise is correlated over {self.bands} steps, and users take turns in {turns}: give PoissonBatches "
                "and PrivateOptimizer the same bands, and the batches to event()"
            )
        if self.bands > 1 and isinstance(batches, PoissonBatches) and not batches.goes_with(self.steps):
            raise ValueError(
                f"{self.steps} steps were taken, and {batches.step} of {batches.steps} batches given out: with bands "
                "each batch, an empty one too, is one step, and one PoissonBatches lasts for all of training"
            )
        if self.assume_clipped:
            label = f"{label} ({ASSUMED})"
        return training_event(self.noise_multiplier, rate, self.steps, self.bands, label=label, private=private)

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
        values = ", ".join(f"{name}={getattr(self, name):g}" for name in self._saved)
        return f"PrivateOptimizer({values})\n{self.inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("copying a private optimizer would use its noise twice; use state_dict() to resume")

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The inner state, the count and the secret key: keep it private. For `torch.load(weights_only=True)`."""
        saved: dict[str, Any] = {name: getattr(self, name) for name in self._saved}
        if self.bands > 1:
            saved["past"] = [list(step) for step in self._past]
        return {"inner": self.inner.state_dict(), **saved, "steps": self.steps, "random": self._random.state_dict()}

    @property
    def _saved(self) -> tuple[str, ...]:
        return SAVED if self.bands == 1 else (*SAVED, "bands")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the other left off. σ, C, B and bands must be the same: counted steps were taken with them."""
        expected = {"inner", "steps", "random", *self._saved, *(["past"] if self.bands > 1 else [])}
        if set(state) != expected:
            raise ValueError(f"a private optimizer's state has the keys {sorted(expected)}, not {sorted(state)}")
        for name in self._saved:
            if state[name] != getattr(self, name):
                raise ValueError(f"{name} was {state[name]} when this state was saved, now it is {getattr(self, name)}")
        steps, random = whole("steps", state["steps"], 0), self._random.with_state(state["random"])
        past = [[noise.to("cpu", torch.float64) for noise in step] for step in state.get("past", [])]
        if not all(bool(noise.isfinite().all()) for step in past for noise in step):
            raise ValueError("the noise of past steps that was saved is not finite")
        if len(past) != min(steps, self.bands - 1):
            raise ValueError(f"after {steps} steps with bands={self.bands}, noise of {len(past)} steps was saved")
        self.inner.load_state_dict(state["inner"])
        self._past.clear()
        self._past.extend(past)
        self.steps, self._random, self._fingerprint = steps, random, Fingerprint(random)
