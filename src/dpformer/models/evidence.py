r"""Transition counts at inference: sparse products instead of one row at a time, for many histories or a single one.

With the weights α of the latest items of history h in row h of a sparse matrix A,

    evidence = A·(T + μ·R·P) + 0.01·q,      ln(evidence) = `TransitionCounts.scores`,

so ranking by evidence is ranking by score; μ·R·P is the back-off to public attributes, if there are any. It is a sum
over the history, so it also explains itself: item x_k adds α_k·(T + μ·R·P)_{x_k b} to the evidence for b, and
popularity adds the rest (`TransitionCounts.explain` names the attributes too).
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from dpformer.models.counts import HINT, TransitionCounts
from dpformer.models.history import LATEST, recency

DENSE = 1 << 24  # maximum size of a dense T + μ·R·P, 64 MB; with attributes few entries are zero


class Evidence:
    """The evidence of a counts model for every item after some histories, by sparse products."""

    def __init__(self, model: TransitionCounts) -> None:
        size = model.num_items
        self.alphas = recency(model.harmonic)
        chances, targets, offsets = (part.cpu().numpy() for part in (model.chances, model.targets, model.offsets))
        parts = (chances, targets.astype(_whole(size)), offsets.astype(_whole(len(chances))))
        self.transitions = sparse.csr_array(parts, shape=(size, size))  # T
        self.reach, self.offered = model.backoff_factors()  # R (M, G), μP (G, M)
        self.popularity = HINT * model.popularity.cpu().numpy()  # (M,)
        dense = self.offered.nnz and size * size <= DENSE
        self._rows = (self.transitions + self.reach @ self.offered).toarray() if dense else None  # (M, M)

    def of(self, items: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """(B, M) float32, above 0, for the histories items[offsets[b]:offsets[b + 1]]."""
        if self._rows is not None:
            found = _weights(items, offsets, len(self.popularity), self.alphas) @ self._rows
        elif self.offered.nnz:
            found = self.claims(items, offsets).toarray()
        else:
            found = self._dense_claims(_weights(items, offsets, len(self.popularity), self.alphas))
        found += self.popularity
        return found

    def work(self, items: np.ndarray, offsets: np.ndarray) -> int:
        """The number of entries of T added for some histories: at least the number of `claims`."""
        chosen = _weights(items, offsets, len(self.popularity), self.alphas).indices
        return int((self.transitions.indptr[chosen + 1] - self.transitions.indptr[chosen]).sum(dtype=np.int64))

    def _dense_claims(self, weights: sparse.csr_array) -> np.ndarray:
        """A·T as an array (B, M), in the summation order of the sparse product, hence with the same bits.

        Each row of T named by a history is added in place, as one product of a matrix (B·M, entries of A). This needs
        no search and takes half the time if many claims coincide.
        """
        rows = self.transitions[weights.indices]
        size, users = weights.shape[1], np.repeat(np.arange(weights.shape[0]), np.diff(weights.indptr))
        starts = (users * size).astype(_whole(weights.shape[0] * size))
        places = rows.indices + np.repeat(starts, np.diff(rows.indptr))
        spread = sparse.csc_array((rows.data, places, rows.indptr), shape=(weights.shape[0] * size, len(users)))
        return np.asarray(spread @ weights.data).reshape(weights.shape)

    def claims(self, items: np.ndarray, offsets: np.ndarray) -> sparse.csr_array:
        """(B, M) float32: evidence without popularity, zero for most items."""
        weights = _weights(items, offsets, len(self.popularity), self.alphas)
        claims = weights @ self.transitions
        return claims + (weights @ self.reach) @ self.offered if self.offered.nnz else claims

    def parts(self, history: np.ndarray, items: np.ndarray) -> np.ndarray:
        """(L + 1, n): the contribution of each item of one history to the evidence for each item; popularity last."""
        latest = history[-LATEST:]
        alpha = self.alphas[: len(latest)][::-1]
        added = np.zeros((len(history) + 1, len(items)))
        if len(latest):
            rows = (self.transitions[latest] + self.reach[latest] @ self.offered).toarray()[:, items]  # (≤ LATEST, n)
            added[len(history) - len(latest) : -1] = (alpha / alpha.sum())[:, None] * rows
        added[-1] = self.popularity[items]
        return added

    def attributes_behind(self, history: np.ndarray, items: np.ndarray) -> np.ndarray:
        """(L, n) int64: the strongest shared attribute where attributes contribute more than transitions; otherwise -1.

        For position k of the history and item b it is argmax_g R_{x_k g} P_gb, if μ(R·P)_{x_k b} > T_{x_k b}.
        """
        found = np.full((len(history), len(items)), -1)
        if not self.offered.nnz:
            return found
        offered = self.offered[:, items].tocsc()  # (G, n)
        first = max(0, len(history) - LATEST)
        for place, origin in enumerate(history[first:].tolist(), start=first):
            shares = offered.multiply(self.reach[[origin]].T).tocsc()  # (G, n)
            direct = self.transitions[[origin]][:, items].toarray()[0]
            for column in np.flatnonzero(shares.sum(0) > direct).tolist():
                part = slice(*shares.indptr[column : column + 2].tolist())
                found[place, column] = shares.indices[part][shares.data[part].argmax()]
        return found


def _weights(items: np.ndarray, offsets: np.ndarray, size: int, alphas: np.ndarray) -> sparse.csr_array:
    """A: (B, M) with α_k at the k-th latest item of each history; an item that occurs twice has two entries."""
    lengths = np.minimum(np.diff(offsets), LATEST)
    stops = np.cumsum(lengths)
    back = np.repeat(stops, lengths) - 1 - np.arange(int(lengths.sum()))  # 0 for the latest
    alpha = alphas[back] / np.repeat(np.cumsum(alphas)[lengths - 1], lengths)
    chosen = items[np.repeat(offsets[1:], lengths) - 1 - back]
    chosen = chosen.astype(_whole(size))  # same type as in T, otherwise each product would copy T
    pointers = np.concatenate([[0], stops]).astype(chosen.dtype)
    return sparse.csr_array((alpha.astype(np.float32), chosen, pointers), shape=(len(lengths), size))


def _whole(size: int) -> type[np.signedinteger]:
    """The smallest integer type for numbers up to `size`, which halves the memory traffic if possible."""
    return np.int32 if size < 2**31 else np.int64
