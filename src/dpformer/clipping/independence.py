"""Whether a user's loss is its own: alone, in half the batch and in the whole batch it is the same number.

The engine compares gradients with autograd, and autograd itself cannot know that a *number* in a user's loss came from
others: detached negatives of the batch, inputs standardised or padded over it, losses weighted by their median, the
hardest half, mixup, a queue of past users. All of that shows when a user is computed without the others.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpformer.clipping.equal_chances import EqualChances, generators_kept
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.graph import leaves
from dpformer.clipping.registered import registered
from dpformer.clipping.state import State

EVERY = 128  # calls from one random check to the next, on average
ALONE = 4  # users who are computed alone each time; in halves of the batch it is all of them
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_GRADIENT_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}
_HALF_PRECISION, _SHORT_PRODUCTS = 5e-2, 1e-2

LossesOf = Callable[[Any], Tensor]


def check(losses_of: LossesOf, users: Any) -> Check:
    """Stops with `UnsupportedUse` if the loss or the gradient of a user depends on other users, or on past ones.

    Args:
        losses_of: raw samples of some users → their losses, shape (B,), with all that happens in between: collating,
            padding, normalising, the model, the loss. It is called several times.
        users: at least two users, as `losses_of` takes them: a list of samples, a tensor or array whose rows are users
            (their indices, for instance), a tuple of tensors, or a dict of them.

    Returns a `Check`: call it with the users of every part of a batch, and it does the same again at random times. So
    mixing that begins later is found, on average after 128 calls.

    It is done in the mode the model is in, without dropout and with random numbers that are the same for all users
    (equal_chances.py). What is not checked: what happens before `losses_of`, code that runs only for other users than
    those given, a difference in the losses below 10⁻⁴ of them in float32 (10⁻⁹ in float64, 5 % in half precision).
    """
    checking = Check(losses_of)
    checking.now(users)
    return checking


@dataclass
class Check:
    """Looks at users again, at random times that nobody can foresee."""

    losses_of: LossesOf
    _random: random.Random = field(default_factory=random.SystemRandom, repr=False)

    def __call__(self, users: Any) -> None:
        """Once in 128 calls on average: the check, on these users. Nothing with fewer than two of them."""
        if self._random.randrange(EVERY) == 0 and _count(users) > 1:
            self.now(users)

    def now(self, users: Any) -> None:
        """The check, on these users."""
        count = _count(users)
        if count < 2:
            raise ValueError(
                f"a check compares a user alone with a user among others: give it two or more, not {count}"
            )
        states = [(module, State(registered(module))) for module in _modules_of(self.losses_of)]
        with generators_kept():
            _Comparison(self.losses_of, users, count, self._random).run()
        for module, state in states:
            state.compare(registered(module), lambda _: False)


class _Comparison:
    """One check: the same users, in different company."""

    def __init__(self, losses_of: LossesOf, users: Any, count: int, chance: random.Random) -> None:
        self.losses_of, self.users, self.count = losses_of, users, count
        self.chances = EqualChances(chance.getrandbits(32))
        self.order = chance.sample(range(count), count)

    def run(self) -> None:
        everybody = list(range(self.count))
        with torch.no_grad():
            whole = self.losses(everybody)
            if not bool(whole.isfinite().any()):
                raise UnsupportedUse(f"none of the {self.count} losses is finite: nothing can be compared")
            middle = (self.count + 1) // 2
            halves = [self.order[:middle], self.order[middle:]] if self.count > 2 else []
            for some in [*halves, *([user] for user in self.order[:ALONE])]:
                self.compare(whole, self.losses(some), some)
            self.compare(whole, self.losses(everybody), everybody)
        finite = [user for user in self.order if bool(whole[user].isfinite())]
        self.compare_gradients(finite)

    def losses(self, users: list[int]) -> Tensor:
        with self.chances:
            out = self.losses_of(_take(self.users, users))
        if not isinstance(out, Tensor) or out.shape != (len(users),):
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else repr(type(out).__name__)
            raise ValueError(f"losses_of must give one loss a user, shape ({len(users)},), got {got}")
        return out

    @property
    def tolerance(self) -> float:
        if self.chances.half:
            return _HALF_PRECISION
        return 0.0 if torch.get_float32_matmul_precision() == "highest" else _SHORT_PRODUCTS

    def compare(self, whole: Tensor, losses: Tensor, users: list[int]) -> None:
        tolerance = max(self.tolerance, _TOLERANCE.get(whole.dtype, _HALF_PRECISION))
        known = whole[users].double()
        near = whole[whole.isfinite()].double().abs().mean()  # losses near 0 have fewer digits
        apart = (losses.double() - known).abs()
        allowed = tolerance * torch.maximum(known.abs(), 0.1 * near)
        wrong = ~((apart <= allowed) | (known.isnan() & losses.isnan()) | (known == losses))
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            company = "alone" if len(users) == 1 else f"with {len(users) - 1} of them"
            if len(users) == self.count:
                company = "among the same users a second time"
            raise UnsupportedUse(
                f"the loss of user {users[at]} is {float(known[at]):.6g} among {self.count} users and "
                f"{float(losses[at]):.6g} {company}: {_WHY}"
            )

    def compare_gradients(self, users: list[int]) -> None:
        """What the losses do not show: a backward pass that looks at other users."""
        user = users[0]
        among, alone = self.gradient(users), self.gradient([user])
        rough = self.tolerance > 0 or self.dtype not in _GRADIENT_TOLERANCE
        tolerance = 0.3 if rough else _GRADIENT_TOLERANCE[self.dtype]
        zero = torch.zeros(())
        # Other leaves are made anew in each call: inputs that `enable_input_require_grads` of transformers marks.
        shared = {k for k, (leaf, _) in (among | alone).items() if isinstance(leaf, nn.Parameter)} | (
            among.keys() & alone.keys()
        )
        first, second = ({k: found[k][1] for k in shared if k in found} for found in (among, alone))
        length = sum(_squared(g) for g in first.values()) ** 0.5
        apart = sum(_squared(first.get(k, zero) - second.get(k, zero)) for k in shared) ** 0.5
        if not apart <= tolerance * max(length, 1e-12):
            raise UnsupportedUse(
                f"the gradient of user {user} has the length {length:.6g} among {len(users)} users, and alone it is "
                f"{apart:.3g} away from that: {_WHY}"
            )

    def gradient(self, users: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        """Every tensor that the first user's loss depends on, and the gradient by it."""
        with torch.enable_grad():
            loss = self.losses(users)[0]
        self.dtype = loss.dtype
        if not loss.requires_grad:
            return {}
        parameters = leaves(loss)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return {id(p): (p, g) for p, g in zip(parameters, found, strict=True) if g is not None}


_WHY = (
    "a user's loss must depend on that user alone. Look for statistics, padding without a mask, negatives, rankings or "
    "weights taken over the batch, for mixup, for what the model remembers of past users; and for random numbers of "
    "numpy or Python drawn user by user (draw them with torch)"
)


def _squared(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2


def _count(users: Any) -> int:
    if isinstance(users, Mapping):
        return len(next(iter(users.values()), ()))
    return len(users[0]) if _is_columns(users) else len(users)


def _is_columns(users: Any) -> bool:
    """(x, y): a tuple of tensors, each with a row for every user."""
    return isinstance(users, tuple) and bool(users) and all(isinstance(t, Tensor) and t.ndim for t in users)


def _take(users: Any, which: Sequence[int]) -> Any:
    """Some of the users, in the form in which all were given."""
    if isinstance(users, Mapping):
        return {name: _take(values, which) for name, values in users.items()}
    if _is_columns(users):
        return tuple(values[list(which)] for values in users)
    if hasattr(users, "dtype") and hasattr(users, "shape"):  # a tensor or an array
        return users[list(which)]
    return [users[i] for i in which]


def _modules_of(function: Any) -> list[nn.Module]:
    """The models that a function speaks of by name, as far as Python can tell."""
    if isinstance(function, nn.Module):
        return [function]
    if isinstance(function, functools.partial):
        return [m for part in (function.func, *function.args, *function.keywords.values()) for m in _modules_of(part)]
    owner = getattr(function, "__self__", None)
    found = [owner, *getattr(owner, "__dict__", {}).values()]
    if inspect.isfunction(inspect.unwrap(function)):
        names = inspect.getclosurevars(function)
        found += [*names.nonlocals.values(), *names.globals.values()]
    return [value for value in found if isinstance(value, nn.Module)]
