"""Initial item embeddings of a network: low-rank factors of released transition counts. Post-processing, so it is free.

From small random numbers DP training must discover which items are similar, and spends most of its steps on that. The
counts know it already. With T_ab the probability that b follows a and q_b its popularity,

    A_ab = ½(√(T_ab/q_b) + √(T_ba/q_a)) ≈ E_a·E_b

says how much more often than by chance two items meet, where the root limits the weight of rare ones; its d largest
eigenvalues and their vectors give E.
"""

import numpy as np
import torch
from torch import Tensor

from dpformer.models.counts import TransitionCounts


def low_rank_items(counts: TransitionCounts, dim: int) -> Tensor:
    """E (M, d) from the counts: rows of norm 1 on average, and zero for items without counts.

    A fixed rotation spreads the largest eigenvalues over all coordinates, because LayerNorm and Adam treat coordinates
    alike.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.linalg import eigsh

    m = counts.num_items
    targets, rows = counts.targets.numpy(), np.repeat(np.arange(m), counts.offsets.diff().numpy())
    popularity = counts.popularity.double().clamp(min=1e-12).numpy()
    likelier = csr_matrix((np.sqrt(counts.chances.double().numpy() / popularity[targets]), (rows, targets)), (m, m))
    known = np.union1d(rows, targets)
    matrix = ((likelier + likelier.T) / 2)[known][:, known]
    if len(known) > 2 * dim:
        values, vectors = eigsh(matrix, k=dim, which="LA", v0=np.ones(len(known)))
    else:
        values, vectors = np.linalg.eigh(matrix.toarray())
        values, vectors = values[-dim:], vectors[:, -dim:]
    factors = np.zeros((m, dim))
    factors[known, : len(values)] = vectors * np.sqrt(values.clip(min=0))
    size = np.sqrt((factors**2).sum() / max(len(known), 1)) or 1.0
    rotation = np.linalg.qr(np.random.default_rng(0).standard_normal((dim, dim)))[0]
    return torch.from_numpy(factors @ rotation / size).float()
