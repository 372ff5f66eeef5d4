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


def layer(x: Tensor, state: State, weights: list[Tensor], cell: Cell, backwards: bool) -> tuple[Tensor, State]:
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
