"""Counts and a Transformer under one budget: what is added up is what is claimed."""

import numpy as np
import pytest
import torch

import dpformer as dp
from dpformer.accounting.events import PoissonGaussian
from dpformer.data import Dataset
from dpformer.models import Batch
from experiments import join

SETTINGS = {
    "epsilon": 8.0, "share": 0.5, "epochs": 2, "batch_size": 10, "learning_rate": 1e-2, "length": 6, "dim": 8,
    "blocks": 1, "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    histories = [(rng.integers(12) + np.arange(rng.integers(4, 9))) % 12 for _ in range(40)]
    return Dataset.from_histories(histories, 12, max_length=None, validation=True)


def test_both_parts_together_stay_within_the_budget() -> None:
    event = join.budget(5.0, 1e-3, 0.7)
    sigma = dp.calibrate(epsilon=5.0, delta=1e-3, sample_rate=0.1, steps=20, others=[event])
    both = dp.Ledger([event, PoissonGaussian(sigma, 0.1, 20, label="training", private=False)])
    assert 4.9 < both.epsilon(1e-3) <= 5.0
    assert dp.Ledger([join.budget(5.0, 1e-3, 1.0)]).epsilon(1e-3) == pytest.approx(5.0, abs=0.01)


def test_a_prior_of_nothing_changes_no_loss_and_another_is_added_to_the_logits() -> None:
    torch.manual_seed(0)
    model = join.Residual(12, 6, dim=8, blocks=1).eval()
    batch = Batch.from_histories([np.array([1, 2, 3, 4]), np.array([5, 6]), np.array([7])], 6)
    nothing = torch.zeros(*batch.items.shape, 12)
    torch.testing.assert_close(model.losses(batch, nothing), model(batch))
    prior = torch.randn_like(nothing)
    found = model.losses(batch, prior)
    logits = model.hidden(batch) @ model.items.weight.T + prior
    for user, targets in enumerate(batch.targets):  # one position after the other
        each = [-logits[user, t].log_softmax(0)[item] for t, item in enumerate(targets.tolist()) if item >= 0]
        torch.testing.assert_close(found[user], torch.stack(each).mean() if each else torch.tensor(0.0))


@pytest.mark.parametrize("how", ["ensemble", "residual"])
def test_a_run_tells_every_way_to_add_up(how: str, dataset: Dataset) -> None:
    found = join.run("tiny", dataset, how, SETTINGS)
    assert found["joined"]["0"] == found["joined"]["mixture 0"] == found["counts"], "λ = 0 is counts alone"
    assert len(found["joined"]) == 1 + 2 * len(join.WEIGHTS) and found["training sigma"] > 0
