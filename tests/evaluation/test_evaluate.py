"""Evaluation over a data set: chunks, both policies, the popularity baseline on real data."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from dpformer.data import Dataset, prepare
from dpformer.errors import DpformerError
from dpformer.evaluation import NonFiniteScores, evaluate, hit, ndcg, popularity, rankers, ranks

MODULE = import_module(evaluate.__module__)


def some_data(validation: bool = False) -> Dataset:
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 20, rng.integers(1, 30)).tolist() for _ in range(40)]
    return Dataset.from_histories(histories, 20, validation=validation)


def scorer(histories: list[np.ndarray]) -> torch.Tensor:
    """Any deterministic function of the whole history, with ties."""
    return torch.stack([torch.bincount(torch.as_tensor(h).long(), minlength=20).float() % 3 for h in histories])


@pytest.mark.parametrize("split", ["test", "validation"])
def test_chunks_and_masks_against_ranks_one_user_at_a_time(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = some_data(validation=True)
    whole = evaluate(scorer, dataset, split=split)
    monkeypatch.setattr(MODULE, "USERS_AT_ONCE", 7)
    monkeypatch.setattr(rankers, "SCORES_AT_ONCE", 70)  # three users at a time
    parts = evaluate(scorer, dataset, split=split)
    assert torch.equal(whole.masked, parts.masked) and torch.equal(whole.unmasked, parts.unmasked)
    users, items = dataset.held_out(split)
    assert whole.users.tolist() == users.tolist()
    for place, (user, item) in enumerate(zip(users, items, strict=True)):
        history = dataset.held_out_histories(np.array([user]), split)[0]
        seen = torch.zeros(1, 20, dtype=torch.bool)
        seen[0, torch.as_tensor(history).long()] = True
        scores, target = scorer([history]), torch.tensor([item])
        assert whole.unmasked[place] == ranks(scores, target)[0]
        assert whole.masked[place] == ranks(scores, target, seen=seen)[0]


def test_result_names_its_policy_and_size() -> None:
    dataset = some_data()
    facts = evaluate(scorer, dataset).to_dict((5, 10), samples=50)
    assert facts["users"] == len(dataset.test_users)
    assert facts["ranking"] == "full ranking over 20 items, ties pessimistic"
    assert set(facts["policies"]) == set(facts["metrics"]) == {"served", "masked", "unmasked"}
    assert set(facts["metrics"]["masked"]) == {"ndcg@5", "hit@5", "ndcg@10", "hit@10", "mrr"}
    for metric in facts["metrics"]["masked"].values():
        assert metric["low"] <= metric["value"] <= metric["high"]


def test_some_users_only() -> None:
    dataset = some_data()
    chosen = dataset.test_users[3:7]
    part, whole = evaluate(scorer, dataset, users=chosen), evaluate(scorer, dataset)
    assert part.users.tolist() == chosen.tolist() and torch.equal(part.masked, whole.masked[3:7])


def test_bad_scores_are_refused() -> None:
    dataset = some_data()
    with pytest.raises(NonFiniteScores):
        evaluate(lambda histories: torch.full((len(histories), 20), torch.nan), dataset)
    with pytest.raises(ValueError, match="scores have shape"):
        evaluate(lambda histories: torch.zeros(len(histories), 19), dataset)
    with pytest.raises(DpformerError, match="no user has a held-out item"):
        evaluate(scorer, Dataset.from_histories([[1, 2], [3]], 20))


def test_popularity_counts_training_items_only() -> None:
    dataset = Dataset.from_histories([[0, 1, 5], [0, 2, 5], [0, 0]], 6)
    assert popularity(dataset).popularity.tolist() == [4, 1, 1, 0, 0, 0]


def test_popularity_on_real_data(real_data: Path) -> None:
    """The floors of the paper's data sets, in SASRec's split: 1.8 / 3.7 and 1.0 / 1.9 per cent."""
    for name, expected in {"ml-1m.txt": (1.80, 3.69), "amazon-games.txt": (0.99, 1.90)}.items():
        dataset = prepare(real_data / name, validation=True)
        found = evaluate(popularity(dataset), dataset).masked
        assert (100 * float(ndcg(found, 10)), 100 * float(hit(found, 10))) == pytest.approx(expected, abs=0.006)
