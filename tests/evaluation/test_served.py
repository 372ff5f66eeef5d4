"""What evaluation says is what `recommend` delivers: repeats, doubled rows, coverage, accuracy by popularity."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

import dpformer as dp
from dpformer.data import Dataset
from dpformer.evaluation import evaluate, hit, popularity
from dpformer.evaluation.breakdown import by_popularity, popularity_parts, warnings
from dpformer.evaluation.metrics import DEPTH as LIST
from dpformer.evaluation.rankers import DenseRanker, KnownItems
from dpformer.evaluation.sparse_ranker import SparseRanker
from dpformer.runs.config import Config
from dpformer.runs.run import train
from tests.tiny_runs import printed, refused

ITEMS = 30


def repeat_logs(share: float, users: int = 400) -> list[list[int]]:
    """Users go round a circle of items; the last item of some is one that they had met."""
    random = np.random.default_rng(0)
    histories = []
    for user in range(users):
        start = random.integers(ITEMS)
        history = [int((start + step) % ITEMS) for step in range(8)]
        histories.append(history[:-1] + ([history[-2]] if user < share * users else history[-1:]))
    return histories


def write(path: Path, histories: Sequence[Sequence[int]], times: int = 1) -> Path:
    rows = [
        f"u{user},i{item},{place}" for user, h in enumerate(histories) for place, item in enumerate(np.repeat(h, times))
    ]
    path.write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    return path


def fitted(log: Path, out: Path) -> Path:
    train(Config.make(file=log, model="counts", epsilon=50.0, assume_items_public=True, seed=0), out)
    return out


def delivered(run: Path, log: Path, *, filter_seen: bool) -> float:
    """HIT@10 of what `recommend` gives for every user's history without the last item."""
    rec = dp.load(run)
    rows = [line.split(",") for line in log.read_text().splitlines()[1:]]
    histories: dict[str, list[str]] = {}
    for user, item, _ in rows:
        histories.setdefault(user, []).append(item)
    targets = {user: items.pop() for user, items in histories.items()}
    frame = rec.recommend(histories, k=10, filter_seen=filter_seen)
    given = set(zip(frame["user_id"], frame["item_id"], strict=True))
    return float(np.mean([(user, item) in given for user, item in targets.items()]))


@pytest.mark.parametrize(("share", "times"), [(0.25, 1), (0.0, 2)])
def test_the_headline_is_what_recommend_delivers(tmp_path: Path, share: float, times: int) -> None:
    """A log with 25% repeat targets, and one with every row doubled, whose targets are all repeats."""
    log = write(tmp_path / "log.csv", repeat_logs(share), times)
    run = fitted(log, tmp_path / "run")
    for options in ([], ["--allow-seen"]):
        facts = json.loads(printed("evaluate", run, "--json", "--samples", 10, *options))
        found = facts["metrics"]["model"][facts["headline_policy"]]["hit@10"]["value"]
        assert found == pytest.approx(delivered(run, log, filter_seen=not options), abs=1e-9)
        assert facts["repeats"] == (1.0 if times == 2 else share)
        if not options:  # the policy of papers promises more than is delivered
            assert facts["metrics"]["model"]["masked"]["hit@10"]["value"] > found
            assert found <= 1 - facts["repeats"]
    text = printed("evaluate", run, "--samples", 10)
    assert f"{facts['repeats']:.1%} of the held-out items are in the history" in text and "as in papers" in text
    assert ("duplicate rows" in " ".join(text.split())) == (times == 2)
    again = dp.load(run).evaluate(exact=True, filter_seen=False)
    assert again["headline_policy"] == "unmasked"


def test_private_metrics_have_one_policy(tmp_path: Path) -> None:
    run = fitted(write(tmp_path / "log.csv", repeat_logs(0)), tmp_path / "run")
    assert "omit --allow-seen" in refused("evaluate", run, "--private-metrics", "--allow-seen")


def any_scores(histories: list[np.ndarray]) -> torch.Tensor:
    return torch.stack([torch.sin(torch.arange(ITEMS) * (1.0 + float(h.sum() % 7))) for h in histories])


def _without(histories: list[np.ndarray], known: np.ndarray) -> torch.Tensor:
    """The scores of a model that has the known items only, and gets histories in its own numbers."""
    return any_scores(histories)[:, torch.from_numpy(known)]


@pytest.mark.parametrize("filter_seen", [True, False])
def test_coverage_against_one_user_at_a_time(filter_seen: bool) -> None:
    dataset = Dataset.from_histories(repeat_logs(0.25, users=40), ITEMS)
    known = np.arange(ITEMS) != 3
    numbers = np.where(known, np.cumsum(known) - 1, -1)  # the model lacks item 3
    fewer = KnownItems(DenseRanker(lambda histories: _without(histories, known), ITEMS - 1), numbers)
    found = evaluate(fewer, dataset, filter_seen=filter_seen)
    listed = np.zeros(ITEMS, dtype=int)
    for user, target, rank in zip(found.users, found.targets, found.ranks.tolist(), strict=True):
        history = dataset.test_history(int(user))
        scores = any_scores([numbers[history[known[history]]]])[0].tolist()
        allowed = [i for i in range(ITEMS) if known[i] and not (filter_seen and i in history)]
        best = sorted(allowed, key=lambda item: -scores[item])[:LIST]
        listed[best] += 1
        assert (rank <= LIST) == (target in best)
    assert found.listed.tolist() == listed.tolist() and found.of_lists["coverage@10"] == (listed > 0).mean()


def test_parts_by_popularity_add_up_to_all_users() -> None:
    dataset = Dataset.from_histories(repeat_logs(0.25, users=40), ITEMS)
    model, baseline = evaluate(any_scores, dataset), evaluate(popularity(dataset), dataset)
    rows = by_popularity({"model": model, "popularity": baseline}, 10)
    assert sum(row["users"] for row in rows) == len(model.users)
    mean = sum(row["users"] * row["model"]["hit@10"] for row in rows) / len(model.users)
    assert mean == pytest.approx(float(hit(model.ranks, 10)))
    assert popularity_parts(np.zeros(4, dtype=int)).tolist() == [2] * 4


def test_a_model_below_popularity_is_warned_of() -> None:
    dataset = Dataset.from_histories([[0, 1, 2]] * 5 + [[0, 3, 2]] * 5 + [[2, 1, 0]], 20)
    best = evaluate(popularity(dataset), dataset)
    worst = evaluate(SparseRanker(-dataset.item_counts().astype(np.float64)), dataset)
    assert any("below popularity" in said for said in warnings(worst, best, "popularity", (10,)))
    assert not warnings(best, best, "popularity", (10,))
