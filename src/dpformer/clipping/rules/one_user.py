"""How the rules of rules/ are called on users' tensors: they see those of all users, the user's dimension first.

A rule here takes (interception, function, arguments) as the model gave them and returns one user's result, or
NotImplemented: then each user gets a copy of the parameter. Functions that torch cannot batch on the CPU, or that mix
the rows of what they take for a batch, get the users' rows one behind the other ("folded").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.batched_norms import is_plain, record_affine
from dpformer.clipping.interception import Interception
from dpformer.clipping.rules import RULES
from dpformer.clipping.rules.linear import linear_layer
from dpformer.clipping.trees import tensors_of
from dpformer.compat import Outside, is_batchedtensor, physical
from dpformer.errors import CannotBatch, UnsupportedUse

# -- recurrent layers --------------------------------------------------------------------------------------------------


State = tuple[Tensor, ...]  # (h,) or (h, c), each (B, H)
Cell = Callable[[Tensor, Tensor, State], State]  # input gates, hidden gates, state → state


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    xr, xz, xn = x.chunk(3, -1)
    hr, hz, hn = h.chunk(3, -1)
    reset, update = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    new = torch.tanh(xn + reset * hn)
    return (new + update * (state[0] - new),)


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _tanh(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.tanh(x + h),)


def _relu(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.relu(x + h),)


def one_direction(x: Tensor, state: State, weights: list[Tensor], cell: Cell, backwards: bool) -> tuple[Tensor, State]:
    """One direction of one layer. x (B, T, D) → (B, T, H) and the last state."""
    w_x, w_h, *biases = weights
    b_x, b_h = biases or (None, None)
    gates = F.linear(x, w_x, b_x)
    steps = range(x.shape[1] - 1, -1, -1) if backwards else range(x.shape[1])
    outputs: list[Tensor] = []
    for t in steps:
        state = cell(gates[:, t], F.linear(state[0], w_h, b_h), state)
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, 1), state


CELLS: dict[Any, Cell] = {
    torch.gru: _gru,
    torch.lstm: _lstm,
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
    torch.gru_cell: _gru,
    torch.lstm_cell: _lstm,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}


# -- the rules ---------------------------------------------------------------------------------------------------------


Run = Callable[[Interception, Any, Any, Any], Any]


class UserRule:
    """A rule, and whether it is one also where no parameter is among the arguments."""

    def __init__(self, run: Run, without_parameters: bool = False) -> None:
        self.run, self.without_parameters = run, without_parameters

    def __call__(self, gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
        return self.run(gate, func, args, kwargs)


_LINEAR = F.linear  # torch's own, also where a test puts another in its place
USER_RULES: dict[Any, UserRule] = {}


def user_rule(*functions: Any, without_parameters: bool = False) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        for function in functions:
            USER_RULES[function] = UserRule(run, without_parameters)
        return run

    return register


def _named(names: str, *homes: Any) -> list[Any]:
    return [getattr(home, name) for home in homes for name in names.split() if hasattr(home, name)]


def _only_first(args: Any, kwargs: Any) -> bool:
    """Whether the first argument is the user's, and no other."""
    rest = tensors_of(*args[1:], *kwargs.values())
    return bool(args) and of_users(args[0]) and not any(map(is_batchedtensor, rest))


def of_users(t: Any) -> bool:
    return isinstance(t, Tensor) and is_batchedtensor(t)


def wrapped(gate: Interception, out: Tensor) -> Tensor:
    assert gate.level is not None
    return gate.mine(gate.level.wrap(out))


@user_rule(F.linear, torch.addmm, Tensor.addmm)
def affine(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """x Wᵀ + b, b + x W: all but the last dimension of x are rows."""
    names = ("input", "weight", "bias") if func is _LINEAR else ("input", "mat1", "mat2")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if func is _LINEAR:
        x, w, b = given.pop("input", None), given.pop("weight", None), given.pop("bias", None)
    else:
        b, x, w = given.pop("input", None), given.pop("mat1", None), given.pop("mat2", None)
    if any(value != 1 for value in given.values()) or not of_users(x):
        return NotImplemented
    if not gate.is_public(w) or w.ndim != 2 or w.is_complex() or x.is_complex() or x.ndim == 0:
        return NotImplemented
    if b is not None and not (gate.is_public(b) and b.shape == w.shape[func is not _LINEAR :][:1]):
        return NotImplemented  # it is broadcast
    with Outside():
        x = physical(x)
        shape = x.shape
        if func is not _LINEAR:
            x = x.reshape(-1, shape[-1])  # rows of a user one behind the other
        function = _LINEAR if func is _LINEAR else torch.addmm
        of_model = id(w) in gate.own and (b is None or id(b) in gate.own)
        trains = w.requires_grad, b is not None and b.requires_grad
        if of_model and any(trains) and is_plain(function, x, w, b):
            out = record_affine(gate, function, x, w, b, *trains)
        else:
            out = RULES[function](gate, function, (x, w, b) if func is _LINEAR else (b, x, w), {})
        return wrapped(gate, out if func is _LINEAR else out.view(*shape[:-1], out.shape[-1]))


@user_rule(*_named("matmul __matmul__ mm", torch, Tensor, torch.linalg))
def product(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """x @ W, and W @ x = (xᵀ @ Wᵀ)ᵀ."""
    if len(args) == 2 and not kwargs and gate.is_managed(args[0]) and of_users(args[1]):
        weight, x = args
        if weight.ndim == 2 and x.ndim >= 2 and not (weight.is_complex() or x.is_complex()):
            with gate:
                return torch.matmul(x.mT, weight.mT).mT.contiguous()  # as torch gives it, for the model may view it
    if kwargs or len(args) != 2 or not _only_first(args, kwargs) or args[1].ndim != 2 or args[0].ndim == 0:
        return NotImplemented
    if any(t.is_complex() for t in args):
        return NotImplemented
    with Outside():
        return wrapped(gate, RULES[torch.matmul](gate, torch.matmul, (physical(args[0]), args[1]), {}))


@user_rule(*_named("__getitem__", Tensor), *_named("index_select", torch, Tensor))
def rows_of_a_table(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """table[ids], table.index_select(0, ids)"""
    if kwargs or len(args) not in (2, 3) or (len(args) == 3 and args[1] != 0):
        return NotImplemented
    table, ids = args[0], args[-1]
    if not of_users(ids) or not gate.is_managed(table) or table.is_complex():
        return NotImplemented
    if ids.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    with Outside():
        return wrapped(gate, RULES[Tensor.__getitem__](gate, func, (table, physical(ids)), {}))


@user_rule(F.embedding_bag)
def bag(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """Made of an embedding."""
    with gate:
        return RULES[func](gate, func, args, kwargs)


@user_rule(torch.einsum)
def einsum(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """Where it is a linear layer."""
    equation, *tensors = args
    if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
        tensors = list(tensors[0])
    if kwargs or sum(map(of_users, tensors)) != 1 or any(not isinstance(t, Tensor) or t.is_complex() for t in tensors):
        return NotImplemented
    with Outside():
        everybody = [physical(t) if of_users(t) else t for t in tensors]
        out = linear_layer(gate, func, equation, everybody)
        return NotImplemented if out is None else wrapped(gate, out)


@user_rule(*[f for f in _named("layer_norm rms_norm", F) if f in RULES])
def normalised(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """Over the last dimensions."""
    if not _only_first(args, kwargs) or args[0].is_complex():
        return NotImplemented
    with Outside():
        return wrapped(gate, RULES[func](gate, func, (physical(args[0]), *args[1:]), kwargs))


@user_rule(F.embedding)
def embedding(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """Rows of a table."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("scale_grad_by_freq") or given.get("max_norm") is not None:
        raise UnsupportedUse(
            "F.embedding is used with max_norm or scale_grad_by_freq, which depend on other users; leave them out"
        )
    ids, table = given.pop("input"), given.pop("weight")
    if not of_users(ids) or not gate.is_public(table) or table.is_complex():
        return NotImplemented
    given.pop("sparse", None)  # gradients of users are sums here, never sparse tensors
    with Outside():
        return wrapped(gate, RULES[func](gate, func, (physical(ids), table), given))


@user_rule(F.conv1d, F.conv2d, F.group_norm, F.batch_norm)
def folded(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """(B, N, C, …) → (B·N, C, …): rows of a user one behind the other."""
    if not _only_first(args, kwargs) or any(t.is_complex() for t in tensors_of(*args, *kwargs.values())):
        return NotImplemented
    x, convolves = args[0], func in (F.conv1d, F.conv2d)
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if x.ndim < 2 or (convolves and not (isinstance(weight, Tensor) and x.ndim in (weight.ndim, weight.ndim - 1))):
        return NotImplemented
    with Outside():
        x = physical(x)
        if convolves and x.ndim == weight.ndim:  # one sample without a dimension of its own
            return wrapped(gate, RULES[func](gate, func, (x, *args[1:]), kwargs))
        out = RULES[func](gate, func, (x.flatten(0, 1), *args[1:]), kwargs)
        return wrapped(gate, out.unflatten(0, x.shape[:2]))


@user_rule(F.scaled_dot_product_attention, without_parameters=True)
def attention(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """torch has no batching rule for its kernel on the CPU: (B, N, H, L, d) becomes (B·N, H, L, d)."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    sides, mask = [given.pop(name) for name in ("query", "key", "value")], given.pop("attn_mask", None)
    if any(t.ndim != 4 for t in sides) or (mask is not None and mask.ndim not in (2, 4)):
        return NotImplemented
    if any(gate.is_managed(t) for t in (*sides, mask)):
        return NotImplemented  # copies come first
    assert gate.level is not None
    users, n = gate.level.users, sides[0].shape[0]
    if any(t.shape[0] != n for t in sides):
        return NotImplemented
    with Outside():

        def spread(t: Tensor) -> Tensor:
            return physical(t) if of_users(t) else t.expand(users, *t.shape)

        if mask is not None and (of_users(mask) or (mask.ndim == 4 and mask.shape[0] > 1)):
            mask = spread(mask)
            mask = mask[:, None, None] if mask.ndim == 3 else mask
            mask = mask.expand(users, n, *mask.shape[2:]).flatten(0, 1)
        out = func(*(spread(t).flatten(0, 1) for t in sides), mask, **given)
        return wrapped(gate, out.unflatten(0, (users, n)))


@user_rule(torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)
def recurrent(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """Unrolled over time (above)."""
    if kwargs or isinstance(args[3], (list, tuple)):
        raise CannotBatch("a PackedSequence has another length for each user")
    x, hx, params, has_biases, num_layers, dropout, train, bidirectional = args[:8]
    batch_first = len(args) > 8 and args[8]
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    if len(params) != num_layers * directions * each:
        raise CannotBatch("it has projections of its states")
    if x.ndim == 2:  # one sample, (T, D), without a dimension for samples
        raise CannotBatch("it is given one sample without a dimension for samples")
    with gate:
        x = x if batch_first else x.transpose(0, 1)
        first = hx if isinstance(hx, (tuple, list)) else (hx,)
        zero = torch.zeros_like(x[:, 0, :1])  # a first state that is the same for all becomes each user's
        last: list[list[Tensor]] = [[] for _ in first]
        for layer in range(num_layers):
            outs = []
            for d in range(directions):
                n = layer * directions + d
                state = tuple(s[n] + zero for s in first)
                out, state = one_direction(x, state, params[n * each : (n + 1) * each], CELLS[func], d == 1)
                outs.append(out)
                for kept, value in zip(last, state, strict=True):
                    kept.append(value)
            x = torch.cat(outs, -1) if bidirectional else outs[0]
            if dropout and train and layer < num_layers - 1:
                x = F.dropout(x, dropout)
        return (x if batch_first else x.transpose(0, 1)), *[torch.stack(kept) for kept in last]


@user_rule(torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def cell(gate: Interception, func: Any, args: Any, kwargs: Any) -> Any:
    """One step."""
    given = [*args, *kwargs.values()]
    x, hx, w_ih, w_hh = given[:4]
    b_ih, b_hh = given[4:] or (None, None)
    with gate:
        zero = torch.zeros_like(x[..., :1])
        state = tuple(s + zero for s in (hx if isinstance(hx, (tuple, list)) else (hx,)))
        after = CELLS[func](F.linear(x, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return after if len(after) > 1 else after[0]
