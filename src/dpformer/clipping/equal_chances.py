"""Random numbers that are the same for every user, in every batch: to compare a user alone with a user among others.

Dropout draws other numbers for a user in a batch than for the same user alone, so their losses differ without anything
being wrong. Inside `EqualChances` a random function of torch gives one number for all entries of its result, a function
of the seed and of how many such functions were called before; dropout drops nothing. What a model does by chance for
all users alike (`if torch.rand(()) < 0.1:`) still happens. A permutation is a rotation, so that users who are paired by
chance (mixup) meet. Random numbers of Python and numpy are seeded alike before every call: a user gets the same ones
alone and among others only if they are not drawn user by user.

The states of all generators are put back afterwards: training goes on as if nothing had been drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)
        super().__enter__()
        return self

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
        self.calls += 1
        chance = random.Random(f"{self.seed} {self.calls}").random()
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if name in _REPLACED:
            return _REPLACED[name](chance, named)
        if name in _FILLED:  # made as asked for, then every entry is the same
            out = func(*args, **kwargs)
            return out.fill_(_FILLED[name](chance, named)) if out.numel() else out
        for off in ("dropout_p", "dropout"):  # fused kernels that drop inside
            if off in named:
                return func(**(named | {off: 0.0}))
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


def _bernoulli_(chance: float, a: dict[str, Any]) -> Tensor:
    """With a number: dropout's mask, which keeps everything. With a tensor: by chance, the same for all."""
    p = a.get("p", 0.5)
    return a["self"].copy_((chance < p).to(a["self"].dtype)) if isinstance(p, Tensor) else a["self"].fill_(1)


def _bernoulli(chance: float, a: dict[str, Any]) -> Tensor:
    p = a.get("p", a["self"])
    return (chance < p).to(a["self"].dtype) if isinstance(p, Tensor) else torch.full_like(a["self"], chance < p)


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
    "native_dropout": lambda _, a: (a["input"].clone(), torch.ones_like(a["input"], dtype=torch.bool)),
    "bernoulli_": _bernoulli_,
    "bernoulli": _bernoulli,
    "multinomial": _multinomial,
    "randperm": _permutation,
}
