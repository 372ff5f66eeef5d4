"""Transition counts: sensitivity, budget and noise of the release; the model against a dense twin in float64."""

import math
import tracemalloc
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dpformer.accounting import Ledger
from dpformer.data.attributes import Attributes
from dpformer.data.near_pairs import near_pairs
from dpformer.engines import cells as counts_cells
from dpformer.engines import sums as counts_sums
from dpformer.engines.sums import GRID, WEIGHTS, WINDOW, ArraySums, gathered
from dpformer.kinds.counts_scoring import CountsScoring
from dpformer.models import counts
from dpformer.models.counts import TransitionCounts
from dpformer.models.evidence import Evidence
from dpformer.models.walks import with_walks
from dpformer.queries.frequencies import FrequencyRelease, user_counts
from dpformer.queries.transitions import rounds as counts_release
from dpformer.queries.transitions.attribute_evidence import evidence_share
from dpformer.queries.transitions.rounds import ITEMS, ROUNDS, TransitionRelease, release_transitions

NUM_ITEMS = 9
histories_of = st.lists(st.lists(st.integers(0, NUM_ITEMS - 1), max_size=30), min_size=1, max_size=8)
EVERYTHING = np.arange(NUM_ITEMS)


def packed(histories: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    items = np.array([item for history in histories for item in history], dtype=np.int64)
    return items, np.cumsum([0, *map(len, histories)])


def naive_vector(history: list[int], places: np.ndarray, survivors: list[int] | None, directed: bool) -> dict:
    """v_u/‖v_u‖ of one user by plain loops: cell → value."""
    vector: dict[int, float] = {}
    for start, first in enumerate(places[history] if history else []):
        for distance in range(1, WINDOW + 1):
            if start + distance >= len(history):
                break
            second = places[history[start + distance]]
            if min(first, second) < 0 or first == second:
                continue
            low, high = sorted((int(first), int(second)))
            cell = high * (high - 1) // 2 + low
            if survivors is not None:
                if cell not in survivors:
                    continue
                cell = survivors.index(cell)
                cell = 2 * cell + int(first > second) if directed else cell
            vector[cell] = vector.get(cell, 0) + WEIGHTS[distance - 1]
    norm = math.sqrt(sum(value**2 for value in vector.values()))
    return {cell: value / norm for cell, value in vector.items()}


def counted(histories: list[list[int]], places: np.ndarray, survivors: np.ndarray | None, directed: bool) -> np.ndarray:
    """What one round counts, as a dense vector."""
    items, offsets = packed(histories)
    if survivors is not None:
        return ArraySums.packed(items, offsets).pairs(places, survivors, directed) / GRID
    dense = np.zeros(NUM_ITEMS * (NUM_ITEMS - 1) // 2)
    cells, sums = gathered(ArraySums.packed(items, offsets).all_pairs(places))
    dense[cells] = sums / GRID
    return dense


rounds_of = st.one_of(
    st.tuples(st.none(), st.just(False)),
    st.tuples(st.sets(st.integers(0, 35), min_size=1).map(sorted), st.booleans()),
)


@settings(max_examples=60)
@given(histories_of, st.sets(st.integers(0, NUM_ITEMS - 1)), rounds_of, st.integers(1, 40), st.integers(1, 40))
def test_counts_are_those_of_plain_loops(histories, skipped, this_round, items_at_once, cells_at_once) -> None:
    survivors, directed = this_round
    places = np.where(np.isin(EVERYTHING, list(skipped)), -1, EVERYTHING)
    given = (histories, places, None if survivors is None else np.array(survivors), directed)
    with pytest.MonkeyPatch.context() as patch:  # neither chunks of users nor blocks of cells must show
        patch.setattr(counts_sums, "ITEMS_AT_ONCE", items_at_once)
        patch.setattr(counts_sums, "CELLS_AT_ONCE", cells_at_once)
        patch.setattr(counts_sums, "COUNTERS", cells_at_once // 2)
        patch.setattr(counts_cells, "AT_ONCE", cells_at_once)
        found = counted(*given)
    np.testing.assert_array_equal(found, counted(*given))
    expected = np.zeros(len(found))
    for history in histories:
        for cell, value in naive_vector(history, places, survivors, directed).items():
            expected[cell] += value
    np.testing.assert_allclose(found, expected, atol=1e-6)


@settings(max_examples=100)
@given(histories_of, rounds_of)
def test_one_user_moves_the_counts_by_at_most_one(histories, this_round) -> None:
    survivors, directed = this_round
    survivors = None if survivors is None else np.array(survivors)
    difference = counted(histories, EVERYTHING, survivors, directed)
    if len(histories) > 1:
        difference = difference - counted(histories[:-1], EVERYTHING, survivors, directed)
    alone = counted(histories[-1:], EVERYTHING, survivors, directed)
    assert np.linalg.norm(alone) <= 1  # strictly, in float64
    assert not alone.any() or np.linalg.norm(alone) > 1 - 1e-6  # and nothing is wasted
    np.testing.assert_allclose(difference, alone, atol=1e-12)


def test_a_huge_user_counts_as_one() -> None:
    histories = [list(range(NUM_ITEMS)) * 400, [0, 1], [2], []]
    alone = counted(histories[:1], EVERYTHING, None, False)
    assert 1 - 1e-6 < np.linalg.norm(alone) <= 1
    assert not counted(histories[2:], EVERYTHING, None, False).any()


def test_pairs_keep_distances_over_items_that_do_not_count() -> None:
    places, unmarked = np.array([0, -1, 1]), counts_sums._Marks(None, None)
    keys = [pair for pair in counts_sums._pairs(places[[0, 1, 2]], np.array([0, 3]), 1, unmarked) if len(pair[0])]
    ((users, cells, backward, distance, _),) = keys
    assert (users.tolist(), cells.tolist(), backward.tolist(), distance) == ([0], [0], [False], 1)


# The budget.


def test_all_rounds_together_cost_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise that is really added, of every release there is, composes to the event in the ledger and not less."""
    deviations: list[float] = []
    frequencies, above, noisy = (
        counts_release.release_sums,
        counts_release.noisy_above,
        counts_release._noisy,
    )
    steps: list[int] = []

    def spy_frequencies(items, num_items, deviation, **options):
        deviations.append(deviation)
        return frequencies(items, num_items, deviation, **options)

    def spy_above(*arguments, deviation, step, **options):
        deviations.append(deviation)
        steps.append(step)
        return above(*arguments, deviation=deviation, step=step, **options)

    def spy_noisy(values, deviation, random, step):
        deviations.append(deviation)
        steps.append(step)
        return noisy(values, deviation, random, step)

    monkeypatch.setattr(counts_release, "release_sums", spy_frequencies)
    monkeypatch.setattr(counts_release, "noisy_above", spy_above)
    monkeypatch.setattr(counts_release, "_noisy", spy_noisy)
    ledger = Ledger()
    items, offsets = packed([[0, 1, 2, 3] * 3] * 200)
    TransitionCounts.fit(items, 6, 0.8, offsets=offsets, ledger=ledger)
    assert len(deviations) == 1 + len(ROUNDS) and len(set(steps)) == len(ROUNDS)
    spent = math.sqrt(sum(deviation**-2 for deviation in deviations))
    assert 1 / 0.8 * (1 - 1e-6) < spent <= 1 / 0.8
    (event,) = ledger.events
    assert (event.noise_multiplier, event.repeats, event.private) == (0.8, 1, True)


def test_noise_of_a_round_has_its_deviation() -> None:
    from dpformer.noise.randomness import SecureRandom

    noise = counts_release._noisy(np.zeros(200_000), 1.7, SecureRandom(seed=0), 3)
    assert noise.std() == pytest.approx(1.7, rel=0.01) and abs(noise.mean()) < 0.02


def test_shares_are_the_whole_budget() -> None:
    assert sum(this.share for this in (ITEMS, *ROUNDS)) == pytest.approx(1, abs=1e-12)
    assert ROUNDS[0].directed is False  # the sieve of the first round is over unordered pairs


@pytest.mark.parametrize(("listed", "again"), [(False, False), (False, True), (True, False)])
def test_rounds_cost_one_event_whatever_the_first_takes(listed: bool, again: bool) -> None:
    """Σ_r 1/σ_r² ≤ 1/σ², from the deviations that are used."""
    sigma = 0.8
    first = counts_release.round_of_items(listed=listed, again=again)
    rest = counts_release.noise_of_pairs(first, sigma)
    parts = 2 if again else 1  # of popularity, each under the noise of the first
    once = counts_release.round_of_items(listed=listed, again=False)
    spent = [counts_release.deviation_of(once, sigma) ** -2] * parts
    assert sum(spent) == pytest.approx(counts_release.deviation_of(first, sigma) ** -2)
    spent += [counts_release.deviation_of(this, rest) ** -2 for this in ROUNDS]
    assert 1 - 1e-8 < sum(spent) * sigma**2 <= 1


def with_and_without_attributes(length: int, stay: float) -> tuple[TransitionRelease, TransitionRelease]:
    """Users who stay, with this probability, within one block of ten items; pairs within a block are near."""
    random = np.random.default_rng(0)
    others = random.integers(30, size=(500, length))
    block = np.where(random.random((500, length)) < stay, random.integers(30, size=(500, 1)), others)
    items, offsets = (10 * block + random.integers(10, size=block.shape)).ravel(), np.arange(501) * length
    near = near_pairs(Attributes.of_items([[("block", str(item // 10))] for item in range(300)]))
    assert len(near) == 30 * 45
    plain, described = (release_transitions(items, offsets, 300, 1.0, near=n, seed=1) for n in (None, near))
    return plain, described


def test_useless_attributes_cost_their_evidence_and_nothing_else() -> None:
    """The pairs get what the evidence leaves, which is 97% of the budget or more; popularity is the same."""
    plain, described = with_and_without_attributes(4, 0.0)
    assert described.evidence is not None and not described.evidence.strong
    assert described.again is None and plain.again is None and plain.evidence is None
    np.testing.assert_array_equal(described.frequencies.counts, plain.frequencies.counts)
    share = evidence_share(500, 1.0)
    assert described.total_deviation == pytest.approx(plain.total_deviation * math.sqrt(0.95 / (0.95 - share)))


def test_with_long_histories_popularity_is_released_once() -> None:
    _, described = with_and_without_attributes(80, 0.5)
    assert described.evidence is not None and described.evidence.strong and described.again is None


def test_with_short_histories_and_attributes_that_say_much_popularity_is_released_twice() -> None:
    """The mean of both has the noise of twice the share; the pairs pay for it."""
    plain, described = with_and_without_attributes(4, 0.9)
    assert described.evidence is not None and described.evidence.strong
    assert plain.again is None and described.again is not None
    found, noise = described.frequencies, plain.frequencies.noise_multiplier
    np.testing.assert_array_equal(found.counts, (plain.frequencies.counts + described.again) / 2)
    assert found.noise_multiplier == pytest.approx(noise / math.sqrt(2))
    assert np.std(described.again - plain.frequencies.counts) == pytest.approx(noise * math.sqrt(2), rel=0.15)
    assert described.items.tolist() == np.flatnonzero(found.counts > 3 * found.noise_multiplier).tolist()
    left = 0.9 - evidence_share(500, 1.0)
    assert described.total_deviation == pytest.approx(plain.total_deviation * math.sqrt(0.95 / left))
    again = counts_release.final_deviations(1.0, listed=False, again=True, evidence_of=500)
    assert (described.total_deviation, described.difference_deviation) == pytest.approx(again)


def test_popularity_has_sensitivity_one() -> None:
    assert np.linalg.norm(user_counts(np.zeros(7, np.int64), np.array([0, 1, 1, 2, 3, 3, 3]), 1, 5)) <= 1 + 1e-15


def test_a_seed_is_not_private_and_without_one_no_two_releases_agree() -> None:
    items, offsets = packed([[0, 1, 2, 3, 4] * 2] * 300)
    seeded = [release_transitions(items, offsets, 8, 0.5, seed=4) for _ in range(2)]
    assert not seeded[0].event.private
    np.testing.assert_array_equal(seeded[0].total, seeded[1].total)
    free = [release_transitions(items, offsets, 8, 0.5) for _ in range(2)]
    assert free[0].event.private
    assert not np.array_equal(free[0].frequencies.counts, free[1].frequencies.counts)


# The release.


def test_without_noise_the_release_is_the_truth() -> None:
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, 7, size=rng.integers(2, 12)).tolist() for _ in range(50)]
    items, offsets = packed(histories)
    release = release_transitions(items, offsets, 7, 1e-5, seed=0)
    assert release.items.tolist() == list(range(7)) and len(release.pairs) == 21
    unordered = counted(histories, np.arange(7), None, False)[:21]
    survivors = np.arange(21)
    directed = counted(histories, np.arange(7), survivors, True).reshape(-1, 2)
    weight = [sum(this.share * (1, 0.5)[kind] for this in ROUNDS if this.directed == kind) for kind in (False, True)]
    total = (weight[0] * unordered + weight[1] * directed.sum(1)) / sum(weight)
    np.testing.assert_allclose(release.total, total, atol=1e-3)
    np.testing.assert_allclose(release.difference, directed[:, 0] - directed[:, 1], atol=1e-3)
    assert [tuple(pair) for pair in release.pairs.tolist()] == [(a, b) for b in range(7) for a in range(b)]


def test_stated_deviations_are_those_of_the_estimates() -> None:
    """Over many seeds on the same data, for a pair that always survives."""
    items, offsets = packed([[0, 1]] * 400 + [[1, 0]] * 100)
    releases = [release_transitions(items, offsets, 2, 1.0, seed=seed) for seed in range(150)]
    totals = np.array([release.total[0] for release in releases])
    differences = np.array([release.difference[0] for release in releases])
    assert totals.mean() == pytest.approx(500, abs=0.3) and differences.mean() == pytest.approx(300, abs=0.5)
    assert totals.std() == pytest.approx(releases[0].total_deviation, rel=0.2)
    assert differences.std() == pytest.approx(releases[0].difference_deviation, rel=0.2)


@settings(max_examples=200)
@given(st.integers(0, 10**6 * (10**6 - 1) // 2 - 1))
def test_cells_lead_back_to_pairs(cell: int) -> None:
    for near in {max(0, cell - 1), cell, cell + 1}:
        estimate = counts_release.Estimate(np.array([near]), np.ones(1), 1.0)
        estimate.add(np.zeros(2), 1.0, directed=True)
        low, high = counts_release._released(estimate, EVERYTHING, None, None).pairs[0].tolist()  # type: ignore[arg-type]
        assert 0 <= low < high and high * (high - 1) // 2 + low == near


def test_rounds_hold_few_copies_of_the_pairs_in_play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly a million here and tens of millions with many items, whatever the data: bytes a pair are what counts."""
    monkeypatch.setattr(counts_release, "ITEMS", counts_release.Round(0.05, False, -math.inf))
    monkeypatch.setattr(counts_release, "MOST_KEPT", 0)
    monkeypatch.setattr(counts_sums, "COUNTERS", 2**10)
    for module in (counts_release, counts_cells):
        monkeypatch.setattr(module, "AT_ONCE", 2**14)
    for name in ("PASSED_AT_ONCE", "MOST_AT_ONCE"):
        monkeypatch.setattr(f"dpformer.noise.sparse.{name}", 2**14)
    passed = []
    drawn = counts_release.noisy_above

    def watched(*given: Any, **named: Any) -> Any:
        found = drawn(*given, **named)
        passed.append(len(found[0]))
        return found

    monkeypatch.setattr(counts_release, "noisy_above", watched)
    items, offsets = packed([[0, 1, 2, 3] * 3] * 20)
    tracemalloc.start()
    try:
        release_transitions(items, offsets, 3000, 1.0, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert passed[0] > 500_000
    assert peak < 26 * passed[0] + 4e6, f"{peak / passed[0]:.1f} bytes a pair"


@pytest.mark.parametrize("histories", [[[]], [[3]], [[], [1], [1, 1, 1]], [[0, 1]]])
def test_hardly_any_data(histories: list[list[int]]) -> None:
    model = TransitionCounts.fit(histories, 5, 0.7, ledger=Ledger(), seed=0)
    assert torch.isfinite(model.scores([[0], []])).all()


def test_the_threshold_of_a_large_table_is_a_function_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it to follow the data (how many pairs occur, say), what passes would tell of them besides the noise."""
    monkeypatch.setattr(counts_release, "ITEMS", counts_release.Round(0.05, False, -math.inf))
    monkeypatch.setattr(counts_release, "MOST_NOISE", 2**6)
    asked = []
    drawn = counts_release.noisy_above

    def watched(*given: Any, **named: Any) -> Any:
        asked.append(named["threshold"] / named["deviation"])
        return drawn(*given, **named)

    monkeypatch.setattr(counts_release, "noisy_above", watched)
    for histories in ([[0, 1]], [[t % 40, (t * 7 + 1) % 40, (t * 3 + 5) % 40] for t in range(500)], [[]]):
        items, offsets = packed(histories)
        release_transitions(items, offsets, 40, 0.7, seed=0)
    expected = -NormalDist().inv_cdf(2**6 / (40 * 39 // 2))
    assert asked == pytest.approx([expected] * 3, rel=1e-12) and expected > counts_release.ROUNDS[0].keep


def test_many_items_cost_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million items, all of which count: half a trillion pairs."""
    monkeypatch.setattr(counts_release, "ITEMS", counts_release.Round(0.05, False, -math.inf))
    monkeypatch.setattr(counts_release, "MOST_NOISE", 2**12)
    rng = np.random.default_rng(1)
    histories = [[999_998, 17], *rng.integers(0, 10**6, size=(300, 5)).tolist()] + [[999_998, 17]] * 200
    items, offsets = packed(histories)
    release = release_transitions(items, offsets, 10**6, 0.7, seed=0)
    assert len(release.items) == 10**6 and len(release.pairs) < 10_000
    assert release.pairs[release.total.argmax()].tolist() == [17, 999_998]


@pytest.mark.parametrize(
    ("items", "offsets", "sigma", "words"),
    [
        ([0, 9], [0, 2], 1.0, "items must be in 0..4"),
        ([0, 1], [0, 2], 0.0, "noise_multiplier must be"),
        ([0, 1], [0, 3], 1.0, "offsets must increase"),
        ([0.5, 1], [0, 2], 1.0, "integers"),
    ],
)
def test_bad_input_is_named(items, offsets, sigma, words) -> None:
    with pytest.raises(ValueError, match=words):
        release_transitions(np.array(items), np.array(offsets), 5, sigma, seed=0)


# The model.


def a_release(rng: np.random.Generator, num_items: int = 8) -> TransitionRelease:
    head = np.array([0, 2, 3, 5, 7])
    pairs = np.array([(a, b) for b in range(5) for a in range(b)])
    p = rng.uniform(0.01, 0.5, num_items)
    frequencies = FrequencyRelease(p, p * 100, p > 0, None, 100)  # type: ignore[arg-type]
    total, difference = rng.normal(4, 6, len(pairs)), rng.normal(0, 3, len(pairs))
    return TransitionRelease(head, pairs, total, 1.3, difference, 1.9, frequencies, None)  # type: ignore[arg-type]


def dense_chances(release: TransitionRelease, num_items: int) -> np.ndarray:
    """T by the formulas, a cell at a time."""
    clear = [k for k in range(len(release.total)) if release.total[k] > 3 * release.total_deviation]
    order = sum(release.difference[k] ** 2 - release.difference_deviation**2 for k in clear)
    eta2 = max(0, order / sum(release.total[k] ** 2 - release.total_deviation**2 for k in clear)) if clear else 0
    table = np.zeros((num_items, num_items))
    taken = with_walks(1.5, release)  # has a twin of its own in test_walks.py
    pairs = zip(release.pairs, release.total, release.difference, taken, strict=True)
    for (a, b), total, difference, deviations in pairs:
        total = max(total - deviations * release.total_deviation, 0)
        prior = eta2 * total**2
        difference *= prior / (prior + release.difference_deviation**2)
        difference = min(max(difference, -total), total)
        a, b = release.items[a], release.items[b]
        table[a, b], table[b, a] = (total + difference) / 2, (total - difference) / 2
    return table / (table.sum(1, keepdims=True) + 30)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.lists(st.lists(st.integers(0, 7), max_size=30), min_size=1, max_size=4))
def test_model_is_its_formulas(seed: int, histories: list[list[int]]) -> None:
    release = a_release(np.random.default_rng(seed))
    model, table = TransitionCounts.from_release(release), dense_chances(release, 8)
    popularity = release.frequencies.p / release.frequencies.p.sum()
    claims = np.zeros((len(histories), 8))
    for row, history in zip(claims, histories, strict=True):
        latest = history[::-1][:20]
        weights = 0.75 ** np.arange(len(latest))
        for item, weight in zip(latest, weights / max(weights.sum(), 1e-9), strict=True):
            row += weight * table[item]
    np.testing.assert_allclose(model.scores(histories).numpy(), np.log(claims + 0.01 * popularity), atol=1e-4)


def test_repeats_are_claimed_by_the_items_of_the_history() -> None:
    """exp(score) grows by ρ times the item's weight in the history, and nothing else changes."""
    release = a_release(np.random.default_rng(0))
    plain, model = (TransitionCounts.from_release(release, repeat_weight=weight) for weight in (0.0, 0.1))
    history = [0, 4, 7, 4]  # item 4 has no transitions
    weights = np.zeros(8)
    np.add.at(weights, history[::-1], 0.75 ** np.arange(4) / (0.75 ** np.arange(4)).sum())
    expected = plain.scores([history]).exp().numpy()[0] + 0.1 * weights
    np.testing.assert_allclose(model.scores([history]).exp().numpy()[0], expected, rtol=1e-4)
    items, offsets = np.array(history), np.array([0, 4])
    np.testing.assert_allclose(Evidence(model).of(items, offsets)[0], expected, rtol=1e-4)
    model.check_state()
    similar = [CountsScoring(one).profiles().toarray() for one in (plain, model)]
    np.testing.assert_allclose(*similar, atol=1e-6)  # similarity is about other items


def test_symmetric_data_give_symmetric_counts() -> None:
    rng = np.random.default_rng(0)
    histories = [rng.permutation(6)[:3].tolist() for _ in range(3000)]
    release = release_transitions(*packed(histories), 6, 0.8, seed=0)
    forward, backward = counts._directed(release, np.full(len(release.total), 1.5))
    assert np.abs(forward - backward).max() < 0.15 * np.maximum(forward, backward).max()


def test_it_learns_a_chain_and_knows_its_direction() -> None:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 40, size=1500)
    histories = [[(start + step) % 40 for step in range(6)] for start in starts]
    model = TransitionCounts.fit(histories, 40, 0.8, ledger=Ledger(), seed=0)
    best = model.scores([[item] for item in range(40)]).argmax(1)
    assert (best == (torch.arange(40) + 1) % 40).float().mean() > 0.9


def test_an_empty_history_gets_popularity() -> None:
    model = TransitionCounts.from_release(a_release(np.random.default_rng(0)))
    assert model.scores([[]])[0].argsort().tolist() == model.popularity.argsort().tolist()


def test_unknown_items_are_named() -> None:
    model = TransitionCounts.from_release(a_release(np.random.default_rng(0)))
    with pytest.raises(ValueError, match="item 8 is outside the vocabulary 0 … 7"):
        model.scores([[1, 2], [3, 8]])


def test_state_survives_a_file_and_its_keys_stay(tmp_path: Path) -> None:
    model = TransitionCounts.from_release(a_release(np.random.default_rng(0)))
    assert list(model.state_dict()) == ["popularity", "offsets", "targets", "chances"]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        again = TransitionCounts(**model.arguments)
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    torch.testing.assert_close(again.scores([[1, 2, 3], []]), model.scores([[1, 2, 3], []]))
