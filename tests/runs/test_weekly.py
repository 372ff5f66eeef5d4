"""Runs of a growing log, week after week: one budget, and counts of earlier weeks as a prior."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dpformer as dp
from dpformer.accounting import epsilon_of
from dpformer.data import synthetic
from dpformer.errors import DpformerError
from dpformer.models.counts import TransitionCounts
from dpformer.queries.frequencies import FrequencyRelease
from dpformer.queries.transitions.prior import Prior, combined
from dpformer.queries.transitions.rounds import TransitionRelease
from dpformer.runs import Config, finished, train
from dpformer.runs.ledger_file import read
from dpformer.runs.previous import PreviousRun
from dpformer.verification.verify import verify
from tests.tiny_runs import printed, refused

WEEKS, USERS, ITEMS = 4, 3000, 120


def a_release(seed: int, num_items: int = 9, deviation: float = 1.3) -> TransitionRelease:
    rng = np.random.default_rng(seed)
    head = np.sort(rng.choice(num_items, 5, replace=False))
    pairs = np.array([(a, b) for b in range(5) for a in range(b)])
    pairs = pairs[rng.random(len(pairs)) < 0.7].reshape(-1, 2)
    frequencies = FrequencyRelease(np.full(num_items, 0.1), np.full(num_items, 10.0), np.ones(num_items), None, 100)  # type: ignore[arg-type]
    total, difference = rng.normal(4, 6, len(pairs)), rng.normal(0, 3, len(pairs))
    return TransitionRelease(head, pairs, total, deviation, difference, 1.9, frequencies, None)


def cells_of(release: TransitionRelease) -> dict[tuple[int, int], tuple[float, float]]:
    ends = release.items[release.pairs]
    return {(a, b): (s, d) for (a, b), s, d in zip(ends.tolist(), release.total, release.difference, strict=True)}


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.permutations(range(9)), st.floats(0.5, 3))
def test_a_combination_is_its_formula(seed: int, order: list[int], scale: float) -> None:
    """In today's numbers, which may be in another order; item 8 of last week is gone, item "new" is new."""
    then, now = a_release(seed), a_release(seed + 1, deviation=0.8)
    ids = [f"i{item}" for item in range(9)]
    today = ["new" if item == 8 else f"i{item}" for item in order]
    prior = Prior.of(then, ids, today, scale)
    again = Prior.restored(prior.arrays(), 9)
    assert again is not None and all(np.array_equal(a, prior.arrays()[n]) for n, a in again.arrays().items())
    found = cells_of(combined(TransitionRelease(**{**vars(now), "prior": again})))
    expected: dict[tuple[int, int], list[float]] = {}
    for (a, b), (total, difference) in cells_of(then).items():
        if 8 not in (a, b):
            x, y = today.index(f"i{a}"), today.index(f"i{b}")
            expected[min(x, y), max(x, y)] = [scale * total, scale * difference * (1 if x < y else -1)]
    own = cells_of(now)
    for of_value, deviations in ((0, (0.8, scale * 1.3)), (1, (1.9, scale * 1.9))):
        weights = [1 / deviation**2 for deviation in deviations]
        joint = sum(weights) ** -0.5
        for cell in own.keys() | expected.keys():
            if cell in own and cell in expected:
                due = (own[cell][of_value] * weights[0] + expected[cell][of_value] * weights[1]) / sum(weights)
            else:  # as many standard deviations as where it was found
                value, deviation = (own[cell], deviations[0]) if cell in own else (expected[cell], deviations[1])
                due = value[of_value] * joint / deviation
            assert found[cell][of_value] == pytest.approx(due)
    assert found.keys() == own.keys() | expected.keys()


def test_invalid_priors_are_refused() -> None:
    arrays = Prior.of(a_release(0), [str(i) for i in range(9)], [str(i) for i in range(9)], 1.0).arrays()
    assert Prior.restored({}, 9) is None
    for name, value in (
        ("prior items", arrays["prior items"] + 9),
        ("prior pairs", arrays["prior pairs"][:, ::-1]),
        ("prior total", arrays["prior total"][:-1]),
        ("prior deviations", np.array([0.0, 1.0])),
    ):
        with pytest.raises(ValueError, match="items that it does not have"):
            Prior.restored({**arrays, name: value}, 9)
    with pytest.raises(ValueError, match="a part of the prior is missing"):
        Prior.restored({name: array for name, array in arrays.items() if name != "prior total"}, 9)


@pytest.fixture(scope="module")
def weeks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of four weeks, each with all earlier interactions, and a catalogue."""
    folder = tmp_path_factory.mktemp("weeks")
    data = synthetic(0, USERS, ITEMS, max_length=50)
    rows = [
        (place / length, f"u{user},i{item},{place}")
        for user, length in enumerate(data.lengths.tolist())
        for place, item in enumerate(data.items[data.offsets[user] : data.offsets[user + 1]].tolist())
    ]
    for week in range(1, WEEKS + 1):
        kept = "\n".join(row for when, row in rows if when < (1 + week) / (1 + WEEKS))
        (folder / f"{week}.csv").write_text(f"user_id,item_id,timestamp\n{kept}\n")
    (folder / "items.csv").write_text("item_id\n" + "\n".join(f"i{item}" for item in range(ITEMS)) + "\n")
    return folder


@pytest.fixture(scope="module")
def chain(weeks: Path) -> list[dict[str, Any]]:
    """Four runs on one ledger, each starting from the one before; their statements."""
    ledger = weeks / "weekly.db"
    printed("ledger", "plan", ledger, "--runs", WEEKS, "--epsilon", 4, "--delta", 1e-5)
    common = ("--model", "counts", "--catalog", weeks / "items.csv", "--users", USERS, "--ledger", ledger)
    for week in range(1, WEEKS + 1):
        warm = ("--warm-start", weeks / f"run-{week - 1}") if week > 1 else ()
        printed("train", weeks / f"{week}.csv", *common, *warm, "--out", weeks / f"run-{week}")
    return [json.loads((weeks / f"run-{week}" / "privacy.json").read_text()) for week in range(1, WEEKS + 1)]


def test_the_statement_is_given_the_earlier_runs_and_states_their_cost(weeks: Path, chain: list[dict]) -> None:
    first, *_, last = chain
    assert "prior" not in first and "given" not in first
    assert last["headline"].endswith(", given what earlier runs released.")
    prior = last["prior"]
    assert prior["runs"] == WEEKS - 1 and len(prior["events"]) == sum(len(facts["events"]) for facts in chain[:-1])
    events = [event for facts in chain for event in finished_events(facts)]
    assert prior["epsilon"] == pytest.approx(epsilon_of(events, sum(facts["delta"] for facts in chain)))
    assert prior["epsilon"] > 1.5 * last["epsilon"], "the ε of one run is not the cost of all"
    said = " ".join(last["words"])
    assert f"all {WEEKS} runs" in said and "which the ε above does not include" in said
    assert read(weeks / "weekly.db").spent <= 4


def finished_events(facts: dict[str, Any]) -> list[Any]:
    from dpformer.accounting.events import Event

    return [Event.from_dict({k: v for k, v in one.items() if k != "epsilon_alone"}) for one in facts["events"]]


def test_verify_knows_the_prior(weeks: Path, chain: list[dict], tmp_path: Path) -> None:
    from dpformer.runs import load_dataset

    run = finished(weeks / "run-4")
    assert verify(run.folder, dataset=load_dataset(run.config)).passed
    config = run.folder / "config.toml"
    before = config.read_text()
    try:
        config.write_text("\n".join(line for line in before.splitlines() if not line.startswith("previous")) + "\n")
        wrong = {finding.name for finding in verify(run.folder).findings if finding.ok is False}
        assert {"statement", "releases"} <= wrong, "the earlier runs cannot be hidden"
    finally:
        config.write_text(before)


def test_four_weeks_are_between_one_week_and_one_shot(weeks: Path, chain: list[dict]) -> None:
    """At the same total ε: the last week alone < with the earlier weeks ≤ everything spent at once."""

    def ndcg(run: Path) -> float:
        facts = json.loads(printed("evaluate", run, "--json", "--samples", 1))
        return float(facts["metrics"]["model"]["served"]["ndcg@10"]["value"])

    warm = finished(weeks / "run-4")
    alone = weeks / "alone"
    common = {"model": "counts", "catalog": weeks / "items.csv", "users": USERS, "file": weeks / "4.csv"}
    once = Config.make(**common, epsilon=4.0, delta=1e-5)
    own = PreviousRun.open(warm.folder, once)
    train(Config.make(**common, epsilon=own.statement["epsilon"], delta=own.statement["delta"]), alone)
    train(once, weeks / "once")
    found = [ndcg(run) for run in (alone, warm.folder, weeks / "once")]
    assert found[0] < found[1] < 1.05 * found[2], found


def test_only_private_runs_of_counts_are_a_prior(weeks: Path, chain: list[dict], tmp_path: Path) -> None:
    log, catalog = weeks / "1.csv", weeks / "items.csv"
    common = ("train", log, "--catalog", catalog, "--out", tmp_path / "next")
    for name, choices, words in (
        ("exact", {"model": "counts", "epsilon": float("inf")}, "is not private: it would void the guarantee"),
        ("seeded", {"model": "counts", "seed": 1}, "is not private"),
        (
            "gru",
            {"model": "gru", "epochs": 1, "dim": 8, "batch_size": 500},
            "a run of gru; give a run of counts, as this one is",
        ),
    ):
        train(Config.make(file=log, catalog=catalog, **choices), tmp_path / name)
        assert words in refused(*common, "--warm-start", tmp_path / name)
    assert "is not a run folder" in refused(*common, "--warm-start", tmp_path / "nowhere")
    assert "a run of counts; give a run of gru" in refused(*common, "--model", "gru", "--warm-start", weeks / "run-1")
    with pytest.raises(DpformerError, match="needs a private run"):
        Config.make(file=log, warm_start=tmp_path / "x", epsilon=float("inf"))
    (copy := tmp_path / "copy").mkdir()
    for file in (weeks / "run-1").iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    (copy / "releases.safetensors").write_bytes((weeks / "run-2" / "releases.safetensors").read_bytes())
    assert "does not match its statement" in refused(*common, "--warm-start", copy)


NETWORK = {"epsilon": 8.0, "delta": 1e-5, "dim": 8, "batch_size": 500, "epochs": 1, "max_length": 10}


@pytest.mark.parametrize("model", ["transformer", "gru"])
def test_a_network_starts_from_the_weights_of_last_week(weeks: Path, tmp_path: Path, model: str) -> None:
    """With a learning rate of nearly 0 they are its own, item by item; a new item has weights of its own."""
    catalog = tmp_path / "items.csv"
    rows = (weeks / "items.csv").read_text().splitlines()
    catalog.write_text("\n".join([rows[0], "new", *rows[:0:-1]]) + "\n")  # in another order
    first, second = tmp_path / "first", tmp_path / "second"
    train(Config.make(file=weeks / "1.csv", catalog=weeks / "items.csv", model=model, **NETWORK), first)
    config = Config.make(
        file=weeks / "2.csv", catalog=catalog, model=model, warm_start=first, learning_rate=1e-9, **NETWORK
    )
    run = train(config, second)
    now, then = run.release, finished(first).release
    numbers = [then.vocabulary.index(name) if name != "new" else -1 for name in map(str, now.vocabulary)]
    assert len(now.vocabulary) == ITEMS + 1 and numbers.count(-1) == 1
    own, earlier = dict(now.model.named_parameters()), dict(then.model.named_parameters())
    for name, parameter in earlier.items():
        if name == "items.weight":
            kept = own[name][[place for place, row in enumerate(numbers) if row >= 0]]
            torch.testing.assert_close(kept, parameter[[row for row in numbers if row >= 0]], atol=1e-5, rtol=0)
            assert 0 < float(own[name][numbers.index(-1)].norm()) < 1  # as initialised
        else:
            torch.testing.assert_close(own[name], parameter, atol=1e-5, rtol=0)
    facts = run.statement
    assert facts["headline"].endswith(", given what earlier runs released.") and facts["prior"]["runs"] == 1
    events = [*facts["prior"]["events"], *facts["events"]]
    assert len(events) == 2 * len(facts["events"]) and facts["prior"]["epsilon"] > facts["epsilon"]
    assert not [one for one in verify(second).findings if one.ok is False]


def test_what_a_network_cannot_start_from(weeks: Path, tmp_path: Path) -> None:
    common = {"file": weeks / "1.csv", "catalog": weeks / "items.csv", "model": "gru"}
    train(Config.make(**common, **NETWORK), tmp_path / "first")
    with pytest.raises(DpformerError, match="whose dim is 8, but here it is 16: give the same"):
        train(Config.make(**common, warm_start=tmp_path / "first", **{**NETWORK, "dim": 16}), tmp_path / "next")
    with pytest.raises(DpformerError, match="a run of gru; give a run of lstm"):
        train(Config.make(**{**common, "model": "lstm"}, warm_start=tmp_path / "first", **NETWORK), tmp_path / "next")


def test_in_python(weeks: Path, chain: list[dict]) -> None:
    rec = dp.Recommender(epsilon=1.0, model="counts", users=USERS)
    rec.fit(weeks / "2.csv", items=weeks / "items.csv", warm_start=weeks / "run-1")
    assert rec.statement["prior"]["runs"] == 1 and isinstance(rec.release.model, TransitionCounts)
    assert Config.make(warm_start="0.25").warm_start == 0.25
