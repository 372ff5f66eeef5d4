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

from dpformer.clipping import picked
from dpformer.clipping.gate import Gate
from dpformer.clipping.rules.registry import rule
from dpformer.clipping.turned import mark_turned

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


@rule(torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu)
def recurrent(
    gate: Gate,
    func: Any,
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    """All layers and directions: (outputs, last state, …)."""
    if isinstance(has_biases, (list, tuple)):  # (data, batch_sizes, hx, weights, …): a user's rows are scattered
        raise gate.refusal(has_biases[0], func, "give it padded input, not a PackedSequence")
    directions, each = 2 if bidirectional else 1, 4 if has_biases else 2
    if len(params) != num_layers * directions * each or input.ndim != 3:
        raise gate.refusal(params[0], func, "use it without proj_size, on batched input")
    x = input if batch_first else picked.mark_computed(input.transpose(0, 1))
    # The first state is the same for all users; a clone makes it rows of users, like all later states.
    first = [s.clone() for s in (hx if isinstance(hx, (tuple, list)) else (hx,))]
    for s in first:  # (layers, B, H)
        mark_turned(picked.mark_computed(s))
    last: list[list[Tensor]] = [[] for _ in first]
    with gate:
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                n = layer * directions + direction
                own = params[n * each : (n + 1) * each]
                state = tuple(s[n] for s in first)
                for rows in state:
                    picked.mark(rows, picked.picked(x))
                out, state = _layer(x, state, own, _CELLS[func], backwards=direction == 1)
                outputs.append(out)
                for kept, value in zip(last, state, strict=True):
                    kept.append(value)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                x = F.dropout(x, dropout)
        out = x if batch_first else x.transpose(0, 1).contiguous()  # as torch gives it, for the model may view it
        ends = [torch.stack(kept) for kept in last]
    for end in ends:  # (layers, B, H)
        mark_turned(end)
    return out, *ends


@rule(torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def recurrent_cell(
    gate: Gate,
    func: Any,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """One step."""
    state = tuple(picked.mark_computed(s.clone()) for s in (hx if isinstance(hx, (tuple, list)) else (hx,)))
    with gate:
        after = _CELLS[func](F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
    return after if len(after) > 1 else after[0]


_CELLS: dict[Any, Cell] = {
    torch.gru: _gru,
    torch.lstm: _lstm,
    torch.rnn_tanh: _tanh,
    torch.rnn_relu: _relu,
    torch.gru_cell: _gru,
    torch.lstm_cell: _lstm,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}
