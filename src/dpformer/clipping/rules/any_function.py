"""Any function that works row by row and has no rule of its own: its gradient is taken user by user, by autograd.

For one user b, g_b = (∂ f(p, rows of b) / ∂p)ᵀ δ_b: a call of f on the rows of b alone, vmapped over a few users at a
time so that memory stays bounded. The clipped sum needs no gradient of any single user: Σ_b c_b g_b is one call of
autograd on the whole batch with row gradients c_b δ_b.

It is exact if f never lets two users meet, which is checked on every batch: what f gives for the rows of a user alone
must be what it gave in the batch. A function that fails the check is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.gate import Gate, writes_in_place
from dpformer.clipping.recorded_call import own, paired
from dpformer.clipping.trees import map_tensors, tensors_of
from dpformer.clipping.turned import is_turned, mark_turned
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Dense

ROW_BY_ROW = "give it tensors of users' data whose first dimension is the batch, and let every row be computed alone"
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}


def any_function(gate: Gate, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` and records the call on each of its outputs."""
    managed = [t for t in tensors_of(args, kwargs) if gate.is_managed(t)]
    if writes_in_place(func) or kwargs.get("out") is not None:
        raise gate.refusal(managed[0], func, "build a new tensor instead of writing into one")
    data = [t for t in tensors_of(args, kwargs) if not gate.is_public(t)]
    turned = any(is_turned(t) for t in data)
    batch = 1 if turned else 0
    counts = {t.shape[batch] for t in data if t.ndim > batch} - {1} or {1}
    if len(counts) != 1:
        raise gate.refusal(managed[0], func, f"its arguments have {sorted(counts)} rows: {ROW_BY_ROW}")
    call = Call(func, args, kwargs, [id(t) for t in managed], batch, counts.pop(), gate.is_public)
    result = func(*map_tensors(gate.cut, args), **map_tensors(gate.cut, kwargs))
    single = isinstance(result, Tensor)
    outputs = [result] if single else list(result)
    for n, out in enumerate(outputs):
        if isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex()):
            outputs[n] = _watch(gate, call, None if single else n, managed, out, data)
    return outputs[0] if single else _like(result, outputs)


def _like(result: Any, outputs: list[Any]) -> Any:
    """A tuple of the kind that torch returned: a plain one, or one with names."""
    return type(result)(outputs)


def _watch(
    gate: Gate, call: Call, output: int | None, managed: list[Tensor], out: Tensor, data: list[Tensor]
) -> Tensor:
    if out.ndim <= call.batch or out.shape[call.batch] != call.rows:
        raise gate.refusal(managed[0], call.func, ROW_BY_ROW)
    seen = _fingerprint(out.detach().transpose(0, call.batch), 1)
    distinct = list({id(m): m for m in managed}.values())

    def replay(*fresh: Tensor) -> Tensor:
        return call(dict(zip(map(id, distinct), fresh, strict=True)), {}, output)

    def build(grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        delta = grad.transpose(0, call.batch)
        return [(p, UserByUser(call, output, p, delta, rows, seen, gate.refusal)) for p in distinct]

    by_rows = next(t for t in data if t.ndim > call.batch and t.shape[call.batch] == call.rows)
    shown = by_rows.detach().transpose(0, 1) if call.batch else by_rows
    watched = gate.record(call.func, distinct, paired(replay), build, own(out), rows=shown, reads=data)
    if call.batch:
        mark_turned(watched)
    return watched


def _fingerprint(rows: Tensor, dims: int) -> tuple[Tensor, Tensor]:
    """(*leading,) a fixed mixture of each row's numbers, and of their sizes: rows that differ, differ in it."""
    flat = rows.reshape(*rows.shape[:dims], -1)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    mixture = torch.linspace(0.5, 1.5, flat.shape[-1], dtype=flat.real.dtype, device=flat.device)
    return (flat * mixture).sum(-1), (flat.abs() * mixture).sum(-1)


@dataclass
class Call:
    """A call of a function, to be made again with other parameters or on the rows of some users."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    managed: list[int]  # identities of the parameters among the arguments
    batch: int  # the dimension that counts rows, of data and result
    rows: int
    is_public: Callable[[Tensor], bool]

    def __post_init__(self) -> None:
        """Everything is kept by value, out of the graph; in at least float32, whatever autocast did."""
        self.by_rows: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for t in tensors_of(self.args, self.kwargs):
            values[id(t)] = t.detach()
            if not self.is_public(t) and t.ndim > self.batch and t.shape[self.batch] == self.rows:
                self.by_rows[id(t)] = values[id(t)].transpose(0, self.batch)  # rows first
        self.values = values
        self.device = next(iter(values.values())).device.type

    def __call__(self, parameters: dict[int, Tensor], data: dict[int, Tensor], output: int | None) -> Tensor:
        """The result with these parameters and these rows (rows first) in the place of the given ones."""

        def fill(t: Tensor) -> Tensor:
            if id(t) in data:
                return widened(data[id(t)]).transpose(0, self.batch)
            return widened(parameters.get(id(t), self.values[id(t)]))

        with torch.autocast(self.device, enabled=False):
            result = self.func(*map_tensors(fill, self.args), **map_tensors(fill, self.kwargs))
        return result if output is None else result[output]


def widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


@dataclass
class UserByUser:
    """The use of one parameter by a call, its gradients written out for a few users at a time."""

    call: Call
    output: int | None
    parameter: Tensor
    delta: Tensor  # (rows, …) gradient at the output, rows first
    rows: UserRows
    seen: tuple[Tensor, Tensor]  # (rows,) fingerprint of the output
    refusal: Callable[[Any, Any, str], Exception]
    computes_anew = True  # `add_sum` is another call than `part`, and rounds otherwise

    def __post_init__(self) -> None:
        place = self.rows.spread(torch.arange(1, self.call.rows + 1, device=self.delta.device))  # 0 where padded
        self.place = (place - 1).clamp(min=0)  # (B, k) row of the batch
        self.real = place > 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def numbers_each(self) -> int:
        """What is alive for one user: its gradient, and data and results of the call a few times."""
        touched = self.delta.numel() + sum(t.numel() for t in self.call.by_rows.values())
        return self.parameter.numel() + 4 * touched // max(1, self.rows.users)

    def part(self, a: int, b: int) -> Dense:
        place, real = self.place[a:b], self.real[a:b]
        data = {key: t[place] for key, t in self.call.by_rows.items()}  # (b−a, k, …)
        delta = self.delta[place].masked_fill(~real.reshape(*real.shape, *[1] * (self.delta.ndim - 1)), 0)
        try:
            grads, found = _gradients(self, delta, data)
        except RuntimeError as error:
            fix = f"it cannot be computed for a user's rows alone ({error}): {ROW_BY_ROW}"
            raise self.refusal(self.parameter, self.call.func, fix) from error
        self._check(found, place, real)
        return Dense(grads)

    def add_sum(self, c: Tensor, out: Tensor) -> None:
        scale = c[self.rows.user_of_row(self.call.rows, c.device)]
        delta = self.delta * scale.reshape(-1, *[1] * (self.delta.ndim - 1))
        out += _pulled(self, widened(self.parameter.detach()), delta, self.call.by_rows)[0]

    def keep(self, users: Tensor) -> None:
        """Forgets users: their rows become rows of someone who stays, with no gradient."""
        stays = users[self.rows.user_of_row(self.call.rows, users.device)]
        self.delta = self.delta.masked_fill(~stays.reshape(-1, *[1] * (self.delta.ndim - 1)), 0)
        if not bool(stays.any()):
            self.call.by_rows = {key: torch.zeros_like(t) for key, t in self.call.by_rows.items()}
            return
        source = torch.where(stays, torch.arange(len(stays), device=stays.device), stays.int().argmax())
        self.call.by_rows = {key: t[source] for key, t in self.call.by_rows.items()}

    def _result(self, value: Tensor, data: dict[int, Tensor]) -> Tensor:
        """(rows, …) of the call on some rows, rows first."""
        return self.call({id(self.parameter): value}, data, self.output).transpose(0, self.call.batch)

    def _check(self, found: tuple[Tensor, Tensor], place: Tensor, real: Tensor) -> None:
        tolerance = _TOLERANCE.get(self.seen[0].dtype, 5e-2)
        off = (found[0] - self.seen[0][place]).abs() > tolerance * (self.seen[1][place] + 1e-30)
        if bool((off & real & self.seen[1][place].isfinite()).any()):
            fix = f"its result for a user's rows alone differs from that in the batch: {ROW_BY_ROW}"
            raise self.refusal(self.parameter, self.call.func, fix)


_NOT_VMAPPED: set[Any] = set()  # functions that torch cannot vmap: their users are looped over


def _gradients(use: UserByUser, delta: Tensor, data: dict[int, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(users, *shape) gradients, and the fingerprints (users, k) of what the call gives for each user alone."""
    keys, value = list(data), widened(use.parameter.detach())

    def one(own: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = torch.func.vjp(lambda p: use._result(p, dict(zip(keys, rows, strict=True))), value)
        result, pull = made[0], made[1]
        return pull(own.to(result.dtype))[0], *_fingerprint(result, 1)

    if use.call.func not in _NOT_VMAPPED:
        try:
            grads, mixture, size = torch.func.vmap(one, randomness="error")(delta, *data.values())
            return grads, (mixture, size)
        except (RuntimeError, NotImplementedError, ValueError):
            _NOT_VMAPPED.add(use.call.func)
    alone = [_pulled(use, value, delta[n], {key: t[n] for key, t in data.items()}) for n in range(len(delta))]
    return torch.stack([grad for grad, _ in alone]), _fingerprint(torch.stack([result for _, result in alone]), 2)


def _pulled(use: UserByUser, value: Tensor, delta: Tensor, data: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """The gradient of the parameter by plain autograd, and the result."""
    fresh = value.clone().requires_grad_()
    with torch.enable_grad():
        result = use._result(fresh, data)
    if not result.requires_grad:
        return torch.zeros_like(value), result
    (grad,) = torch.autograd.grad(result, fresh, delta.to(result.dtype), allow_unused=True)
    return (torch.zeros_like(value) if grad is None else grad), result.detach()
