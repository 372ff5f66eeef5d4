"""Whole runs in this process, on a log of 60 users."""

import hashlib
import hmac
import json
import math
import os
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpformer.errors import DpformerError
from dpformer.kinds import network
from dpformer.models import Transformer
from dpformer.noise import SecureRandom
from dpformer.queries.transitions import query
from dpformer.runs import (
    Config,
    Interrupted,
    finished,
    load_dataset,
    load_release,
    resume,
    run,
    session,
    train,
)
from dpformer.runs.folder import Metrics, RunFolder
from dpformer.runs.planning import make_plan
from dpformer.training.trainer import Trainer
from dpformer.verification.verify import verify
from tests.distributed import jobs
from tests.runs.killing import kill
from tests.training.conftest import tiny_config
from tests.training.crash import Crash, crash_after
from tests.training.logs import write_log

KILLS = int(os.environ.get("DPFORMER_KILLS", "8"))


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> run.Run:
    folder = tmp_path_factory.mktemp("done")
    return train(tiny_config(write_log(folder / "log.csv"), evaluate_every=2), folder / "run")


def test_what_a_run_leaves(done: run.Run) -> None:
    names = {path.name for path in done.folder.iterdir()}
    files = {"config.toml", "metrics.jsonl", "privacy.json", "model.safetensors", "releases.safetensors"}
    assert names == files | {"checkpoint", ".lock"}
    assert {path.name for path in (done.folder / "checkpoint").iterdir()} == {"data.json", "owner"}, "the keys are gone"
    assert stat.S_IMODE((done.folder / "checkpoint").stat().st_mode) == 0o700
    assert Config.make(done.folder / "config.toml") == done.config
    assert finished(done.folder).statement == done.statement
    assert resume(done.folder).statement == done.statement, "a run that is done is left as it is"
    release = load_release(done.folder / "model.safetensors")
    assert set(release.vocabulary) <= {f"i{n}" for n in range(20)}
    assert release.model.scores([[0, 1]]).shape == (1, len(release.vocabulary))
    assert release.frequencies is not None and release.metadata["epsilon"] == done.statement["epsilon"]


def test_metrics_have_a_line_a_step_and_say_what_is_not_covered(done: run.Run) -> None:
    lines = records(done.folder)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "masked" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in evaluations] == [6, 12] and not any(line["covered"] for line in evaluations)
    assert all(0 < line["epsilon"] <= 4 for line in steps)
    assert stat.S_IMODE((done.folder / "metrics.jsonl").stat().st_mode) == 0o600


def test_the_statement_tells_all(done: run.Run) -> None:
    facts = done.statement
    assert facts["private"] is False and facts["headline"].startswith("NOT PRIVATE"), "it had a seed"
    assert 3.9 < facts["epsilon"] <= 4 and facts["delta"] == 1 / 600
    assert (facts["steps"], facts["sample_rate"], facts["expected_batch_size"]) == (12, 20 / 60, 20)
    assert [event["label"] for event in facts["events"]] == ["frequencies", "training"]
    assert all(0 < event["epsilon_alone"] < facts["epsilon"] for event in facts["events"])
    assert facts["unit"] == "user" and facts["sampler"] == "Poisson" and facts["clip_norm"] == 1
    assert facts["hashes"]["config"] == done.config.hash()
    assert any("metrics.jsonl" in sentence for sentence in facts["not_covered"])
    json.dumps(facts, allow_nan=False)


def test_the_hash_of_the_data_is_published_under_a_salt_only(done: run.Run) -> None:
    """With a plain hash, someone who knows all users but one could test candidates for the last."""
    secret = json.loads((done.folder / "checkpoint" / "data.json").read_text())
    dataset = load_dataset(done.config)
    assert secret["hash"] == dataset.hash
    public = (done.folder / "privacy.json").read_text()
    assert dataset.hash not in public
    assert hmac.new(bytes.fromhex(secret["salt"]), dataset.hash.encode(), hashlib.sha256).hexdigest() in public


def test_a_real_run_is_private_and_no_two_are_alike(log: Path, tmp_path: Path) -> None:
    runs = [train(tiny_config(log, seed=None, epochs=1), tmp_path / name) for name in "ab"]
    assert all(run.statement["private"] for run in runs)
    assert runs[0].statement["headline"].startswith("User-level differential privacy: ε = ")
    assert runs[0].statement["random_source"].startswith("operating system key")
    first, second = (run.release.model.items.weight.detach().numpy() for run in runs)
    assert not np.allclose(first, second)


def test_without_privacy_everything_says_so(log: Path, tmp_path: Path) -> None:
    done = train(tiny_config(log, epsilon=math.inf, seed=None), tmp_path / "run")
    assert done.statement["private"] is False and done.statement["epsilon"] is None and done.statement["events"] == []
    assert done.statement["headline"].startswith("NOT PRIVATE: trained without clipping and without noise")
    assert done.release.metadata["headline"] == done.statement["headline"]
    assert all(line["epsilon"] is None for line in records(done.folder))


def test_a_vocabulary_released_with_dp(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.csv", users=600, items=4)
    done = train(
        tiny_config(log, assume_items_public=False, delta=1e-3, epsilon=20.0, items_share=0.3, epochs=1),
        tmp_path / "run",
    )
    assert [event["label"] for event in done.statement["events"]] == ["items", "training"]
    assert done.statement["events"][0]["delta"] == pytest.approx(1e-4)
    assert done.statement["epsilon"] <= 20
    assert any("released from the data with differential privacy" in sentence for sentence in done.statement["data"])


@pytest.mark.parametrize("model", ["gru", "lstm"])
def test_recurrent_models(log: Path, tmp_path: Path, model: str) -> None:
    done = train(tiny_config(log, model=model, epochs=1), tmp_path / "run")
    assert type(done.release.model).__name__ == model.upper()


def test_correlated_noise_is_an_error_of_what_it_leaves_in_the_sum(log: Path, tmp_path: Path) -> None:
    """Re-Attention takes the noise of a step, and correlated steps take back part of each other's."""
    config = tiny_config(log, bands=2, batch_size=20, reattention=True, frequency_bias=False).resolve(
        users=60, threads=1
    )
    plan, p = make_plan(config, 60), torch.linspace(0.01, 0.9, 20)
    model = network.build_model(config, plan, 20, p, SecureRandom("run", seed=1))
    assert isinstance(model, Transformer)
    sigma = plan.noise_multiplier * plan.noise.sum_deviation(plan.steps) / plan.steps**0.5
    torch.testing.assert_close(model.item_error, sigma / 20 / p)
    assert sigma < 0.9 * plan.noise_multiplier / plan.noise.coefficients()[0], "less than what one step adds"
    done = train(config.replace(epochs=1), tmp_path / "run")
    assert verify(done.folder).passed


def test_counts_are_one_release(tmp_path: Path) -> None:
    """No steps, no checkpoint; the whole budget in one event, and the statement does not speak of training."""
    config = tiny_config(write_log(tmp_path / "log.csv", users=400), model="counts", seed=None)
    done = train(config, tmp_path / "run")
    (event,) = done.statement["events"]
    assert event["label"] == "transition counts" and 3.9 < done.statement["epsilon"] <= 4
    assert done.statement["private"] and done.statement["steps"] is None and done.statement["sampler"] is None
    assert type(done.release.model).__name__ == "TransitionCounts" and done.release.frequencies is not None
    assert done.release.model.scores([[0, 1]]).shape == (1, 20)
    assert not any("took" in sentence for sentence in done.statement["words"])
    assert resume(done.folder).statement == done.statement


def test_a_warm_start_is_one_release_with_its_share_of_the_budget(tmp_path: Path) -> None:
    """Counts and training in one ledger, frequencies from the counts; steps start where the counts left the items."""
    log = write_log(tmp_path / "log.csv", users=400)
    config = tiny_config(log, recipe="paper", warm_start=0.4, epochs=1, seed=None)
    done = train(config, tmp_path / "run")
    counts, training = done.statement["events"]
    assert (counts["label"], training["label"]) == ("transition counts", "training")
    alone = train(config.replace(model="counts", warm_start=0.0), tmp_path / "counts").statement["events"][0]
    assert counts["noise_multiplier"] == pytest.approx(alone["noise_multiplier"] / math.sqrt(0.4), rel=1e-3)
    assert done.statement["private"] and 3.9 < done.statement["epsilon"] <= 4
    assert any("which items follow which" in sentence for sentence in done.statement["words"])
    assert done.release.frequencies is not None and isinstance(done.release.model, Transformer)
    assert done.release.model.item_error.isfinite().all(), "Re-Attention has the frequencies that the counts brought"
    still = train(config.replace(seed=1, learning_rate=1e-9), tmp_path / "still").release.model
    assert isinstance(still, Transformer)
    sizes = still.items.weight.detach().norm(dim=1)
    assert sizes.square().mean().item() == pytest.approx(1, abs=0.1), "random rows would be a hundred times smaller"


@pytest.mark.parametrize("choices", [{"warm_start": 0.4}, {"model": "counts"}], ids=["warm start", "counts"])
def test_counts_with_other_noise_than_planned_are_never_released_nor_trained_on(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]
) -> None:
    release = query.release_transition_sums

    def careless(sums: Any, num_items: int, noise: float, **rest: Any) -> Any:
        return release(sums, num_items, noise / 2, **rest)

    monkeypatch.setattr(query, "release_transition_sums", careless)
    with pytest.raises(RuntimeError, match="differ from the plan"):
        train(tiny_config(log, **choices), tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()


# Stopping and going on.


@pytest.mark.parametrize(
    ("steps", "every", "choices"),
    [
        (0, 60.0, {}),
        (5, 60.0, {}),
        (5, 0.0, {}),
        (11, 0.0, {}),
        (5, 60.0, {"warm_start": 0.5}),
        (5, 0.0, {"bands": 3}),
        (2, 60.0, {"bands": 2, "model": "gru"}),
    ],
)
def test_a_crash_changes_nothing(
    done: run.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, every: float, choices: dict[str, Any]
) -> None:
    """Whether the last checkpoint is from just before or from the start: the same model, bit for bit, the same ε."""
    assert done.config.file is not None
    config = tiny_config(done.config.file, evaluate_every=2, checkpoint_seconds=every, **choices)
    whole = train(config, tmp_path / "whole")
    crash_after(monkeypatch, steps)
    with pytest.raises(Crash):
        train(config, tmp_path / "broken")
    with pytest.raises(DpformerError, match="is not finished; resume with"):
        finished(tmp_path / "broken")
    monkeypatch.undo()
    again = resume(tmp_path / "broken")
    assert (again.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert again.statement == whole.statement
    assert records(again.folder) == records(whole.folder)


def test_a_private_run_never_draws_other_noise_for_a_step_it_took(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a seed too: a second draw for the same step would be a second release that nobody accounted for."""
    crash_after(monkeypatch, 5)
    with pytest.raises(Crash):
        train(tiny_config(log, seed=None), tmp_path / "run")
    taken = records(tmp_path / "run")
    monkeypatch.undo()
    resume(tmp_path / "run")
    assert len(taken) == 5 and records(tmp_path / "run")[:5] == taken, "loss and norms show batch, mask and weights"


def test_kill_minus_nine_at_random_moments(log: Path, tmp_path: Path) -> None:
    """DPFORMER_KILLS=500 makes it a soak test."""
    config = tiny_config(log, checkpoint_seconds=0.0, epochs=8)
    killing = jobs.start(1, kill, config, tmp_path / "whole", tmp_path / "broken", KILLS, 1)
    assert jobs.finish(killing, seconds=100 * KILLS) == [0]
    assert int((tmp_path / "broken.kills").read_text()) >= 1, "nothing was killed"
    for name in ("model.safetensors", "privacy.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert records(tmp_path / "broken") == records(tmp_path / "whole")
    assert sorted(path.name for path in (tmp_path / "broken" / "checkpoint").iterdir()) == ["data.json", "owner"]


def test_keys_that_outlived_the_run_are_deleted_on_resume(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the statement and the deletion of the keys."""
    monkeypatch.setattr(RunFolder, "forget_secrets", lambda self: None)
    done = train(tiny, tmp_path / "run")
    assert (done.folder / "checkpoint" / "state.safetensors").exists()
    monkeypatch.undo()
    assert resume(done.folder).statement == done.statement
    assert not (done.folder / "checkpoint" / "state.safetensors").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_request_to_stop_saves_and_says_how_to_go_on(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ctrl-C, and a terminal that was closed."""
    advance = Trainer.advance

    def interrupted(self: Trainer) -> dict[str, Any]:
        if self.step == 3:
            os.kill(os.getpid(), number)
        return advance(self)

    whole = train(tiny, tmp_path / "whole")
    monkeypatch.setattr(Trainer, "advance", interrupted)
    before = signal.getsignal(number)
    with pytest.raises(
        Interrupted, match=r"interrupted after step 4 of 12; everything is saved; resume with: dpformer train --resume"
    ):
        train(tiny, tmp_path / "run")
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    again = resume(tmp_path / "run")
    assert (again.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


# What is refused.


def stopped(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    crash_after(monkeypatch, 4)
    with pytest.raises(Crash):
        train(config, folder)
    monkeypatch.undo()
    return folder


def test_other_data_or_another_config_is_refused(
    tiny: Config, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stopped(tiny, tmp_path / "run", monkeypatch)
    content = log.read_text()
    log.write_text(content + "u0,i3,99\n")
    with pytest.raises(DpformerError, match="was made with other data"):
        resume(folder)
    log.write_text(content)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("epochs = 4", "epochs = 5"))
    with pytest.raises(DpformerError, match="was made with another config"):
        resume(folder)


def test_a_folder_that_is_there_is_refused_and_one_that_is_not_a_run_too(tiny: Config, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(DpformerError, match=r"already exists: resume it with --resume .*, or choose another"):
        train(tiny, tmp_path / "run")
    with pytest.raises(DpformerError, match=r"is not a run folder: it has no config.toml"):
        resume(tmp_path / "run")


def test_bad_data_leaves_no_folder(tiny: Config, log: Path, tmp_path: Path) -> None:
    log.write_text("nothing\n")
    with pytest.raises(DpformerError):
        train(tiny, tmp_path / "runs" / "run")
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(done: run.Run) -> None:
    done.folder.chmod(0o500)
    try:
        with pytest.raises(DpformerError, match="cannot be written to"), RunFolder(done.folder).lock():
            pass
    finally:
        done.folder.chmod(0o755)


def test_two_processes_cannot_share_a_run(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stopped(tiny, tmp_path / "run", monkeypatch)
    with RunFolder(folder).lock(), pytest.raises(DpformerError, match="another process is using"):
        resume(folder)
    resume(folder)


@pytest.mark.parametrize("writer", ["save_checkpoint", "save_release"])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    whole = train(tiny, tmp_path / "whole")
    write, calls = getattr(session, writer), []

    def full(path: Path, *rest: Any, **named: Any) -> None:
        calls.append(path)
        if writer == "save_release" or len(calls) == 4:
            raise DpformerError(f"{path} cannot be written: No space left on device")
        write(path, *rest, **named)

    monkeypatch.setattr(session, writer, full)
    with pytest.raises(DpformerError, match="No space left on device"):
        train(tiny.replace(checkpoint_seconds=0.0) if writer == "save_checkpoint" else tiny, tmp_path / "run")
    assert not (tmp_path / "run" / "privacy.json").exists()
    monkeypatch.undo()
    again = resume(tmp_path / "run")
    if writer == "save_release":
        assert (again.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


def test_metrics_after_a_kill_or_a_full_disk(tmp_path: Path) -> None:
    """Lines of steps that will be taken again are cut off, and so is half a line."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "split": "test"}\n{"step": 3}\n{"st')
    metrics = Metrics(path, 2)
    metrics.add({"step": 3, "new": True})
    metrics.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][2:] == [
        {"step": 2, "split": "test"},
        {"step": 3, "new": True},
    ]


def test_metrics_on_a_full_disk_are_one_sentence(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.file = open("/dev/full", "a") if Path("/dev/full").exists() else pytest.skip("needs /dev/full")  # noqa: SIM115
    with pytest.raises(DpformerError, match=r"metrics.jsonl cannot be written: No space left on device"):
        metrics.add({"step": 1})


def test_weights_that_are_not_finite_are_never_released(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = Trainer.released

    def broken(self: Trainer) -> Any:
        model = released(self)
        model.items.weight.data.fill_(math.nan)
        return model

    monkeypatch.setattr(Trainer, "released", broken)
    with pytest.raises(DpformerError, match="training has diverged"):
        train(tiny, tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()
