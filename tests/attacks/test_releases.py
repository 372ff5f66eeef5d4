"""Attacks on what is released, and how often: each succeeded once."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.engines.sums import GRID, ArraySums, gathered
from dpformer.errors import DpformerError
from dpformer.noise.randomness import public_grid
from dpformer.queries.transitions import rounds as counts_release
from dpformer.queries.transitions.attribute_evidence import AttributeEvidence, exact_evidence
from dpformer.queries.transitions.noise_check import _first, _later, wrong_with_rounds
from dpformer.queries.transitions.rounds import ROUNDS, TransitionRelease
from dpformer.runs import Config, load_dataset, load_release, resume, train
from dpformer.runs import run as runs
from dpformer.runs.releases_file import load_releases
from dpformer.verification.verify import Verification, verify
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)

SECRET = "hiv-test-kit"


def logs(folder: Path, users: int = 600) -> tuple[Path, Path]:
    """Two logs that differ in one user, who alone has one item."""
    without = write_log(folder / "without.csv", users=users, items=4)
    with_user = folder / "with.csv"
    with_user.write_text(without.read_text() + "".join(f"ann,{SECRET}-{n},{n}\n" for n in range(40)))
    return without, with_user


def counts(log: Path, **changes: Any) -> Config:
    return Config.make(file=log, model="counts", epsilon=8.0, threads=1, **changes)


def wrong(result: Verification) -> set[str]:
    return {finding.name for finding in result.findings if finding.ok is False}


@pytest.mark.parametrize("model", ["counts", "transformer"])
def test_an_item_of_one_user_alone_is_not_in_the_model(tmp_path: Path, model: str) -> None:
    """The vocabulary told two logs apart with certainty, at any ε."""
    more = {"assume_items_public": False, "epsilon": 20.0, "epochs": 1, "items_share": 0.3, "seed": None}
    for log in logs(tmp_path):
        config = counts(log) if model == "counts" else tiny_config(log, **more)
        done = train(config, tmp_path / log.stem)
        assert done.release.vocabulary and not [item for item in done.release.vocabulary if SECRET in str(item)]
        assert "given" not in done.statement["headline"]
        assert done.statement["events"][0]["delta"] == pytest.approx(0.1 * done.statement["delta"])


@pytest.mark.parametrize("model", ["counts", "transformer"])
def test_a_released_list_is_of_one_run_and_in_no_cache(tmp_path: Path, model: str) -> None:
    """A list that another run had left in a cache would be used by a second one that never paid for it."""
    log = logs(tmp_path)[1]
    more = {"assume_items_public": False, "epsilon": 20.0, "epochs": 1, "items_share": 0.3, "seed": None}
    config = counts(log) if model == "counts" else tiny_config(log, **more)
    config, found = config.replace(cache=tmp_path / "cache"), []
    for name in ("one", "two"):
        train(config, tmp_path / name)
        found.append(load_releases(tmp_path / name / "releases.safetensors")["popularity"])
        assert len(load_dataset(config).vocabulary) == 44, "prepared data knows all items, and nothing of a release"
    size = min(map(len, found))
    again = (found[0][:size] == found[1][:size]).sum()  # one number may fall on the same place of the grid
    assert size >= 3 and again <= size // 2, "noise of its own"


def test_items_assumed_public_are_in_the_headline(tmp_path: Path) -> None:
    _, with_user = logs(tmp_path)
    done = train(counts(with_user, assume_items_public=True), tmp_path / "run")
    assert f"{SECRET}-0" in done.release.vocabulary
    assert done.statement["headline"].endswith("one user's entire history, given the item list.")
    assert any("the ε above does not cover that" in sentence for sentence in done.statement["words"])
    facts = json.loads((done.folder / "privacy.json").read_text())
    facts["headline"] = facts["headline"].replace(", given the item list", "")
    (done.folder / "privacy.json").write_text(json.dumps(facts))
    assert "statement" in wrong(verify(done.folder))


def test_delta_is_a_tenth_of_one_user_and_n_is_public(tmp_path: Path) -> None:
    without, _ = logs(tmp_path)
    done = train(counts(without), tmp_path / "run")
    assert done.statement["delta"] == 1 / 6000 and "the number of users stays public" in done.statement["adjacency"]


# Resume.


def test_counts_that_died_before_their_statement_are_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another key after a crash: two models of one data set, ε = 1.5 where 1 was stated."""
    without, _ = logs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runs.RunFolder, "write_json", dies_at("privacy.json", runs.RunFolder.write_json))
        with pytest.raises(KeyboardInterrupt):
            train(counts(without), tmp_path / "run")
    first = {name: (tmp_path / "run" / name).read_bytes() for name in ("model.safetensors", "releases.safetensors")}
    done = resume(tmp_path / "run")
    assert first == {name: (done.folder / name).read_bytes() for name in first}
    assert not (done.folder / "checkpoint" / "keys.json").exists() and verify(done.folder).passed


def dies_at(name: str, write: Any) -> Any:
    def wrapped(self: Any, path: Path, content: dict[str, Any]) -> None:
        if path.name == name:
            raise KeyboardInterrupt
        write(self, path, content)

    return wrapped


@pytest.mark.parametrize("model", ["counts", "transformer"])
def test_a_model_whose_keys_are_gone_is_never_made_again(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without, _ = logs(tmp_path, users=60)
    config = tiny_config(without, model=model, epochs=1, seed=None)
    with monkeypatch.context() as patch:
        patch.setattr(runs.RunFolder, "write_json", dies_at("privacy.json", runs.RunFolder.write_json))
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run")
    for secret in ("state.safetensors", "keys.json"):
        (tmp_path / "run" / "checkpoint" / secret).unlink(missing_ok=True)
    assert "a model without a statement" in verify(tmp_path / "run").findings[0].detail
    with pytest.raises(DpformerError, match="would release another model of the same data"):
        resume(tmp_path / "run")


def test_a_statement_whose_model_is_gone_is_not_made_true_again(tmp_path: Path) -> None:
    without, _ = logs(tmp_path)
    done = train(counts(without), tmp_path / "run")
    (done.folder / "model.safetensors").unlink()
    with pytest.raises(DpformerError, match="a statement but no model"):
        resume(done.folder)


def test_keys_for_other_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise on two data sets could be subtracted."""
    without, with_user = logs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(runs.RunFolder, "write_json", dies_at("privacy.json", runs.RunFolder.write_json))
        with pytest.raises(KeyboardInterrupt):
            train(counts(without), tmp_path / "run")
    without.write_bytes(with_user.read_bytes())
    with pytest.raises(DpformerError, match="was made with other data"):
        resume(tmp_path / "run")


# Noise.


def test_noise_that_was_never_added_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` said "transition counts are noisy" of exact ones."""
    from dpformer.noise.randomness import SecureRandom

    without, _ = logs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SecureRandom, "normal", lambda self, count, **address: np.zeros(count))
        done = train(counts(without), tmp_path / "run")
    found = wrong(verify(done.folder, dataset=load_dataset(done.config)))
    assert {"noise of popularity", "noise of transitions"} <= found
    unread = verify(done.folder)
    assert {"noise of popularity", "noise of transitions"} <= set(unread.not_checked), "and never called checked"


def walked(users: int = 900, items: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Users walk on from a place of their own, eight steps."""
    starts = np.random.default_rng(0).integers(0, items, users)
    return ((starts[:, None] + np.arange(8)) % items).ravel(), np.arange(0, 8 * users + 1, 8)


def released_rounds(seed: int = 0, sigma: float = 1.5) -> tuple[TransitionRelease, ArraySums, np.ndarray]:
    items, offsets = walked()
    release = counts_release.release_transitions(items, offsets, 40, sigma, seed=seed)
    places = np.full(40, -1)
    places[release.items] = np.arange(len(release.items))
    return release, ArraySums.packed(items, offsets), places


@pytest.mark.parametrize("number", range(len(ROUNDS)))
def test_too_little_noise_in_any_round_is_found(number: int) -> None:
    """Rounds without direction were never looked at: half of their noise, on the grid of all of it, passed."""
    raw, sums, places = released_rounds()
    assert raw.items is not None and len(raw.rounds) == len(ROUNDS) and wrong_with_rounds(raw, sums, places, 1.5) == ""
    one, deviation = raw.rounds[number], counts_release.deviation_of(ROUNDS[number], 1.5)
    grid = public_grid(deviation)
    if number:
        exact = sums.pairs(places, one.cells, ROUNDS[number].directed) / GRID
        noisy = np.round((exact + (one.noisy - exact) / 2) / grid) * grid
        quiet = replace(one, noisy=noisy)
    else:
        m = len(raw.items)
        exact = np.zeros(m * (m - 1) // 2)
        cells, counted = gathered(sums.all_pairs(places))
        exact[cells] = counted / GRID
        noisy = exact + deviation / 2 * np.random.default_rng(0).normal(size=len(exact))
        noisy = np.round(noisy / grid) * grid
        passed = np.flatnonzero(noisy > counts_release.first_threshold(m) * deviation + grid)
        quiet = replace(one, cells=passed, noisy=noisy[passed])
    rounds = tuple(quiet if other.number == number else other for other in raw.rounds)
    found = wrong_with_rounds(replace(raw, rounds=rounds), sums, places, 1.5)
    assert found == f"round {number + 1} does not have the noise in the ledger"


def test_rounds_with_their_noise_are_not_accused() -> None:
    """The checks have honest p-values: of 30 releases, 6 rounds each, none is below a thousandth."""
    least = 1.0
    for seed in range(30):
        raw, sums, places = released_rounds(seed)
        assert raw.items is not None
        for one in raw.rounds:
            deviation = counts_release.deviation_of(ROUNDS[one.number], 1.5)
            first = one.number == 0
            p = _first(one, sums, places, len(raw.items), deviation) if first else _later(one, sums, places, 1.5)
            least = min(least, p)
    assert 1e-4 < least < 0.1


def test_counts_that_do_not_follow_from_their_rounds_are_found() -> None:
    """Noisy rounds beside other counts, or of other pairs."""
    raw, sums, places = released_rounds()
    assert raw.total is not None
    other = replace(raw, total=raw.total + 0.01)
    assert "do not follow" in wrong_with_rounds(other, sums, places, 1.5)
    swapped = replace(raw, rounds=tuple(replace(one, cells=one.cells) for one in raw.rounds[:-1]))
    assert wrong_with_rounds(swapped, sums, places, 1.5) == "", "a round that was not kept is not checked"
    last = raw.rounds[-1]
    fewer = replace(raw, rounds=(*raw.rounds[:-1], replace(last, cells=last.cells[1:], noisy=last.noisy[2:])))
    assert wrong_with_rounds(fewer, sums, places, 1.5)


def test_counts_times_a_hundredth_more_are_found(tmp_path: Path) -> None:
    from dpformer.runs import save_release

    without, _ = logs(tmp_path)
    done = train(counts(without), tmp_path / "run")
    release = load_release(done.folder / "model.safetensors")
    release.model.chances.mul_(1.01)
    path = done.folder / "model.safetensors"
    save_release(
        path, release.model, vocabulary=release.vocabulary, metadata=release.metadata, frequencies=release.frequencies
    )
    assert wrong(verify(done.folder)) == {"hash of the model", "releases"}


def grouped(folder: Path) -> tuple[Path, Path]:
    """A log of users who each stay with one kind of items, and the catalogue that names the kinds."""
    log, catalog, random = folder / "log.csv", folder / "facts.csv", np.random.default_rng(0)
    rows = [f"u{user},i{8 * (user % 5) + random.integers(8)},{time}" for user in range(600) for time in range(6)]
    log.write_text("\n".join(["user_id,item_id,timestamp", *rows]) + "\n")
    catalog.write_text("\n".join(["item_id,kind", *(f"i{item},{item // 8}" for item in range(40))]) + "\n")
    return log, catalog


def test_evidence_for_attributes_without_noise_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, catalog = grouped(tmp_path)

    def bare(sums: Any, near: np.ndarray, num_items: int, deviation: float, random: Any) -> AttributeEvidence:
        exact, grid = exact_evidence(sums, near, num_items), public_grid(deviation)
        return replace(exact, sums=np.round(exact.sums / grid) * grid, deviation=deviation)

    honest = train(counts(log, catalog=catalog), tmp_path / "honest")
    assert not wrong(verify(honest.folder, dataset=load_dataset(honest.config)))
    with monkeypatch.context() as patch:
        patch.setattr(counts_release, "release_evidence", bare)
        done = train(counts(log, catalog=catalog), tmp_path / "run")
    assert wrong(verify(done.folder, dataset=load_dataset(done.config))) == {"noise of transitions"}


def test_evidence_of_another_catalogue_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which pairs are near must be public: pairs chosen by what users did would reveal it."""
    log, catalog = grouped(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("dpformer.queries.transitions.query.near_pairs", lambda attributes: np.array([0, 3, 8]))
        done = train(counts(log, catalog=catalog), tmp_path / "run")
    assert "noise of transitions" in wrong(verify(done.folder, dataset=load_dataset(done.config)))


@pytest.mark.parametrize("quiet", [False, True])
def test_popularity_released_otherwise_than_the_rule_says_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """With attributes that say much and short histories it is released twice: then without noise, or not at all."""
    log, catalog = grouped(tmp_path)
    release = counts_release._popularity

    def other(counted: np.ndarray, users: int, sigma: float, described: bool, random: Any) -> Any:
        once, again = release(counted, users, sigma, described and quiet, random)
        if not quiet:
            return once, again
        assert again is not None
        first = release(counted, users, sigma, False, random)[0]
        grid = public_grid(first.noise_multiplier)
        bare = replace(first, counts=np.round(counted / grid) * grid)
        return counts_release.mean_of(first, bare), bare.counts

    with monkeypatch.context() as patch:
        patch.setattr(counts_release, "_popularity", other)
        done = train(counts(log, catalog=catalog), tmp_path / "run")
    found = wrong(verify(done.folder, dataset=load_dataset(done.config)))
    assert ("noise of popularity" if quiet else "releases") in found
