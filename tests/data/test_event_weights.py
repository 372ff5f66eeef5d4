"""Weights of events and sessions: read from every format, each row by itself, and counted as docs/maths says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpformer as dp
from dpformer.data import Filters, Reading, load, prepare, read
from dpformer.data.restrict_vocabulary import restrict_to_vocabulary
from dpformer.data.vocabulary import Vocabulary
from dpformer.errors import DpformerError
from tests.data.test_filters import ROWS, WRITERS, as_csv
from tests.tiny_runs import printed, refused
from tests.training.memo import accountant_remembers  # noqa: F401

WEIGHTED = Filters(where="event <> 'search'", event_weights="purchase=3, view=1")
HOUR = 3600


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_same_weights(write: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    path = write(tmp_path / "log", ROWS)
    found = read(path, filters=WEIGHTED)
    assert found.named() == {"a": ["x", "y"], "b": ["x"], "c": ["z"]}
    assert found.weights is not None and found.weights.tolist() == [1, 3, 3, 1]
    prepared = prepare(path, filters=WEIGHTED)
    assert prepared.weights is not None and prepared.weights.tolist() == [1, 3, 3, 1]


@pytest.mark.parametrize("write", WRITERS)
def test_an_event_without_a_weight_is_an_invalid_row(write: Callable[[Path, Any], Path], tmp_path: Path) -> None:
    path, filters = write(tmp_path / "log", ROWS), Filters(where="event <> 'search'", event_weights="view=2")
    with pytest.raises(DpformerError, match=r"the event 'purchase' has no weight; add it to --event-weights"):
        read(path, filters=filters)
    found = read(path, reading=Reading(skip_bad_rows=True), filters=filters)
    assert found.facts["skipped"] == {"event without a weight": 2}
    assert found.named() == {"a": ["x"], "b": [], "c": ["z"]} and found.weights is not None
    assert found.weights.tolist() == [2, 2]


def test_names_and_values_that_are_refused(tmp_path: Path) -> None:
    for given in ("purchase", "purchase=0", "purchase=101", "purchase=1.5", "=3", "view=-1", "a=1,,b=2"):
        with pytest.raises(DpformerError, match=r"it must be like purchase=3,view=1, with whole numbers from 1 to 100"):
            Filters(event_weights=given)
    with pytest.raises(DpformerError, match="two weights for 'view'"):
        Filters(event_weights="view=1,view=2")
    for given in ("30", "0min", "1.5h", "an hour", "-2h"):
        with pytest.raises(DpformerError, match="it must be a duration: 90s, 30min, 2h or 1d"):
            Filters(session_gap=given)
    path = as_csv(tmp_path / "log", ROWS)
    with pytest.raises(DpformerError, match=r"no column 'kind' for --event-weights; .* --event-column"):
        read(path, filters=Filters(event_weights="view=1", event_column="kind"))
    plain = tmp_path / "log.txt"
    plain.write_text("a x\nb y\n")
    with pytest.raises(DpformerError, match="--session-gap needs times"):
        read(plain, filters=Filters(session_gap="1h"))


@pytest.mark.parametrize(("unit", "first"), [(1, 1_700_000_000), (1000, 1_700_000_000), (10**9, 1_700_000_000)])
def test_a_session_ends_with_a_pause(tmp_path: Path, unit: int, first: int) -> None:
    """In seconds, milliseconds and nanoseconds; a pause of exactly the gap does not end one."""
    times = {"a": [0, 1, HOUR + 1, 2 * HOUR + 2, 2 * HOUR + 3], "b": [5, 9 * HOUR]}
    rows = [f"{user},i{n},{(first + t) * unit}" for user, all_ in times.items() for n, t in enumerate(all_)]
    path = tmp_path / "log.csv"
    path.write_text("\n".join(["user_id,item_id,timestamp", *rows[::-1]]) + "\n")
    found = read(path, filters=Filters(session_gap="1h"))
    assert found.sessions is not None
    sessions = dict(zip(found.user_ids, np.split(found.sessions, found.offsets[1:-1]), strict=True))
    assert np.diff(sessions["a"]).tolist() == [0, 0, 1, 0] and np.diff(sessions["b"]).tolist() == [1]


def test_dates_have_sessions_too(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    days = ["2024-01-01 23:50", "2024-01-02 00:10", "2024-01-02 00:41"]
    path.write_text("\n".join(["user_id,item_id,date", *(f"u,i{n},{day}" for n, day in enumerate(days))]) + "\n")
    found = read(path, filters=Filters(session_gap="30min"))
    assert found.sessions is not None and np.diff(found.sessions).tolist() == [0, 1]


def shop(path: Path, users: int = 300) -> Path:
    """Views of everything, and purchases of what follows item i: item i + 1."""
    rng, rows = np.random.default_rng(0), []
    for user in range(users):
        at = 1_700_000_000
        for item in rng.integers(0, 12, 6):
            rows += [(user, item, "view", at), (user, (item + 1) % 12, "purchase", at + 60)]
            at += 86400
    path.write_text("\n".join(["user_id,item_id,event,ts", *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


GIVEN = {"event_weights": "purchase=5,view=1", "session_gap": "1h"}


def test_marks_follow_their_items(tmp_path: Path) -> None:
    """Through the cache, the split and a restricted vocabulary; and the hash of the data holds them."""
    path, filters = shop(tmp_path / "log.csv", 20), Filters(**GIVEN)
    plain, found = prepare(path), prepare(path, filters=filters, cache=tmp_path / "cache")
    assert found.weights is not None and found.sessions is not None
    again = load(next((tmp_path / "cache").iterdir()))
    assert again.hash == found.hash and again.weights is not None
    np.testing.assert_array_equal(again.weights, found.weights)
    weighted, split = (prepare(path, filters=Filters(**{name: value})) for name, value in GIVEN.items())
    assert len({plain.hash, found.hash, weighted.hash, split.hash}) == 4
    few = restrict_to_vocabulary(found, Vocabulary(["3", "4"]))
    assert few.weights is not None and few.sessions is not None
    for user in range(found.num_users):
        rows = slice(found.offsets[user], found.train_stops[user])
        kept = [n for n, item in enumerate(found.items[rows]) if found.vocabulary.ids[item] in ("3", "4")]
        own = slice(few.offsets[user], few.offsets[user + 1])
        assert few.weights[own].tolist() == found.weights[rows][kept].tolist()
        assert few.sessions[own].tolist() == found.sessions[rows][kept].tolist()


def test_a_run_says_and_verifies_its_weights(tmp_path: Path) -> None:
    path, run = shop(tmp_path / "log.csv"), tmp_path / "run"
    given = [word for name, value in GIVEN.items() for word in (f"--{name.replace('_', '-')}", value)]
    printed("train", path, "--epsilon", 50, "--assume-items-public", "--out", run, *given)
    facts = json.loads((run / "privacy.json").read_text())
    said = " ".join(facts["data"])
    assert "weighted by their event (purchase = 5, view = 1)" in said and "a pause of more than 1h" in said
    found = json.loads(printed("verify", run, "--json"))
    assert {one["name"]: one["ok"] for one in found["findings"]}["noise of transitions"] is True
    printed("evaluate", run)
    plain = tmp_path / "plain"
    printed("train", path, "--epsilon", 50, "--assume-items-public", "--out", plain)
    # After a view of item 3 comes the purchase of item 4: with sessions, and weights, more clearly than without.
    scores = []
    for folder in (plain, run):
        frame = dp.load(folder).recommend({"a": ["3"]}, k=1)
        scores.append((str(frame["item_id"][0]), float(frame["score"][0])))
    assert scores[0][0] == scores[1][0] == "4" and scores[1][1] > scores[0][1]


def test_other_logs_need_no_events(tmp_path: Path) -> None:
    """Weights are of training: histories to recommend for, and other logs, are read without them."""
    path, run, other = shop(tmp_path / "log.csv"), tmp_path / "run", tmp_path / "other.csv"
    printed(
        "train", path, "--epsilon", 50, "--assume-items-public", "--out", run, "--event-weights", GIVEN["event_weights"]
    )
    other.write_text("user_id,item_id,ts\nz,1,1\nz,2,2\nz,3,3\ny,1,1\ny,2,2\ny,5,3\n")
    assert "z" in printed("recommend", run, "--histories", other, "--json")
    printed("evaluate", run, other)


def test_what_cannot_be_weighted_is_refused(tmp_path: Path) -> None:
    path = shop(tmp_path / "log.csv", 5)
    for option, value in (("--event-weights", "view=1,purchase=2"), ("--session-gap", "1h")):
        said = refused("train", path, "--model", "transformer", option, value)
        assert "applies to counts, but model is transformer" in said
        assert "engine spark" in refused("train", path, "--engine", "spark", option, value)
    assert "order is file" in refused("train", path, "--order", "file", "--session-gap", "1h")


def test_frames_have_weights_too(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.read_csv(shop(tmp_path / "log.csv"))
    rec = dp.Recommender(epsilon=50, assume_items_public=True, **GIVEN).fit(frame)
    assert "weighted by their event" in " ".join(rec.statement["data"])
    with pytest.raises(DpformerError, match="no column 'event' for event_weights="):
        dp.Recommender(epsilon=50, assume_items_public=True, **GIVEN).fit(frame.drop(columns="event"))
