"""Linear layers in float32 on the CPU, on users' rows in order: most uses of parameters, so they take a short way.

The rules of rules/linear.py say the same of any linear layer. All preconditions of a plain one are checked by the
caller (user_rules.py), and the backward pass measures many of them together (at_once.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.recorded_call import CHANGED, Build, Paired, RecordedCall, fresh, paired
from dpformer.clipping.user_rows import UserRows
from dpformer.clipping.uses import Dense, Outer

if TYPE_CHECKING:
    from dpformer.clipping.recorder import Recorder

Refusal = Callable[[Any, Any, str], UnsupportedUse]


class AffineCall(RecordedCall):
    """x Wᵀ + b (F.linear), or b + x W (torch.addmm)."""

    def __init__(
        self, gate: Recorder, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, trains_weight: bool,
        trains_bias: bool,
    ) -> None:  # fmt: skip
        self.func, self.sink, self.context, self.grad = func, gate.sink, gate.context, None
        self.source, self.weight, self.bias = x, weight, bias
        self.trains_weight, self.trains_bias = trains_weight, trains_bias
        self.managed = [weight] if trains_weight else []
        if trains_bias and bias is not None:
            self.managed.append(bias)
        self.names = tuple([gate.names[id(t)] for t in self.managed])
        self.shape = x.shape
        self.versions = self._versions()
        self.refusal: Refusal = gate.refusal

    @property
    def columns(self) -> bool:
        """Whether W is (in, out), as addmm has it."""
        return self.func is torch.addmm

    def check(self) -> None:
        """Autograd's own check does not see what only the recorded calls have kept."""
        if self.versions != self._versions():
            raise self.refusal(self.managed[0], self.func, CHANGED)

    def _versions(self) -> list[int]:
        """Counts of writes."""
        return [self.source._version, *[t._version for t in self.managed]]

    @property
    def build(self) -> Build:  # type: ignore[override]
        return self._build

    @property
    def paired(self) -> Paired:  # type: ignore[override]
        return paired(self._replay)

    def _replay(self, *fresh: Tensor) -> Tensor:
        values = iter(fresh)
        weight = next(values) if self.trains_weight else self.weight
        bias = next(values) if self.trains_bias else self.bias
        return run(self.func, self.source, weight, bias)

    def sides(self, grad: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Rows whose outer products are the gradient of W."""
        return (source, grad) if self.columns else (grad, source)

    def _build(self, grad: Tensor, rows: UserRows) -> list[tuple[Tensor, Any]]:
        self.check()
        delta, source = (rows.spread(t).reshape(rows.users, -1, t.shape[-1]) for t in (grad, self.source))
        uses: list[tuple[Tensor, Any]] = []
        if self.trains_weight:
            uses.append((self.weight, Outer(*self.sides(delta, source.to(grad.dtype)), tuple(self.weight.shape))))
        if self.trains_bias and self.bias is not None:
            uses.append((self.bias, Dense(delta.sum(1))))
        return uses

    def forget(self) -> None:
        self.grad = None
        del self.source  # whoever asks for it now is wrong


def run(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, or b + x W."""
    if func is F.linear:
        return F.linear(x, weight, bias)
    assert bias is not None
    return torch.addmm(bias, x, weight)


def is_plain(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the numbers are what compiled code reads, and torch computes in float32 what is asked for in float32."""
    single = torch.float32
    return (
        x.dtype is single
        and weight.dtype is single
        and x.ndim > 1
        and weight.ndim == 2
        and (bias is None or (bias.dtype is single and bias.shape == weight.shape[func is torch.addmm :][:1]))
        and weight.is_cpu
        and x.is_cpu
        and weight.numel() > 0
        and x.numel() > 0
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def record_affine(
    gate: Recorder, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, trains_weight: bool, trains_bias: bool
) -> Tensor:
    """Runs a plain call on the values of its parameters, and records it."""
    weight_value = weight.detach() if trains_weight else weight
    bias_value = bias.detach() if trains_bias and bias is not None else bias
    out = fresh(run(func, x, weight_value, bias_value))
    call = AffineCall(gate, func, x.detach(), weight, bias, trains_weight, trains_bias)
    gate.calls.append(call)
    return call.watch(out, gate.token)
