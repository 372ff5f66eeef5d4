"""nn.GRU, nn.LSTM, nn.RNN and their cells, run through exact equivalents unrolled over time.

The fused kernels return no gradient at the gates of each step, which is what a user's gradient is made of. The input
side of all steps is one linear layer; the hidden side is one small linear layer a step. All steps use the same weights:
their rows simply join (uses.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.gate import Gate

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


def _layer(x: Tensor, state: State, weights: list[Tensor], cell: Cell, backwards: bool) -> tuple[Tensor, State]:
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


def recurrent(cell: Cell, states: int) -> Callable[..., Any]:
    """The rule for torch.gru (input, hx, weights, bias, layers, dropout, train, bidirectional, batch_first) and kin."""

    def rule(gate: Gate, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(args[3], list):  # (data, batch_sizes, hx, weights, …): rows go by time, a user's are scattered
            raise gate.refusal(args[3][0], func, "give it padded input, not a PackedSequence")
        x, hx, weights, has_bias, layers, dropout, train, bidirectional, batch_first = args
        directions, each = 2 if bidirectional else 1, 4 if has_bias else 2
        if len(weights) != layers * directions * each or x.ndim != 3:
            raise gate.refusal(weights[0], func, "use it without proj_size, on batched input")
        x = x if batch_first else x.transpose(0, 1)
        # The first state is the same for all users; a clone makes it rows of users, like all later states.
        first = [s.clone() for s in (hx if isinstance(hx, (tuple, list)) else (hx,))]
        last: list[list[Tensor]] = [[] for _ in range(states)]
        with gate:
            for layer in range(layers):
                outputs = []
                for direction in range(directions):
                    n = layer * directions + direction
                    own = weights[n * each : (n + 1) * each]
                    out, state = _layer(x, tuple(s[n] for s in first), own, cell, backwards=direction == 1)
                    outputs.append(out)
                    for kept, value in zip(last, state, strict=True):
                        kept.append(value)
                x = torch.cat(outputs, -1) if bidirectional else outputs[0]
                if dropout and train and layer < layers - 1:
                    x = F.dropout(x, dropout)
            out = x if batch_first else x.transpose(0, 1)
            return out, *(torch.stack(kept) for kept in last)

    return rule


def single(cell: Cell, states: int) -> Callable[..., Any]:
    """The rule for torch.gru_cell and its kin: (input, hx, w_x, w_h, b_x, b_h)."""

    def rule(gate: Gate, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, hx, w_x, w_h, *biases = args
        b_x, b_h = biases or (None, None)
        state = tuple(s.clone() for s in hx) if isinstance(hx, (tuple, list)) else (hx.clone(),)
        with gate:
            after = cell(F.linear(x, w_x, b_x), F.linear(state[0], w_h, b_h), state)
        return after if states > 1 else after[0]

    return rule


RULES = {
    torch.gru: recurrent(_gru, 1),
    torch.lstm: recurrent(_lstm, 2),
    torch.rnn_tanh: recurrent(_tanh, 1),
    torch.rnn_relu: recurrent(_relu, 1),
    torch.gru_cell: single(_gru, 1),
    torch.lstm_cell: single(_lstm, 2),
    torch.rnn_tanh_cell: single(_tanh, 1),
    torch.rnn_relu_cell: single(_relu, 1),
}
