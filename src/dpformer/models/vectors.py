r"""Scores as inner products: an item vector per item, and a query vector per history (see `export.vectors`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dpformer.models.counts import TransitionCounts
from dpformer.models.evidence import Evidence
from dpformer.models.history import LATEST
from dpformer.models.sequence import SequenceModel

DIM = 64  # default number of coordinates for counts


class Vectors(NamedTuple):
    """Item vectors, and queries whose inner products with them are the scores."""

    items: np.ndarray  # (M, d) float32
    queries: Callable[[Sequence[np.ndarray]], np.ndarray]  # histories of item numbers → (B, d) float32
    parts: np.ndarray | None = None  # (M, d): the query is the mean of its items' rows, weighted by recency
    lost: float | None = None  # share of the squares that a low rank loses; None: inner products are the scores


def of_network(model: SequenceModel) -> Vectors:
    """(E_b, bias_b) and (h, 1)."""
    with torch.no_grad():
        items = torch.cat([model.output_weight(), model.bias[:, None]], 1)[: model.num_items]

    @torch.no_grad()
    def queries(histories: Sequence[np.ndarray]) -> np.ndarray:
        states = [model.final_state([history]) for history in histories]
        return torch.nn.functional.pad(torch.cat(states), (0, 1), value=1.0).numpy()

    return Vectors(items.numpy(), queries)


def of_counts(model: TransitionCounts, dim: int | None = None) -> Vectors:
    """(V_b, 0.01·q_b) and (Σ_k α_k U_{x_k}, 1), with S = T + μRP ≈ U Vᵀ of rank dim − 1.

    The inner product approximates exp(score), in the same order.
    """
    from scipy.sparse.linalg import LinearOperator, svds

    evidence, size = Evidence(model), model.num_items
    rank = (min(DIM, size - 1) if dim is None else dim) - 1
    if not 1 <= rank < size:
        raise ValueError(f"dim is {rank + 1}; it must be from 2 to the number of items, {size}")
    table, reach, offered = evidence.transitions, evidence.reach, evidence.offered
    operator = LinearOperator(
        (size, size),
        matvec=lambda x: table @ x + reach @ (offered @ x),
        rmatvec=lambda x: table.T @ x + offered.T @ (reach.T @ x),
        dtype=np.float64,
    )
    squares = _squares(evidence)
    if squares:
        left, values, right = svds(operator, k=rank, v0=np.ones(size), random_state=0)
    else:  # no pair is left of a small log: popularity alone
        left, values, right = np.zeros((size, rank)), np.zeros(rank), np.zeros((rank, size))
    root = np.sqrt(values)
    parts = np.hstack([left * root, np.ones((size, 1))]).astype(np.float32)
    items = np.hstack([right.T * root, evidence.popularity[:, None]]).astype(np.float32)

    def queries(histories: Sequence[np.ndarray]) -> np.ndarray:
        found = np.zeros((len(histories), rank + 1), dtype=np.float32)
        found[:, -1] = 1
        for row, history in zip(found, histories, strict=True):
            latest = np.asarray(history, dtype=np.int64)[: -LATEST - 1 : -1]
            if len(latest):
                weights = evidence.alphas[: len(latest)]
                row[:] = (weights / weights.sum()) @ parts[latest]
        return found

    lost = 1 - float((values**2).sum()) / squares if squares else 0.0
    return Vectors(items, queries, parts, max(0.0, lost))


def _squares(evidence: Evidence) -> float:
    """‖T + RμP‖², through products of small matrices: ‖T‖² + 2⟨T, RP⟩ + ⟨RᵀR, PPᵀ⟩."""
    table, reach, offered = evidence.transitions.copy(), evidence.reach, evidence.offered
    table.sum_duplicates()
    squares = float(table.multiply(table).sum())
    if not offered.nnz:
        return squares
    rows, columns = table.nonzero()
    for start in range(0, len(rows), 1 << 18):
        part = slice(start, start + (1 << 18))
        a, b = rows[part], columns[part]
        shared = np.asarray(reach[a].multiply(offered[:, b].T).sum(1)).ravel()
        squares += 2 * float((np.asarray(table[a, b]).ravel() * shared).sum())
    return squares + float(((reach.T @ reach).multiply(offered @ offered.T)).sum())
