"""`verify --replay`: an honest run comes out again bit for bit; a run that did anything else does not.

Each fault is in the run alone. It is verified afterwards by the code as it is, as a stranger would.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpformer.noise import SecureRandom
from dpformer.queries.transitions import rounds
from dpformer.runs import Config, load_release, save_release, train
from dpformer.runs.keys import commitment, keep_key, read_kept_key
from dpformer.training.optimizer import PrivateOptimizer
from tests.tiny_runs import invoke, refused
from tests.training.conftest import tiny_config
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)

Verified = dict[str, Any]


def replayed(run: Path, key: Path, *more: Any) -> Verified:
    return json.loads(invoke("verify", run, "--replay", "--key-file", key, *more, "--json").stdout)


def wrong(found: Verified) -> set[str]:
    return {finding["name"] for finding in found["findings"] if finding["ok"] is False}


def claim(found: Verified, name: str) -> Verified:
    (one,) = [one for one in found["claims"] if one["name"] == name]
    return one


def small(folder: Path, model: str = "transformer", **changes: Any) -> Config:
    log = write_log(folder / "log.csv", users=600 if model == "counts" else 60)
    more = {"epsilon": 8.0} if model == "counts" else {"epochs": 1}
    return tiny_config(log, model=model, seed=None, **{**more, **changes})


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that started from counts, with private metrics: every mechanism there is."""
    folder = tmp_path_factory.mktemp("network")
    config = small(folder, warm_start=0.3, private_metrics=True, bands=2)
    train(config, folder / "run", key_file=folder / "key")
    return folder


@pytest.mark.parametrize("model", ["transformer", "counts"])
def test_an_honest_run_comes_out_again(model: str, network: Path, tmp_path: Path) -> None:
    folder = network
    if model == "counts":
        folder = tmp_path
        train(small(tmp_path, "counts", private_metrics=True), tmp_path / "run", key_file=tmp_path / "key")
    assert (folder / "key").stat().st_mode & 0o077 == 0
    found = replayed(folder / "run", folder / "key")
    assert found["passed"] and found["verified"], found
    assert [one["name"] for one in found["claims"] if not one["ok"]] == ["publisher"]
    assert found["verdict"].startswith("Replayed: config, data and key reproduce the release exactly.")
    assert "replay" in claim(found, "model")["how"] and "replay" in claim(found, "randomness")["how"]
    assert not list((folder / "run").glob(".*.part")) and not (folder / "run" / "checkpoint" / "keys.json").exists()


def test_without_a_replay_nothing_is_called_verified(network: Path) -> None:
    found = json.loads(invoke("verify", network / "run", "--json").stdout)
    assert found["passed"] and not found["verified"]
    assert "NOT VERIFIED" in found["verdict"] and "model; randomness; publisher" in found["verdict"]
    assert claim(found, "model")["how"] == "not checked: verify --replay, with the data and the key of the run"
    said = invoke("verify", network / "run").output
    assert "holds" not in said.splitlines()[-1] and "NOT VERIFIED" in " ".join(said.split())


def forged(run: Path, change: Callable[[Any], None]) -> None:
    """The model written again by the library itself with other weights, and its hash in the statement put right."""
    release = load_release(run / "model.safetensors")
    with torch.no_grad():
        change(release.model)
    given = {"vocabulary": release.vocabulary, "metadata": release.metadata, "frequencies": release.frequencies}
    save_release(run / "model.safetensors", release.model, **given)
    facts = json.loads((run / "privacy.json").read_text())
    facts["hashes"]["model"] = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    (run / "privacy.json").write_text(json.dumps(facts))


def test_a_history_written_into_the_weights_is_never_called_verified(network: Path, tmp_path: Path) -> None:
    """It passed as "All that was checked holds"."""
    run = Path(shutil.copytree(network / "run", tmp_path / "run"))
    history = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0])
    forged(run, lambda model: next(model.parameters()).view(-1)[:5].copy_(history))
    unreplayed = json.loads(invoke("verify", run, "--json").stdout)
    assert unreplayed["passed"], "no statistic can see it"
    assert "NOT VERIFIED" in unreplayed["verdict"] and claim(unreplayed, "model")["ok"] is None
    found = replayed(run, network / "key")
    assert wrong(found) == {"replay"} and "by up to" in json.dumps(found)
    assert claim(found, "model")["ok"] is False and found["verdict"].startswith("Verification failed")


# Runs that were not what they said.


def run_with(patch: Callable[[pytest.MonkeyPatch], None], config: Config, folder: Path) -> Verified:
    """Trains with a fault in place, then replays without it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch(monkeypatch)
        train(config, folder / "run", key_file=folder / "key")
    return replayed(folder / "run", folder / "key")


def noise_of_seed_0(patch: pytest.MonkeyPatch) -> None:
    words = SecureRandom.fill_words
    zero = SecureRandom(seed=0)
    patch.setattr(SecureRandom, "fill_words", lambda self, *a, **k: words(zero, *a, **k))


def one_noise_for_all_rounds(patch: pytest.MonkeyPatch) -> None:
    noisy = rounds._noisy
    patch.setattr(rounds, "_noisy", lambda counts, deviation, random, step: noisy(counts, deviation, random, 1))


def fifty_cells_without_noise(patch: pytest.MonkeyPatch) -> None:
    noisy = rounds._noisy

    def quiet(counts: np.ndarray, deviation: float, random: Any, step: int) -> np.ndarray:
        exact = counts[:50] / rounds.GRID
        found = noisy(counts, deviation, random, step)
        grid = rounds.public_grid(deviation)
        found[:50] = np.round(exact / grid) * grid
        return found

    patch.setattr(rounds, "_noisy", quiet)


@pytest.mark.parametrize("fault", [noise_of_seed_0, one_noise_for_all_rounds, fifty_cells_without_noise])
def test_counts_with_other_noise_than_that_of_the_key(fault: Callable[..., None], tmp_path: Path) -> None:
    """Its size is right, or nearly: all three passed."""
    found = run_with(fault, small(tmp_path, "counts"), tmp_path)
    assert "replay" in wrong(found) and not found["verified"]
    assert claim(found, "randomness")["ok"] is False


def quieter(patch: pytest.MonkeyPatch) -> None:
    noise = PrivateOptimizer._noise

    def scaled(self: PrivateOptimizer, *given: Any) -> list[Any]:
        return [replace(made, ready=0.99 * made.all()) for made in noise(self, *given)]

    patch.setattr(PrivateOptimizer, "_noise", scaled)


def test_training_with_a_hundredth_less_noise(tmp_path: Path) -> None:
    assert wrong(run_with(quieter, small(tmp_path), tmp_path)) == {"replay"}


# Keys.


def test_another_key_and_other_data_are_found(network: Path, tmp_path: Path) -> None:
    keep_key(tmp_path / "other", SecureRandom("run"))
    assert wrong(replayed(network / "run", tmp_path / "other")) == {"key of the run", "replay"}
    other = write_log(tmp_path / "other.csv", seed=3)
    found = wrong(replayed(network / "run", network / "key", "--data", other))
    assert {"hash of the data", "replay"} <= found


def test_a_key_that_anybody_can_guess_is_found(network: Path, tmp_path: Path) -> None:
    for key, said in ((SecureRandom(seed=7), "seed 7"), (SecureRandom(key=bytes(32)), "zeros")):
        run = Path(shutil.copytree(network / "run", tmp_path / said))
        facts = json.loads((run / "privacy.json").read_text())
        facts["key_commitment"] = commitment(key)
        (run / "privacy.json").write_text(json.dumps(facts))
        found = json.loads(invoke("verify", run, "--json").stdout)
        assert wrong(found) == {"commitment to the key"} and said in json.dumps(found)


def test_a_kept_key_is_that_of_the_statement_and_is_never_replaced(network: Path, tmp_path: Path) -> None:
    facts = json.loads((network / "run" / "privacy.json").read_text())
    key = read_kept_key(network / "key")
    assert commitment(key["random"]) == facts["key_commitment"] and key["key"] not in json.dumps(facts)
    log = network / "log.csv"
    said = refused("train", log, "--out", tmp_path / "b", "--key-file", network / "key")
    assert "keys are never overwritten" in said and not (tmp_path / "b").exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "key": "aa"}', "\x00"])
def test_what_is_no_key_is_one_sentence(network: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "key").write_text(content)
    assert "is not a key file" in refused("verify", network / "run", "--replay", "--key-file", tmp_path / "key")


def test_a_replay_elsewhere_is_refused(network: Path, tmp_path: Path) -> None:
    """Other versions or processors round otherwise, which says nothing about the run."""
    facts = json.loads((network / "key").read_text())
    for name, value, said in (("processor", "abacus", "rounds differently"), ("processes", 2, "of a single process")):
        (tmp_path / "key").write_text(json.dumps({**facts, name: value}))
        assert said in refused("verify", network / "run", "--replay", "--key-file", tmp_path / "key")
    assert "go together" in refused("verify", network / "run", "--replay")
    run = Path(shutil.copytree(network / "run", tmp_path / "run"))
    statement = json.loads((run / "privacy.json").read_text())
    statement["versions"]["torch"] = "2.0.0"
    (run / "privacy.json").write_text(json.dumps(statement))
    assert "made with torch 2.0.0" in refused("verify", run, "--replay", "--key-file", network / "key")


def test_a_stranger_names_data_and_gets_the_same(network: Path, tmp_path: Path) -> None:
    """Someone else's folder: its paths are not followed."""
    run = Path(shutil.copytree(network / "run", tmp_path / "run"))
    (run / "checkpoint" / "owner").unlink()
    assert "give its data" in refused("verify", run, "--replay", "--key-file", network / "key")
    found = replayed(run, network / "key", "--data", network / "log.csv")
    assert found["verified"], found
