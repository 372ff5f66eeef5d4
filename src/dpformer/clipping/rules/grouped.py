"""Products by groups of rows, as mixtures of experts use them: the rows of group g times the matrix of group g."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpformer.clipping.gate import Gate
from dpformer.clipping.rules.registry import rule

_FUNCTIONS = [getattr(home, name) for home, name in ((F, "grouped_mm"), (torch, "_grouped_mm")) if hasattr(home, name)]


@rule(*_FUNCTIONS)
def grouped_mm(
    gate: Gate,
    func: Any,
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Rows offs[g−1] … offs[g]−1 of mat_a (N, d) times mat_b[g] (G, d, o), group by group."""
    plain = offs is not None and bias is None and out_dtype in (None, mat_a.dtype)
    if not plain or mat_a.ndim != 2 or mat_b.ndim != 3 or gate.is_managed(mat_a):
        raise gate.refusal(mat_b if gate.is_managed(mat_b) else mat_a, func, "give it rows, matrices and offsets only")
    assert offs is not None
    ends = offs.tolist()
    with gate:
        parts = []
        for group, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            rows = mat_a[torch.arange(a, b, device=mat_a.device)]  # picked: the gate keeps whose they are
            parts.append(rows @ mat_b[group])
        left = len(mat_a) - ends[-1]  # rows of no group
        parts.append(mat_a.new_zeros(left, mat_b.shape[2]))
        return torch.cat(parts[:-1] if left == 0 else parts)
