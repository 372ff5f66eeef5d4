"""Attacks on what is released, and how often: each succeeded once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpformer.errors import DpformerError
from dpformer.runs import Config, load_dataset, load_release, resume, train
from dpformer.runs import run as runs
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


def test_items_assumed_public_are_in_the_headline(tmp_path: Path) -> None:
    _, with_user = logs(tmp_path)
    done = train(counts(with_user, assume_items_public=True), tmp_path / "run")
    assert f"{SECRET}-0" in done.release.vocabulary
    assert done.statement["headline"].endswith("or nothing in its place, given the list of items.")
    assert any("the ε above does not cover that" in sentence for sentence in done.statement["words"])
    facts = json.loads((done.folder / "privacy.json").read_text())
    facts["headline"] = facts["headline"].replace(", given the list of items", "")
    (done.folder / "privacy.json").write_text(json.dumps(facts))
    assert "statement" in wrong(verify(done.folder))


def test_delta_is_a_tenth_of_one_user_and_n_is_public(tmp_path: Path) -> None:
    without, _ = logs(tmp_path)
    done = train(counts(without), tmp_path / "run")
    assert done.statement["delta"] == 1 / 6000 and "how many users there are is public" in done.statement["adjacency"]


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
    assert "no statement about it" in verify(tmp_path / "run").findings[0].detail
    with pytest.raises(DpformerError, match="would release another model of the same data"):
        resume(tmp_path / "run")


def test_a_statement_whose_model_is_gone_is_not_made_true_again(tmp_path: Path) -> None:
    without, _ = logs(tmp_path)
    done = train(counts(without), tmp_path / "run")
    (done.folder / "model.safetensors").unlink()
    with pytest.raises(DpformerError, match="its model is gone"):
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
    from dpformer.privacy.randomness import SecureRandom

    without, _ = logs(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(SecureRandom, "normal", lambda self, count, **address: np.zeros(count))
        done = train(counts(without), tmp_path / "run")
    found = wrong(verify(done.folder, dataset=load_dataset(done.config)))
    assert {"noise of popularity", "noise of transitions"} <= found
    unread = verify(done.folder)
    assert {"noise of popularity", "noise of transitions"} <= set(unread.not_checked), "and never called checked"


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
