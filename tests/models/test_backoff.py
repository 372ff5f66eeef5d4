"""Back-off to attributes: against a dense twin in float64, useless attributes, explanations, release file."""

import math
from itertools import permutations

import numpy as np
import pytest
import torch

import dpformer as dp
from dpformer.data.attributes import Attributes
from dpformer.data.near_pairs import near_pairs
from dpformer.engines.sums import ArraySums
from dpformer.errors import DpformerError
from dpformer.models import backoff as backoff_module
from dpformer.models.backoff import fit_backoff
from dpformer.models.counts import HINT, ROW_PRIOR, TransitionCounts, _directed
from dpformer.models.evidence import Evidence
from dpformer.models.shrinkage import posterior_means
from dpformer.models.walks import with_walks
from dpformer.queries.transitions import rounds as counts_release
from dpformer.queries.transitions.rounds import TransitionRelease, exact_transition_sums, release_transitions
from dpformer.runs.model_file import load_release, save_release

ITEMS, GROUPS, USERS = 60, 6, 3000


def log(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Users who stay within a group of ten items nine times in ten."""
    rng = np.random.default_rng(seed)
    group = rng.integers(GROUPS, size=(USERS, 1))
    stay = rng.random((USERS, 5)) < 0.9
    items = np.where(stay, group, rng.integers(GROUPS, size=(USERS, 5))) + GROUPS * rng.integers(10, size=(USERS, 5))
    return items.ravel(), np.arange(0, 5 * USERS + 1, 5)


def facts() -> Attributes:
    rows = [[("group", str(i % GROUPS)), ("size", "big" if i < 30 else "small"), ("id", str(i))] for i in range(ITEMS)]
    return Attributes.of_items(rows)


def released(sigma: float = 1.0, seed: int = 0, attributes: Attributes | None = None) -> TransitionRelease:
    near = None if attributes is None else near_pairs(attributes)
    return release_transitions(*log(), ITEMS, sigma, near=near, seed=seed)


@pytest.fixture(scope="module")
def model() -> TransitionCounts:
    found = TransitionCounts.from_release(released(4.0), facts())
    assert found.num_attributes and 0 < float(found.backoff) < 0.4
    return found


def dense(model: TransitionCounts) -> tuple[np.ndarray, np.ndarray]:
    """T and K, cell by cell."""
    m = model.num_items
    table = np.zeros((m, m))
    for a in range(m):
        for place in range(int(model.offsets[a]), int(model.offsets[a + 1])):
            table[a, model.targets[place]] = model.chances[place]
    has = np.zeros((m, model.num_attributes))
    for a in range(m):
        has[a, model.attribute_links[model.attribute_offsets[a] : model.attribute_offsets[a + 1]].numpy()] = 1
    reach = has * model.attribute_weights.double().numpy()
    reach /= np.maximum(reach.sum(1, keepdims=True), 1e-300)
    pulled = has.T * model.pull.double().numpy()
    pulled /= pulled.sum(1, keepdims=True)
    return table, float(model.backoff) * reach @ pulled


def test_scores_are_those_of_dense_matrices(model: TransitionCounts) -> None:
    table, backed = dense(model)
    histories = [[], [3], [3, 9, 3, 50], list(range(40))]
    for history, row in zip(histories, model.scores(histories), strict=True):
        latest = history[::-1][:20]
        alphas = 1 / np.arange(1, len(latest) + 1)
        claims = sum(
            (a * (table + backed)[x] for a, x in zip(alphas / alphas.sum(), latest, strict=True)), np.zeros(ITEMS)
        )
        expected = np.log(claims + HINT * model.popularity.double().numpy())
        np.testing.assert_allclose(row.numpy(), expected, rtol=1e-5)


def test_what_an_export_records_gives_the_same(model: TransitionCounts) -> None:
    items, lengths = torch.tensor([[3, 9, 50], [7, 0, 0], [0, 0, 0]]), torch.tensor([3, 1, 0])
    torch.testing.assert_close(model.next_scores(items, lengths), model.scores([[3, 9, 50], [7], []]))


def test_parts_of_an_explanation_add_up_to_the_score(model: TransitionCounts) -> None:
    history = [3, 9, 3, 50, 12]
    scores = model.scores([history])[0]
    for item in range(ITEMS):
        found = model.explain(history, item)
        assert found.score == pytest.approx(float(scores[item]), abs=1e-5)
        assert sum(share for _, share in found.shares()) == pytest.approx(1)
        assert {part.item for part in found.parts} <= {None, *history}
    best = model.explain([12], 18)  # the same group
    assert ("group", "0") in {part.attribute for part in best.parts}
    assert [part.kind for part in model.explain([], 18).parts] == ["popularity"]
    with pytest.raises(ValueError, match="item 60 is outside"):
        model.explain([3], 60)


@pytest.mark.parametrize("dense", [0, 1 << 24])
def test_what_is_served_is_what_the_model_says(
    model: TransitionCounts, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fast products, which batches and the service use, know the attributes too."""
    monkeypatch.setattr("dpformer.models.evidence.DENSE", dense)
    histories = [[3, 9, 3, 50], [12], list(range(40))]
    evidence = Evidence(model)
    packed, offsets = np.concatenate(histories), np.cumsum([0, *map(len, histories)])
    np.testing.assert_allclose(np.log(evidence.of(packed, offsets)), model.scores(histories).numpy(), rtol=1e-4)
    parts = evidence.parts(np.array([3, 9, 50]), np.array([5, 18]))
    expected = [model.explain([3, 9, 50], item).total for item in (5, 18)]
    np.testing.assert_allclose(parts.sum(0), expected, rtol=1e-4)


def test_the_attribute_behind_a_contribution_is_the_one_that_explains_most(model: TransitionCounts) -> None:
    history, items = np.array([3, 9, 50]), np.arange(ITEMS)
    found = Evidence(model).attributes_behind(history, items)
    assert (found >= 0).any() and (found < 0).any()
    for place, origin in enumerate(history.tolist()):
        for item in items.tolist():
            parts = [part for part in model.explain([origin], item).parts if part.item == origin]
            direct = sum(part.value for part in parts if part.attribute is None)
            shared = [part for part in parts if part.attribute is not None]
            if sum(part.value for part in shared) > direct:
                assert model.attribute_names[found[place, item]] == shared[0].attribute  # the largest is first
            else:
                assert found[place, item] == -1


def test_an_item_that_nobody_met_is_recommended_by_its_attributes() -> None:
    items, offsets = log()
    known = facts()
    rows = np.arange(ITEMS + 1)
    rows[-1] = 4  # new in the catalogue, with the attributes of item 4
    release = release_transitions(items, offsets, ITEMS + 1, 1.0, seed=0)
    new = TransitionCounts.from_release(release, known.of_rows(rows))
    scores = new.scores([[4, 10, 16, 22]])[0]
    others = [item for item in range(ITEMS) if item % GROUPS != 4]
    assert float(scores[ITEMS]) > float(scores[others].median())
    assert not len(new.targets[new.targets == ITEMS]) or new.num_attributes


@pytest.mark.parametrize("seed", range(5))
def test_attributes_dealt_to_other_items_are_not_believed(seed: int) -> None:
    """The failure it guards against: back-off to useless attributes costs up to a fifth of NDCG."""
    dealt = facts().of_rows(np.random.default_rng(seed).permutation(ITEMS))
    release = released(1.0, seed, dealt)
    found = fit_backoff(release, dealt)
    assert found is None or found.strength < 0.1
    if found is not None:
        return
    alone, shuffled = (TransitionCounts.from_release(release, attributes) for attributes in (None, dealt))
    assert all(torch.equal(a, b) for a, b in zip(alone.buffers(), shuffled.buffers(), strict=True))


def test_a_useless_column_does_not_spoil_a_useful_one() -> None:
    found = fit_backoff(released(), facts())
    assert found is not None
    assert ("group", "1") in found.attributes.names
    assert not any(column == "size" for column, _ in found.attributes.names)


def test_weights_and_pull_are_their_formulas() -> None:
    """An attribute's weight by its lift, times the chance that two draws of its items differ."""
    release, attributes = released(4.0), facts().with_pairs()
    found = fit_backoff(release, facts())
    assert found is not None
    pairs = release.items[release.pairs]
    totals = np.maximum(release.total - 1.5 * release.total_deviation, 0)
    seen = totals > 0
    lifts, trust = backoff_module._lifts(
        backoff_module.matrix(attributes), attributes, release.items, pairs[seen], totals[seen]
    )
    q, kept = found.popularity, [list(attributes.names).index(name) for name in found.attributes.names]
    has = backoff_module.matrix(attributes).toarray()[:, kept]
    pull = [q[b] ** 0.6 / math.sqrt(max(has[b].sum(), 1)) for b in range(ITEMS)]
    np.testing.assert_allclose(found.pull, pull)
    for place, g in enumerate(kept):
        members = [b for b in range(ITEMS) if has[b, place]]
        share = {b: pull[b] / sum(pull[c] for c in members) for b in members}
        differ = sum(share[b] * share[c] for b, c in permutations(members, 2))
        by_lift = trust[g] * ((lifts[g] - 1) / math.sqrt(sum(q[b] for b in members))) ** 0.75
        assert found.weights[place] == pytest.approx(by_lift * differ)


def test_rows_with_attributes_are_more_even_and_keep_their_sums(model: TransitionCounts) -> None:
    """T of the formulas, a cell at a time, beside the one without evenness."""
    release = released(4.0)
    known = fit_backoff(release, facts())
    assert known is not None and known.evenness == pytest.approx(0.1 * known.trust)
    thresholds = with_walks(known.thresholds, release)
    counts = np.zeros((ITEMS, ITEMS))
    for (a, b), forward, backward in zip(release.items[release.pairs], *_directed(release, thresholds), strict=True):
        counts[a, b], counts[b, a] = forward, backward
    table, e = np.zeros((ITEMS, ITEMS)), known.evenness
    for a in range(ITEMS):
        parts = [counts[a, b] ** (1 - e) / (counts[:, b].sum() + 30) ** e for b in range(ITEMS)]
        table[a] = np.array(parts) / max(sum(parts), 1e-300) * counts[a].sum() / (counts[a].sum() + 30)
    np.testing.assert_allclose(dense(model)[0], table, rtol=1e-5, atol=1e-9)
    assert (table > 0).sum() > ITEMS


def test_lifts_are_those_of_pairs_counted_one_by_one() -> None:
    release, attributes = released(), facts()
    pairs = release.items[release.pairs]
    totals = np.maximum(release.total - 1.5 * release.total_deviation, 0)
    shared, chance = backoff_module._shared(backoff_module.matrix(attributes), pairs, totals)
    margin = np.zeros(ITEMS)
    for (a, b), total in zip(pairs, totals, strict=True):
        margin[[a, b]] += total
    margin /= margin.sum()
    different = sum(margin[a] * margin[b] for a, b in permutations(range(ITEMS), 2))
    has = backoff_module.matrix(attributes).toarray()
    for g in range(len(attributes)):
        together = sum(t for (a, b), t in zip(pairs, totals, strict=True) if has[a, g] and has[b, g])
        by_luck = sum(margin[a] * margin[b] for a, b in permutations(np.flatnonzero(has[:, g]), 2)) / different
        assert shared[g] == pytest.approx(together)
        assert chance[g] == pytest.approx(by_luck * totals.sum())


def test_all_noise_of_a_release_with_attributes_is_what_the_event_says(monkeypatch) -> None:
    """1/σ² of every Gaussian that is drawn adds up to that of the one event in the ledger, or less."""
    spent: list[float] = []

    def watch(name: str, deviation: str | int) -> None:
        real = getattr(counts_release, name)

        def spy(*args, **kwargs):
            spent.append(kwargs[deviation] if isinstance(deviation, str) else args[deviation])
            return real(*args, **kwargs)

        monkeypatch.setattr(counts_release, name, spy)

    watch("release_sums", 2)
    watch("release_evidence", 3)
    watch("noisy_above", "deviation")
    watch("_noisy", 1)
    ledger = dp.Ledger()
    items, offsets = log()
    TransitionCounts.fit(items, ITEMS, 0.8, offsets=offsets, attributes=facts(), ledger=ledger, seed=1)
    assert len(spent) == 9  # evidence, popularity twice, six rounds of pairs
    assert sum(deviation**-2 for deviation in spent) <= 0.8**-2
    assert sum(deviation**-2 for deviation in spent) == pytest.approx(0.8**-2, rel=1e-6)
    assert [event.noise_multiplier for event in ledger] == [0.8]


def test_posterior_means_beat_the_noisy_counts_and_keep_their_order() -> None:
    rng = np.random.default_rng(0)
    true = rng.gamma(0.3, 10, 5000)
    noisy = true + 3 * rng.normal(size=5000)
    found = posterior_means(noisy, 3.0)
    assert ((found - true) ** 2).mean() < 0.75 * ((noisy.clip(min=0) - true) ** 2).mean()
    assert (np.diff(found[np.argsort(noisy)]) >= -1e-9).all() and (found > 0).all()
    assert posterior_means(true, 0.0) == pytest.approx(np.maximum(true, 1e-6))


def test_counts_without_noise_are_the_plain_ones() -> None:
    histories = [[0, 1, 2], [2, 1], [0, 1], [3]]
    items, offsets = np.concatenate(histories), np.cumsum([0, 3, 2, 2, 1])
    release = exact_transition_sums(ArraySums.packed(items, offsets), 5)
    assert release.event is None and release.total_deviation == 0
    table = np.zeros((5, 5))
    first = {(0, 1): 1.0, (1, 2): 1.0, (0, 2): 0.88}
    norm = math.sqrt(sum(value**2 for value in first.values()))
    for (a, b), value in first.items():
        table[a, b] += value / norm
    table[2, 1] += 1
    table[0, 1] += 1
    chances = table / (table.sum(1, keepdims=True) + ROW_PRIOR)
    model = TransitionCounts.from_release(release)
    found = np.zeros((5, 5))
    for a in range(5):
        for place in range(int(model.offsets[a]), int(model.offsets[a + 1])):
            found[a, model.targets[place]] = model.chances[place]
    assert found[0, 1] == pytest.approx(chances[0, 1], rel=1e-2), "one direction only"
    assert found.sum() > 0 and np.isfinite(model.scores([[0], []]).numpy()).all()


def test_a_model_with_attributes_is_saved_and_loaded(model: TransitionCounts, tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_release(path, model, vocabulary=[str(i) for i in range(ITEMS)], metadata={})
    again = load_release(path).model
    assert again.attribute_names == model.attribute_names
    torch.testing.assert_close(again.scores([[3, 9]]), model.scores([[3, 9]]), rtol=0, atol=0)
    assert again.explain([12], 18).parts == model.explain([12], 18).parts


@pytest.mark.parametrize(
    ("buffer", "value", "sentence"),
    [
        ("attribute_links", 10**6, "outside the attributes"),
        ("attribute_offsets", -1, "do not cut the links"),
        ("attribute_weights", -1.0, "not positive"),
        ("pull", 0.0, "not positive"),
        ("backoff", 1.5, "not between 0 and 1"),
    ],
)
def test_a_forged_state_is_refused(model: TransitionCounts, tmp_path, buffer: str, value: float, sentence: str) -> None:
    forged = TransitionCounts(**model.arguments)
    forged.load_state_dict(model.state_dict())
    forged.attribute_names = model.attribute_names
    getattr(forged, buffer).view(-1)[0] = value
    save_release(tmp_path / "m", forged, vocabulary=[str(i) for i in range(ITEMS)], metadata={})
    with pytest.raises(DpformerError, match=sentence):
        load_release(tmp_path / "m")


def test_attributes_of_other_items_are_refused() -> None:
    with pytest.raises(ValueError, match="attributes of 3 items for 60 items"):
        fit_backoff(released(), Attributes.of_items([[("a", "b")]] * 3))
