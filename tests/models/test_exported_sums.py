"""Sums that an export records are the dense products, in float64."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.models.exported_sums import product_with_columns, sum_of_rows


@given(
    st.integers(1, 6), st.integers(1, 5), st.integers(0, 12), st.integers(1, 4), st.integers(1, 5), st.integers(0, 99)
)
@settings(max_examples=60)
def test_sparse_sums_are_dense_products(
    rows: int, columns: int, entries: int, batch: int, length: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    origins = np.sort(random.integers(0, rows, entries))  # rows may be empty, and a cell may be there twice
    targets, values = random.integers(0, columns, entries), random.random(entries)
    offsets = np.searchsorted(origins, np.arange(rows + 1))
    dense = np.zeros((rows, columns))
    np.add.at(dense, (origins, targets), values)
    items = random.integers(0, rows, (batch, length))
    weights = random.random((batch, length)) * random.integers(0, 2, (batch, length))  # some are 0
    sparse = [torch.from_numpy(part) for part in (offsets, targets, values.astype(np.float32))]
    given_weights = torch.from_numpy(weights.astype(np.float32))
    found = sum_of_rows(torch.from_numpy(items), given_weights, *sparse, torch.zeros(batch, columns))
    assert np.allclose(found, np.einsum("bl,blc->bc", weights, dense[items]), rtol=1e-5, atol=1e-6)
    interest = random.random((batch, columns))
    found = product_with_columns(torch.from_numpy(interest.astype(np.float32)), *sparse)
    assert np.allclose(found, interest @ dense.T, rtol=1e-5, atol=1e-6)
