"""Products of histories with sparse matrices, by operations that an ONNX export records and runtimes execute fast.

Matrices are sparse by rows: row i has the values at offsets[i]:offsets[i + 1], in the columns `targets` at the same
positions. Only the rows of a history's own items are read, so that an answer takes no longer in a catalogue of 10⁵
items.
"""

from typing import Any, cast

import torch
from torch import Tensor


def sum_of_rows(
    items: Tensor, weights: Tensor, offsets: Tensor, targets: Tensor, values: Tensor, nothing: Tensor
) -> Tensor:
    """Σ_l weights[b, l] · matrix[items[b, l]], (B, columns).

    Args:
        items: (B, L) int64 rows; where the weight is 0 the row is arbitrary and not read.
        weights: (B, L) float32, at least 0.
        offsets: (rows + 1,) int64.
        targets: (n,) int64.
        values: (n,) float32.
        nothing: (B, columns) zeros.
    """
    if not len(values):  # an export would treat an empty tensor as integers
        return nothing
    columns = nothing.shape[1]
    first = offsets[items].flatten()  # (B·L,)
    lengths = torch.where(weights.flatten() > 0, offsets[items + 1].flatten() - first, 0)
    stops = lengths.cumsum(0)
    total = cast(Any, stops[-1])  # a tensor: an export recomputes its value for every batch
    # The (b, l) of each entry: the cumulative sum of ones at the starts. Empty ranges start where the next one does.
    marks = torch.zeros_like(torch.arange(total + 1)).scatter_add(0, stops - lengths, torch.ones_like(lengths))
    owner = marks.cumsum(0)[:-1] - 1  # (total,)
    place = first[owner] + torch.arange(total) - (stops - lengths)[owner]
    user = torch.div(owner, items.shape[1], rounding_mode="floor")
    added = weights.flatten()[owner] * values[place]
    return nothing.flatten().scatter_add(0, user * columns + targets[place], added).view(-1, columns)


def product_with_columns(interest: Tensor, offsets: Tensor, links: Tensor, values: Tensor) -> Tensor:
    """Σ over the entries of row i: interest[b, links] · values, (B, rows): the transposed product.

    The sums are differences of running sums in float64, of non-negative numbers: no scatter, and an error of
    10⁻¹⁶ of the largest running sum.

    Args:
        interest: (B, columns) float32, at least 0.
        offsets: (rows + 1,) int64.
        links: (n,) int64 columns.
        values: (n,) float32, at least 0.
    """
    running = (interest[:, links] * values).double().cumsum(1)  # (B, n)
    running = torch.cat([torch.zeros_like(interest[:, :1]).double(), running], 1)
    return (running[:, offsets[1:]] - running[:, offsets[:-1]]).float()
