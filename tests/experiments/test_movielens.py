"""MovieLens-10M and -20M as the field splits and measures them, on small logs and, where it is there, on ML-100K."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.movielens import Fold, Ratings

from dpformer.errors import DpformerError
from experiments import movielens, rating_means


def log_of(users: int = 60, seed: int = 0) -> Ratings:
    """Rows by user, as in the files; every user has twelve of 20 items, half of them liked, at shuffled times."""
    rng = np.random.default_rng(seed)
    items = np.concatenate([rng.choice(20, 12, replace=False) + 100 for _ in range(users)])
    ratings = np.where(np.arange(12 * users) % 2, 5.0, 2.0)
    times = np.concatenate([rng.permutation(12) for _ in range(users)])
    return Ratings(np.repeat(np.arange(users) + 1, 12), items, ratings, times)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,122,3.5,838985046\n2,185,4.0,838983525\n"),
        ("ratings.dat", "1::122::3.5::838985046\n2::185::4::838983525\n"),
        ("u.data", "1\t122\t3.5\t838985046\n2\t185\t4\t838983525\n"),
    ],
)
def test_all_three_formats(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    log = movielens.read_ratings(tmp_path / name)
    assert log.users.tolist() == [1, 2] and log.items.tolist() == [122, 185]
    assert log.ratings.tolist() == [3.5, 4.0] and log.times.tolist() == [838985046, 838983525]


def test_a_file_that_is_not_there_or_is_another_is_named(tmp_path: Path) -> None:
    with pytest.raises(DpformerError, match=r"grouplens\.org"):
        movielens.read_ratings(tmp_path / "ratings.csv")
    (tmp_path / "movies.txt").write_text("")
    with pytest.raises(DpformerError, match=r"movies\.txt is not a file of ratings"):
        movielens.read_ratings(tmp_path / "movies.txt")


def test_held_out_users_are_new_and_a_fifth_of_their_items_is_to_be_found() -> None:
    log = log_of()
    split = movielens.new_users(log, held_out=10)
    assert len(np.unique(split.train.users)) == 40 and (split.train.ratings >= 4).all()
    of_user = {tuple(sorted(log.items[(log.users == u) & (log.ratings >= 4)])): u for u in range(1, 61)}
    met = set(split.train.users.tolist())
    for fold in (split.validation, split.test):
        assert len(fold.histories) == 10
        for history, targets in zip(fold.histories, fold.targets, strict=True):
            assert len(targets) == 1 and len(history) == 5  # int(0.2 · 6)
            user = of_user[tuple(sorted(split.items[np.concatenate([history, targets])]))]
            assert user not in met, "nobody is in two parts"
            met.add(user)
            times = dict(zip(log.items[log.users == user], log.times[log.users == user], strict=True))
            assert (np.diff([times[item] for item in split.items[history]]) > 0).all(), "in the order of time"
    with pytest.raises(DpformerError, match="60 users have 5 ratings of 4 or more: too few to hold out 30"):
        movielens.new_users(log, held_out=30)


def test_the_split_has_the_random_numbers_of_the_published_one() -> None:
    """What `np.random.seed(98765)` and `np.random.choice` gave the others, user by user in the order of their ids."""
    log = log_of()
    split, order = movielens.new_users(log, held_out=10), np.random.RandomState(98765).permutation(60)
    assert set(split.train.users.tolist()) == set((order[:40] + 1).tolist())
    random = np.random.RandomState(98765)
    for place, user in enumerate(sorted((order[50:] + 1).tolist())):
        liked = log.items[(log.users == user) & (log.ratings >= 4)]
        hidden = random.choice(6, size=1, replace=False)
        assert split.items[split.test.targets[place]].tolist() == liked[hidden].tolist()


def test_metrics_by_hand() -> None:
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, 5.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
    fold = Fold([np.array([0]), np.array([4])], [np.array([1, 3]), np.array([0])])
    found = movielens.metrics(lambda histories: scores, fold, ks=(1, 2))
    # user 1 is shown 1, 2, 3, 4 and wants 1 and 3; user 2 is shown 3, 2, 1, 0 and wants 0
    assert found["recall@1"] == pytest.approx((1 / 1 + 0) / 2) and found["recall@2"] == pytest.approx((1 / 2 + 0) / 2)
    assert found["ndcg@2"] == pytest.approx((1 / (1 + 1 / math.log2(3)) + 0) / 2)
    assert torch.isfinite(scores).all(), "scores are not written into"


def test_a_model_ranks_the_items_of_new_users() -> None:
    split = movielens.new_users(log_of(400), held_out=50)
    choices = {"model": "counts", "epsilon": 5.0, "delta": 1e-5, "assume_items_public": True, "seed": 0}
    found = movielens.recommend(split, choices, split.test)
    assert found["epsilon"] <= 5 and 0 <= found["recall@20"] <= 1
    floor = movielens.popular(split, split.test)
    assert floor["recall@20"] == pytest.approx(1.0), "of 20 items all are listed"


def test_ratings_are_split_in_80_10_and_10() -> None:
    rows = movielens.rating_split(1000)
    assert [len(part) for part in rows] == [800, 100, 100]
    assert sorted(np.concatenate(rows).tolist()) == list(range(1000))


def test_a_user_adds_no_more_than_the_noise_is_for() -> None:
    """√2 for both sums together, whatever the user did."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 50):
        items, ratings = rng.permutation(50)[:count], rng.choice([0.5, 5.0, 90.0], count)
        sums = rating_means.exact_sums(np.zeros(count, dtype=int), items, ratings, 50)
        assert math.hypot(*(np.linalg.norm(each) for each in sums)) <= 2**0.5 + 1e-12


def test_means_of_items_and_users_are_found_and_noise_costs() -> None:
    rng = np.random.default_rng(0)
    users, items = (each.ravel() for each in np.meshgrid(np.arange(300), np.arange(40), indexing="ij"))
    truth = np.clip(3 + rng.normal(0, 0.5, 40)[items] + rng.normal(0, 0.5, 300)[users], 0.5, 5)
    ratings = np.clip(truth + rng.normal(0, 0.2, len(truth)), 0.5, 5)
    rows = movielens.rating_split(len(ratings))
    found = [rating_means.rmse_of_means(users, items, ratings, rows, e, 1e-5, seed=0) for e in (1.0, 20.0, math.inf)]
    assert found[0]["rmse"] > found[1]["rmse"] > found[2]["rmse"] and found[2]["rmse"] < 0.24
    assert found[2]["rmse of one mean"] > 0.6


@pytest.mark.skipif("DPFORMER_DATA" not in os.environ, reason="DPFORMER_DATA is not set")
def test_ml_100k() -> None:
    """943 users: what is above popularity and below one mean, with little privacy."""
    log = movielens.read_ratings(Path(os.environ["DPFORMER_DATA"]) / "ml-100k" / "u.data")
    assert len(log) == 100_000
    split = movielens.new_users(log, held_out=100)
    choices = {"model": "counts", "epsilon": 20.0, "delta": 1e-5, "assume_items_public": True, "seed": 0}
    counts, floor = movielens.recommend(split, choices, split.test), movielens.popular(split, split.test)
    assert counts["recall@20"] > 1.2 * floor["recall@20"] and counts["ndcg@20"] > floor["ndcg@20"]
    found = rating_means.rmse_of_means(
        log.users, log.items, log.ratings, movielens.rating_split(len(log)), 20.0, 1e-5, 0
    )
    assert 0.93 < found["rmse"] < 0.98 < found["rmse of one mean"]
