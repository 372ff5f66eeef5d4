"""Ranking metrics against ir-measures, ties and masks against naive twins."""

import math

import ir_measures
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.evaluation import NonFiniteScores, bootstrap, hit, mrr, ndcg, ranks

# Few distinct scores, so that ties abound.
problems = st.tuples(st.integers(1, 6), st.integers(1, 15), st.integers(1, 6), st.integers(0, 2**32 - 1))


def problem(users: int, items: int, levels: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(levels, (users, items), generator=generator).float() / 3
    targets = torch.randint(items, (users,), generator=generator)
    return scores, targets, torch.rand(users, items, generator=generator) < 0.4


def naive_rank(scores: list[float], target: int, seen: list[bool]) -> int:
    """Sorts, the target behind its ties."""
    ranked = [item for item in range(len(scores)) if item == target or not seen[item]]
    ranked.sort(key=lambda item: (-scores[item], item == target))
    return ranked.index(target) + 1


@settings(max_examples=150)
@given(problems)
def test_ranks_against_a_naive_twin(sizes: tuple[int, int, int, int]) -> None:
    scores, targets, seen = problem(*sizes)
    rows = list(zip(scores.tolist(), targets.tolist(), seen.tolist(), strict=True))
    assert ranks(scores, targets).tolist() == [naive_rank(row, target, [False] * len(row)) for row, target, _ in rows]
    assert ranks(scores, targets, seen=seen).tolist() == [naive_rank(*row) for row in rows]


@settings(max_examples=40)
@given(problems, st.integers(1, 12))
def test_metrics_against_ir_measures(sizes: tuple[int, int, int, int], k: int) -> None:
    scores, targets, seen = problem(*sizes)
    mine = ranks(scores, targets, seen=seen)
    qrels, run = [], []
    for user, target in enumerate(targets.tolist()):
        qrels.append(ir_measures.Qrel(str(user), str(target), 1))
        # trec_eval breaks ties by name; a target moved down by less than any difference of scores is behind its ties.
        for item in range(scores.shape[1]):
            if item == target or not seen[user, item]:
                run.append(
                    ir_measures.ScoredDoc(str(user), str(item), scores[user, item].item() - 0.1 * (item == target))
                )
    measures = {
        f"nDCG@{k}": ndcg(mine, k),
        f"Success@{k}": hit(mine, k),
        "RR": mrr(mine),
    }
    parsed = {name: ir_measures.parse_measure(name) for name in measures}
    theirs = ir_measures.calc_aggregate(list(parsed.values()), qrels, run)
    for name, value in measures.items():
        assert float(value) == pytest.approx(theirs[parsed[name]], abs=1e-6), name


def test_ties_are_pessimistic() -> None:
    """A model without an opinion is last; counting only what is strictly better would call it first."""
    scores, targets = torch.zeros(3, 50), torch.tensor([0, 20, 49])
    assert ranks(scores, targets).tolist() == [50, 50, 50]
    assert float(ndcg(ranks(scores, targets), 10)) == 0
    assert ranks(scores.to(torch.bfloat16), targets).tolist() == [50, 50, 50]


def test_a_target_the_user_has_met_is_ranked() -> None:
    scores, targets = torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([1])
    assert ranks(scores, targets, seen=torch.ones(1, 3, dtype=torch.bool)).tolist() == [1]


def test_by_hand() -> None:
    found = torch.tensor([1, 2, 10, 11])
    assert float(hit(found, 10)) == 0.75
    assert float(ndcg(found, 10)) == pytest.approx((1 + 1 / math.log2(3) + 1 / math.log2(11)) / 4)
    assert float(mrr(found)) == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    scores = torch.zeros(2, 3)
    scores[1, 2] = bad
    with pytest.raises(NonFiniteScores, match="NaN or infinity"):
        ranks(scores, torch.tensor([0, 0]))


def test_bad_arguments_are_refused() -> None:
    scores = torch.zeros(2, 3)
    for targets in (torch.tensor([0, 3]), torch.tensor([-1, 0])):
        with pytest.raises(ValueError, match=r"outside 0\.\.2"):
            ranks(scores, targets)
    with pytest.raises(ValueError, match="scores must be"):
        ranks(scores, torch.tensor([0]))
    with pytest.raises(ValueError, match="seen must be"):
        ranks(scores, torch.tensor([0, 0]), seen=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="no user"):
        ndcg(torch.zeros(0, dtype=torch.long), 10)
    with pytest.raises(ValueError, match="k must be"):
        hit(torch.ones(1, dtype=torch.long), 0)


def test_bootstrap_covers_as_often_as_it_says() -> None:
    """95% intervals of HIT over samples of 300 users hold the true value in about 95% of them."""
    rng, truth, covered = np.random.default_rng(0), 0.3, 0
    for seed in range(300):
        found = torch.from_numpy(np.where(rng.random(300) < truth, 1, 99))
        low, high = bootstrap(lambda r: hit(r, 10), found, samples=300, seed=seed)
        covered += low <= truth <= high
    assert 0.90 <= covered / 300 <= 0.985


def test_bootstrap_is_repeatable_and_in_blocks_the_same_law() -> None:
    found = torch.arange(1, 5000)
    one = bootstrap(mrr, found, samples=900)
    assert one == bootstrap(mrr, found, samples=900)
    deviation = float((1 / found.double()).std()) / math.sqrt(len(found))
    assert one[1] - one[0] == pytest.approx(2 * 1.96 * deviation, rel=0.2)
