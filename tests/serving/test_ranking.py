"""Sparse ranking beside the model's own scores; explanations that add up; similar items by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.errors import DpformerError
from dpformer.models.counts import TransitionCounts
from dpformer.models.evidence import Evidence
from dpformer.runs import load_release
from dpformer.runs.model_file import Release
from dpformer.serving.ranking import Ranker
from tests.tiny_runs import ranking_of, same_ranking, tiny_run

ITEMS = 12


def made_up(seed: int = 0, items: int = ITEMS, kept: float = 0.4) -> Release:
    """A model of counts with random transitions, some rows empty."""
    random = np.random.default_rng(seed)
    table = random.random((items, items)) * (random.random((items, items)) < kept)
    table[2] = 0
    table /= table.sum(1, keepdims=True) + 0.5
    rows, targets = np.nonzero(table)
    model = TransitionCounts(items, len(rows))
    model.popularity.copy_(torch.from_numpy(random.dirichlet(np.ones(items))))
    model.offsets.copy_(torch.from_numpy(np.searchsorted(rows, np.arange(items + 1))))
    model.targets.copy_(torch.from_numpy(targets))
    model.chances.copy_(torch.from_numpy(table[rows, targets]))
    return Release(model.eval(), [f"i{item}" for item in range(items)], None, {})


def packed(histories: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    return items, np.cumsum([0, *map(len, histories)])


Histories = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=30), min_size=1, max_size=6)


@given(Histories, st.integers(0, 3))
@settings(max_examples=50)
def test_evidence_is_the_models_own_score(histories: list[list[int]], seed: int) -> None:
    model = made_up(seed).model
    found = np.log(Evidence(model).of(*packed(histories)).astype(np.float64))
    expected = model.double().scores(histories).numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@given(Histories, st.integers(1, ITEMS + 2), st.booleans())
@settings(max_examples=50)
def test_top_is_a_sort_of_all_scores(histories: list[list[int]], k: int, filter_seen: bool) -> None:
    release = made_up(1)
    top = Ranker(release).top(*packed(histories), k, filter_seen=filter_seen)
    assert top.items.shape == top.scores.shape == (len(histories), k)
    scores = release.model.scores(histories).double().numpy()
    for row, history in enumerate(histories):
        unseen = [item for item in range(ITEMS) if not (filter_seen and item in history)]
        best = sorted(unseen, key=lambda item: -scores[row, item])[:k]
        assert top.items[row, : len(best)].tolist() == best  # random floats: no ties
        assert (top.items[row, len(best) :] == -1).all() and np.isneginf(top.scores[row, len(best) :]).all()
        np.testing.assert_allclose(top.scores[row, : len(best)], scores[row, best], rtol=2e-5, atol=2e-5)


def test_blocks_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(3)
    histories = [random.integers(0, ITEMS, size=random.integers(0, 25)).tolist() for _ in range(40)]
    whole = Ranker(made_up()).top(*packed(histories), 5)
    monkeypatch.setattr("dpformer.serving.ranking.SCORES_AT_ONCE", 7 * ITEMS)
    parts = Ranker(made_up()).top(*packed(histories), 5)
    np.testing.assert_array_equal(parts.items, whole.items)
    assert Ranker(made_up()).top(*packed([]), 5).items.shape == (0, 5)


@given(st.lists(st.integers(0, ITEMS - 1), max_size=30))
@settings(max_examples=30)
def test_contributions_of_counts_are_the_terms_of_the_sum(history: list[int]) -> None:
    release = made_up(2)
    model, items = release.model, np.arange(ITEMS)
    shares, popularity = Ranker(release).contributions(np.array(history, dtype=np.int64), items)
    np.testing.assert_allclose(shares.sum(0) + popularity, 1, rtol=1e-6)
    total = model.double().scores([history]).exp()[0].numpy()
    weights = [0.75 ** (len(history) - 1 - place) * (len(history) - place <= 20) for place in range(len(history))]
    for place, item in enumerate(history):
        row = np.zeros(ITEMS)
        for at in range(int(model.offsets[item]), int(model.offsets[item + 1])):
            row[int(model.targets[at])] = float(model.chances[at])
        np.testing.assert_allclose(shares[place] * total, weights[place] / sum(weights) * row, rtol=1e-4, atol=1e-8)


def test_similar_items_have_like_rows() -> None:
    release = made_up(4)
    model = release.model
    table = np.zeros((ITEMS, ITEMS))
    for item in range(ITEMS):
        for at in range(int(model.offsets[item]), int(model.offsets[item + 1])):
            table[item, int(model.targets[at])] = float(model.chances[at])
    np.fill_diagonal(table, 0)  # repeats say nothing about similarity
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-30)
    for item in range(ITEMS):
        top = Ranker(release).similar(item, 4)
        cosines = unit @ unit[item]
        cosines[item] = 0
        best = [other for other in np.argsort(-cosines, kind="stable")[:4] if cosines[other] > 0]
        assert top.items[0].tolist() == best
        np.testing.assert_allclose(top.scores[0], cosines[best], rtol=1e-5)


def test_a_network_is_ranked_and_explained_by_its_scores(tmp_path_factory: pytest.TempPathFactory) -> None:
    release = load_release(tiny_run(tmp_path_factory) / "model.safetensors")
    ranker, histories = Ranker(release), [[3, 4, 5], [], [7]]
    top = ranker.top(*packed(histories), 4)
    for row, best in enumerate(release.recommend([np.array(h, dtype=np.int64) for h in histories], 4)):
        names = [release.vocabulary[item] for item in top.items[row]]
        same_ranking(zip(names, top.scores[row].tolist(), strict=True), ranking_of(best))
    change, popularity = ranker.contributions(np.array([3, 4, 5]), np.array([6, 7]))
    model = release.model
    with torch.no_grad():
        whole, without = model.scores([[3, 4, 5]])[0], model.scores([[3, 5]])[0]
    np.testing.assert_allclose(change[1], (whole - without)[[6, 7]].numpy(), atol=1e-5)
    assert np.isnan(popularity).all() and not ranker.quick
    weights = model.output_weight().detach()
    cosines = torch.cosine_similarity(weights[3], weights).numpy()
    similar = ranker.similar(3, 20)
    assert 3 not in similar.items and similar.scores[0, 0] == pytest.approx(np.delete(cosines, 3).max(), abs=1e-5)


def test_what_ranks_nothing_is_refused(tmp_path: Path) -> None:
    text = Release(made_up().model, [f"i{item}" for item in range(ITEMS)], None, {"text": {}})
    with pytest.raises(DpformerError, match="language model"):
        Ranker(text)
    with pytest.raises(DpformerError, match="k is 0"):
        Ranker(made_up()).top(*packed([[1]]), 0)
