"""Whether a user's loss is its own: alone, in half the batch and in the whole batch it is the same number.

The engine compares gradients with autograd, and autograd itself cannot know that a *number* in a user's loss came from
others: detached negatives of the batch, inputs standardised or padded over it, losses weighted by their median, the
hardest half, mixup, a queue of past users. All of that shows when a user is computed without the others.

Random numbers that are the same for every user, in every batch: to compare a user alone with a user among others.

Dropout draws other numbers for a user in a batch than for the same user alone, so their losses differ without anything
being wrong. Inside `EqualChances` a random function of torch gives one number for all entries of its result, a function
of the seed and of how many such functions were called before; dropout drops nothing. What a model does by chance for
all users alike (`if torch.rand(()) < 0.1:`) still happens. A permutation is a rotation, so that users who are paired by
chance (mixup) meet. Random numbers of Python and numpy are seeded alike before every call: a user gets the same ones
alone and among others only if they are not drawn user by user.

The states of all generators are put back afterwards: training goes on as if nothing had been drawn.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.clipping.model_state import State, registered
from dpformer.clipping.recording import leaves
from dpformer.compat import TorchDispatchMode
from dpformer.errors import UnsupportedUse

# -- random numbers ----------------------------------------------------------------------------------------------------


HALF = (torch.bfloat16, torch.float16)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Puts back the states of the global generators of torch, numpy and Python."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


class EqualChances(TorchDispatchMode):
    """One forward pass with these random numbers. `half` tells whether half precision was seen on the way."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.calls, self.half = seed, 0, False

    def __enter__(self) -> EqualChances:
        self.calls = 0
        self._seed()
        super().__enter__()
        return self

    def _seed(self) -> None:
        random.seed(self.seed + self.calls)
        np.random.seed((self.seed + self.calls) % 2**32)
        torch.manual_seed(self.seed + self.calls)

    def one_after_the_other(self) -> Callable[[], None]:
        """To be called before each of several users who are computed one after the other: each gets the same."""
        calls = self.calls

        def begin() -> None:
            self.calls = calls
            self._seed()

        return begin

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            out = self._draw(func, list(args), dict(kwargs))
        else:
            out = func(*args, **kwargs)
        self.half |= isinstance(out, Tensor) and out.dtype in HALF
        return out

    def _draw(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if _drops(name, named):  # not counted: fused layers drop in another number of calls than their parts do
            return _KEEPING[name](named)
        for off in ("dropout_p", "dropout"):  # fused kernels that drop inside
            if off in named:
                return func(**(named | {off: 0.0}))
        self.calls += 1
        chance = random.Random(f"{self.seed} {self.calls}").random()
        if name in _REPLACED:
            return _REPLACED[name](chance, named)
        if name in _FILLED:  # made as asked for, then every entry is the same
            out = func(*args, **kwargs)
            return out.fill_(_FILLED[name](chance, named)) if out.numel() else out
        torch.manual_seed(self.seed + self.calls)
        return func(*args, **kwargs)


def _normal(chance: float, mean: float = 0.0, std: float = 1.0) -> float:
    return mean + std * math.sqrt(2) * float(torch.erfinv(torch.tensor(1.98 * chance - 0.99)))


def _whole(chance: float, named: dict[str, Any]) -> int:
    low, high = named.get("low") or named.get("from") or 0, named.get("high") or named.get("to") or 2
    return int(low + chance * (high - low))


_FILLED: dict[str, Callable[[float, dict[str, Any]], float]] = {
    "rand": lambda chance, _: chance,
    "rand_like": lambda chance, _: chance,
    "uniform_": lambda chance, a: a.get("from", 0.0) + chance * (a.get("to", 1.0) - a.get("from", 0.0)),
    "randn": lambda chance, _: _normal(chance),
    "randn_like": lambda chance, _: _normal(chance),
    "normal_": lambda chance, a: _normal(chance, a.get("mean", 0.0), a.get("std", 1.0)),
    "exponential_": lambda chance, a: -math.log1p(-chance) / a.get("lambd", 1.0),
    "randint": _whole,
    "randint_like": _whole,
    "random_": _whole,
}


def _drops(name: str, a: dict[str, Any]) -> bool:
    """Whether it draws the mask of a dropout: with one probability for all, or all 64 bits (models/dropout.py)."""
    if name == "random_":
        return bool(a.get("from") == -(2**63) and a.get("to") is None)
    return (
        name == "native_dropout"
        or (name == "bernoulli_" and not isinstance(a.get("p"), Tensor))
        or (
            name == "bernoulli" and isinstance(a.get("p"), float)  # what vmap makes of it
        )
    )


_KEEPING: dict[str, Callable[[dict[str, Any]], Any]] = {
    "native_dropout": lambda a: (a["input"].clone(), torch.ones_like(a["input"], dtype=torch.bool)),
    "bernoulli_": lambda a: a["self"].fill_(1),
    "bernoulli": lambda a: torch.ones_like(a["self"]),
    "random_": lambda a: a["self"].fill_(int.from_bytes(bytes([0, 0x80] * 4), "little", signed=True)),  # four × −2¹⁵
}


def _bernoulli_(chance: float, a: dict[str, Any]) -> Tensor:
    """By chance, the same for all."""
    return a["self"].copy_((chance < a["p"]).to(a["self"].dtype))


def _bernoulli(chance: float, a: dict[str, Any]) -> Tensor:
    p = a.get("p", a["self"])
    return (chance < p).to(a["self"].dtype)


def _multinomial(chance: float, a: dict[str, Any]) -> Tensor:
    """Each row by its own numbers: the quantile, or the largest entries where none may come twice."""
    weights, count = a["self"].double(), a["num_samples"]
    if count > 1 and not a.get("replacement", False):
        return weights.topk(count, -1).indices
    reached = (weights.cumsum(-1) / weights.sum(-1, keepdim=True)) < chance
    place = reached.sum(-1, keepdim=True).clamp(max=weights.shape[-1] - 1)
    return place.expand(*place.shape[:-1], count).contiguous()


def _permutation(chance: float, a: dict[str, Any]) -> Tensor:
    options = {name: a[name] for name in ("dtype", "device") if a.get(name) is not None}
    return torch.arange(a["n"], **options).roll(1)


_REPLACED: dict[str, Callable[[float, dict[str, Any]], Any]] = {
    "bernoulli_": _bernoulli_,
    "bernoulli": _bernoulli,
    "multinomial": _multinomial,
    "randperm": _permutation,
}


# -- the check ---------------------------------------------------------------------------------------------------------


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
    (`EqualChances`). What is not checked: what happens before `losses_of`, code that runs only for other users than
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
            raise ValueError(f"losses_of must give one loss per user, shape ({len(users)},), got {got}")
        return out

    def compare(self, whole: Tensor, losses: Tensor, users: list[int]) -> None:
        known = whole[users].double()
        wrong = differ(whole, known, losses.double(), self.chances.half)
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
        tolerance = gradient_tolerance(self.dtype, self.chances.half)
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


Outcome = tuple[Tensor, list[Tensor]]  # of one user: the loss, (), and the gradient by each trainable parameter


def is_finite(outcome: Outcome) -> bool:
    loss, gradient = outcome
    return bool(torch.isfinite(loss)) and math.isfinite(_length(gradient))


def compare_outcomes(together: Sequence[Outcome], alone: Mapping[int, Outcome], half: bool) -> None:
    """Raises if the engine's loss or gradient of a user among others is not that of plain autograd for the user alone.

    Args:
        together: what the engine says of some users.
        alone: what autograd says of some of them, by place.
        half: whether half precision was seen on the way.
    """
    losses = torch.stack([loss for loss, _ in together])
    lengths = [_length(gradient) for _, gradient in together]
    finite = [length for length in lengths if math.isfinite(length)]
    near = 0.1 * sum(finite) / max(1, len(finite))
    tolerance = gradient_tolerance(losses.dtype, half)
    for user, (loss, gradient) in alone.items():
        among, found = losses[user].double(), loss.to(losses.device).double()
        if bool(differ(losses, among, found, half)):
            raise UnsupportedUse(
                f"a user's loss is {float(among):.6g} inside the engine, among {len(together)} users, and "
                f"{float(found):.6g} alone and outside of it: {_WHY_OUTSIDE}"
            )
        apart = _length([a - b for a, b in zip(together[user][1], gradient, strict=True)])
        if not apart <= tolerance * max(lengths[user], near, 1e-12):
            raise UnsupportedUse(
                f"a user's gradient has the length {lengths[user]:.6g} inside the engine, among {len(together)} users, "
                f"and alone and outside of it it is {apart:.3g} away from that: {_WHY_OUTSIDE}"
            )


_WHY_OUTSIDE = (
    "a user's loss must depend on that user alone. Look for what Python carries from one user to the next (`.item()`, "
    "NumPy, lists and global variables, random numbers drawn user by user: draw them with torch), and for code that "
    "does something else inside `clipping.users`"
)


def _length(gradient: Sequence[Tensor]) -> float:
    return math.sqrt(sum(map(_squared, gradient)))


def differ(whole: Tensor, known: Tensor, losses: Tensor, half: bool) -> Tensor:
    """Which losses of the same users differ by more than rounding.

    Args:
        whole: the losses of all users: those near 0 have fewer digits.
        known, losses: to be compared, in float64.
        half: whether half precision was seen on the way.
    """
    tolerance = max(_rough(half), _TOLERANCE.get(whole.dtype, _HALF_PRECISION))
    near = whole[whole.isfinite()].double().abs().mean()
    allowed = tolerance * torch.maximum(known.abs(), 0.1 * near)
    return ~(((losses - known).abs() <= allowed) | (known.isnan() & losses.isnan()) | (known == losses))


def gradient_tolerance(dtype: torch.dtype, half: bool) -> float:
    """The distance of two gradients that may be rounding, as a share of their length."""
    return 0.3 if _rough(half) > 0 or dtype not in _GRADIENT_TOLERANCE else _GRADIENT_TOLERANCE[dtype]


def _rough(half: bool) -> float:
    """Of a loss: what half precision and short products of float32 may change."""
    if half:
        return _HALF_PRECISION
    return 0.0 if torch.get_float32_matmul_precision() == "highest" else _SHORT_PRODUCTS


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
