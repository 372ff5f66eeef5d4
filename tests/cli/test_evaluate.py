"""`dpformer evaluate`: numbers as counted by hand, both policies, popularity beside them, refusals."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.data import Dataset, prepare
from dpformer.evaluation import rankers
from dpformer.runs.evaluation_cache import EvaluationCache
from dpformer.runs.folder import RunFolder
from dpformer.runs.model_file import load_release
from dpformer.runs.trust import mark_as_own
from tests.tiny_runs import copied, point_at, printed, refused, tiny_run
from tests.training.logs import write_log


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory)


ROUNDING = 1e-5  # of scores that are added up in another order


def by_hand(dataset: Dataset, score: Any, policy: str, k: int, nearly: float = 0.0) -> dict[str, float]:
    """One user and one item at a time. Another item is ahead from `nearly` less than the target's score on."""
    gains: dict[str, list[float]] = {f"ndcg@{k}": [], f"hit@{k}": [], "mrr": []}
    for user, target in zip(*dataset.held_out(), strict=True):
        history = dataset.test_history(int(user))
        scores = score(history)
        left_out = set() if policy == "unmasked" else set(history.tolist()) - {int(target)}
        rank: float = sum(
            item == target or float(scores[item]) >= float(scores[target]) - nearly
            for item in range(len(scores))
            if item not in left_out
        )
        if policy == "served" and target in history:
            rank = math.inf
        gains[f"hit@{k}"].append(rank <= k)
        gains[f"ndcg@{k}"].append(1 / math.log2(rank + 1) if rank <= k else 0.0)
        gains["mrr"].append(1 / rank)
    return {name: float(np.mean(values)) for name, values in gains.items()}


def test_numbers_are_those_counted_by_hand(run: Path) -> None:
    facts = json.loads(printed("evaluate", run, "--json", "-k", 3, "--samples", 50))
    release = load_release(run / "model.safetensors")
    dataset = prepare(run.parent / "log.csv", max_length=6)
    order = release.index(dataset.vocabulary.ids)  # the log's items in the catalogue's numbers
    dataset = Dataset.from_histories([order[dataset.items[a:b]] for a, b in _rows(dataset)], len(release.vocabulary))
    counts = dataset.item_counts()
    for policy in ("served", "masked", "unmasked"):
        for name, score, rounding in (
            ("model", lambda h: release.model.scores([h])[0].detach(), ROUNDING),
            ("popularity", lambda h: counts, 0.0),  # whole numbers
        ):
            worst, best = (by_hand(dataset, score, policy, 3, nearly) for nearly in (rounding, -rounding))
            found = facts["metrics"][name][policy]
            assert found.keys() == best.keys()
            for metric, entry in found.items():
                assert worst[metric] - 1e-6 <= entry["value"] <= best[metric] + 1e-6
            assert all(entry["low"] <= entry["value"] <= entry["high"] for entry in found.values())
    assert facts["users"] == len(dataset.test_users) and facts["covered"] is False
    assert "ties pessimistic" in facts["ranking"] and set(facts["policies"]) == {"served", "masked", "unmasked"}


def _rows(dataset: Dataset) -> list[tuple[int, int]]:
    return list(zip(dataset.offsets[:-1].tolist(), dataset.offsets[1:].tolist(), strict=True))


def test_the_table_names_policies_and_says_what_is_not_covered(run: Path) -> None:
    text = re.sub(r"\s+", " ", printed("evaluate", run, "-k", 5, "-k", 10, "--samples", 20))
    for part in (
        "as recommend:",
        "as recommend --allow-seen",
        "Coverage: ",
        "Repeats: ",
        "head",
        "ndcg@5",
        "hit@10",
        "mrr",
        "popularity",
        "95% interval",
    ):
        assert part in text
    assert "not covered by the privacy guarantee" in text and "ε = 4" in text


def test_another_log_is_ranked_with_the_models_items(run: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "other.csv", users=30, items=25, seed=5)  # i20 … i24 are not in the catalogue
    facts = json.loads(printed("evaluate", run, other, "--json", "--samples", 10))
    assert facts["interactions_left_out"] > 0 and "over 20 items" in facts["ranking"]
    own = json.loads(printed("evaluate", run, run.parent / "log.csv", "--json", "--samples", 10))
    assert own["metrics"] == json.loads(printed("evaluate", run, "--json", "--samples", 10))["metrics"]


def test_a_validation_split(tmp_path_factory: pytest.TempPathFactory, run: Path) -> None:
    held = tiny_run(tmp_path_factory, validation=True, seed=3)
    assert json.loads(printed("evaluate", held, "--split", "validation", "--json"))["split"] == "validation"
    assert "--validation" in refused("evaluate", run, "--split", "validation")


def test_bad_input_is_one_sentence(run: Path, tmp_path: Path) -> None:
    assert "k is 0; it must be 1 or more" in refused("evaluate", run, "-k", 0)
    assert "samples is 0" in refused("evaluate", run, "--samples", 0)
    assert "split is 'train'" in refused("evaluate", run, "--split", "train")
    assert "not a run folder" in refused("evaluate", tmp_path / "nowhere")
    assert "does not exist" in refused("evaluate", run, tmp_path / "nowhere.csv")
    spoiled = copied(run, tmp_path)
    (spoiled / "model.safetensors").write_bytes(b"\x80\x04junk")
    assert "not an intact dpformer model" in refused("evaluate", spoiled)
    (spoiled / "privacy.json").unlink()
    assert "not finished" in refused("evaluate", spoiled)


def test_data_that_has_changed_is_refused(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run = tiny_run(tmp_path_factory, catalog=None, seed=4)
    spoiled = copied(run, tmp_path)
    log = write_log(tmp_path / "log.csv", items=30)
    point_at(spoiled, log)
    assert "has changed since training" in refused("evaluate", spoiled)


def test_what_was_evaluated_is_kept_for_the_report(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers, and nothing is ranked again while model, data and split are the same."""
    run = own_copy(run, tmp_path)
    first = json.loads(printed("evaluate", run, "--json", "--samples", 10))
    kept = run / "checkpoint" / "evaluation.npz"
    assert kept.stat().st_mode & 0o077 == 0  # as private as the data
    ranked: list[str] = []
    monkeypatch.setattr(rankers.NetworkRanker, "place", lambda *given, **more: ranked.append("again") or 1 / 0)
    assert json.loads(printed("evaluate", run, "--json", "--samples", 10)) == first
    printed("report", run, "--out", tmp_path / "page.html")
    assert not ranked
    kept.write_bytes(b"junk")
    with pytest.raises(AssertionError):
        printed("evaluate", run, "--json", "--samples", 10)
    assert ranked


def own_copy(run: Path, tmp_path: Path) -> Path:
    copy = copied(run, tmp_path)
    mark_as_own(RunFolder(copy))
    return copy


def test_what_was_kept_of_another_model_is_not_taken(run: Path, tmp_path: Path) -> None:
    folder = RunFolder(own_copy(run, tmp_path))
    arrays = {"model-masked": np.arange(3)}
    EvaluationCache(folder).put(arrays, "data", "test")
    assert EvaluationCache(folder).get("data", "test") is not None
    assert (
        EvaluationCache(folder).get("other data", "test") is None
        and EvaluationCache(folder).get("data", "validation") is None
    )
    folder.evaluation.unlink()
    assert EvaluationCache(folder).get("data", "test") is None
