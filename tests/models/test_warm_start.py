"""Items that start from transition counts: the best factors there are of what the counts say, and of nothing else."""

import numpy as np
import pytest
import torch
from torch import Tensor

import dpformer as dp
from dpformer.models import GRU, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.models.warm_start import low_rank_items


def counts_of(chances: Tensor) -> TransitionCounts:
    """A model of counts with these chances (M, M)."""
    rows, targets = chances.nonzero(as_tuple=True)
    model = TransitionCounts(len(chances), len(rows))
    model.offsets.copy_(torch.searchsorted(rows, torch.arange(len(chances) + 1)))
    model.targets.copy_(targets)
    model.chances.copy_(chances[rows, targets])
    popularity = torch.rand(len(chances), generator=torch.Generator().manual_seed(1)) + 0.1
    model.popularity.copy_(popularity / popularity.sum())
    return model


def random_chances(items: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    chances = torch.rand(items, items, generator=random) * (torch.rand(items, items, generator=random) < 0.3)
    return chances.fill_diagonal_(0) / (chances.sum(1, keepdim=True) + 1)


@pytest.mark.parametrize(("items", "dim"), [(60, 8), (60, 29), (20, 16), (10, 16), (5, 4)])
def test_they_are_the_best_of_that_rank(items: int, dim: int) -> None:
    """Against all eigenvalues in float64, for catalogues large and small."""
    counts = counts_of(random_chances(items))
    likelier = torch.zeros(items, items, dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(items), counts.offsets.diff())
    likelier[rows, counts.targets] = (counts.chances.double() / counts.popularity.double()[counts.targets]).sqrt()
    values, vectors = torch.linalg.eigh((likelier + likelier.T) / 2)
    best = vectors[:, -dim:] @ torch.diag(values[-dim:].clamp(min=0)) @ vectors[:, -dim:].T
    found = low_rank_items(counts, dim).double()
    assert found.shape == (items, dim) and found.square().sum(1).mean() == pytest.approx(1, rel=1e-5)
    torch.testing.assert_close(found @ found.T, best / best.trace() * items, rtol=1e-4, atol=1e-4)
    assert torch.equal(low_rank_items(counts, dim), found.float()), "the same again"


def test_items_the_counts_do_not_know_have_no_row() -> None:
    chances = random_chances(40)
    chances[7], chances[:, 7] = 0, 0
    found = low_rank_items(counts_of(chances), 6)
    assert not found[7].any() and found[torch.arange(40) != 7].any(1).all()
    assert not low_rank_items(counts_of(torch.zeros(40, 40)), 6).any(), "counts of nothing"


@pytest.mark.parametrize("shared", [True, False])
def test_a_model_starts_from_them_where_they_know_something(shared: bool) -> None:
    factors = torch.randn(12, 8)
    factors[3] = 0
    model = Transformer(12, 5, dim=8, shared=shared)
    before = [table.clone() for table in (model.items.weight, model.output_weight())]
    model.initialise_items(factors)
    for table, old in zip((model.items.weight, model.output_weight()), before, strict=True):
        assert torch.equal(table[3], old[3]) and torch.equal(table[:3], factors[:3])
        assert torch.equal(table[4:], factors[4:])
    GRU(12, 5, dim=8).initialise_items(factors)


def test_items_that_follow_one_another_start_alike() -> None:
    """Two circles of items that never meet, through the release: alike within, not across."""
    rng = np.random.default_rng(0)
    histories = [10 * (user % 2) + (rng.integers(10) + np.arange(12)) % 10 for user in range(3000)]
    counts = TransitionCounts.fit(histories, 20, 0.5, ledger=dp.Ledger(), seed=0)
    found = torch.nn.functional.normalize(low_rank_items(counts, 4), dim=1)
    alike = found @ found.T
    within, across = alike[:10, :10].mean(), alike[:10, 10:].abs().mean()
    assert within > 0.3 > 3 * across
