"""Attacks by an untrusted run folder on the user who opens it: each succeeded once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dpformer as dp
from dpformer.cli.terminal import visible
from dpformer.errors import DpformerError
from dpformer.runs import Config, load_release, train
from dpformer.runs.checkpoint import load_checkpoint, save_checkpoint
from dpformer.runs.folder import RunFolder
from dpformer.runs.trust import is_own
from dpformer.verification.verify import verify
from tests.commands import command
from tests.tiny_runs import invoke, printed, refused
from tests.training.conftest import tiny_config
from tests.training.crash import Crash, crash_after
from tests.training.logs import write_log
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    return train(tiny_config(write_log(folder / "log.csv"), seed=None, epochs=1), folder / "run").folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def strange(own: Path, old: str = "", new: str = "") -> Path:
    """A folder as a stranger hands it over: marked under another secret, the config perhaps changed."""
    config = own / "config.toml"
    config.write_text(config.read_text().replace(old, new))
    (own / "checkpoint" / "owner").write_text("0" * 64 + "\n")
    return own


def test_a_deployment_written_afterwards_leaves_the_folder_ones_own(own: Path) -> None:
    """The mark covered every byte, so adding the section for the cards made the owner a stranger."""
    config = own / "config.toml"
    before = config.read_text()
    for name in ("Films", "Other films"):
        config.write_text(f'{before}\n[deployment]\nname = "{name}"\n')
        assert is_own(RunFolder(own))


def test_the_mark_covers_every_choice(own: Path, tmp_path: Path) -> None:
    """And a choice cannot be hidden behind the section."""
    config = own / "config.toml"
    before = config.read_text()
    log = next(line for line in before.splitlines() if line.startswith("file ="))
    changed = [
        before.replace(log, f'file = "{tmp_path / "passwd.csv"}"'),
        before.replace("max_length = 6", "max_length = 7"),
        before + f'\ncache = "{tmp_path / "stolen"}"\n',
        f'[deployment]\nname = "x"\n{before}',
        before + '\n[deployment]\nname = "x"\n[other]\nfile = "y"\n',
        "a = " + "[" * 100_000,
    ]
    for text in changed:
        assert text != before
        config.write_text(text)
        assert not is_own(RunFolder(own)), text[-200:]
    config.write_text(before)
    assert is_own(RunFolder(own))


def test_files_that_a_stranger_names_are_not_read(own: Path, tmp_path: Path) -> None:
    secret = tmp_path / "passwd.csv"
    secret.write_text("user_id,item_id,timestamp\nroot,secret-row,0\n")
    log = next(line for line in (own / "config.toml").read_text().splitlines() if line.startswith("file ="))
    strange(own, log, f'file = "{secret}"\ncache = "{tmp_path / "stolen"}"')
    assert "was not made by you" in refused("evaluate", own)
    page = tmp_path / "report.html"
    printed("report", own, "--out", page)
    assert "secret-row" not in page.read_text() and "was not made by you" in page.read_text()
    invoke("verify", own)
    with pytest.raises(DpformerError, match="was not made by you"):
        dp.load(own).evaluate(exact=True)
    assert not (tmp_path / "stolen").exists()
    assert "facts on the data" in json.loads(invoke("verify", own, "--json").stdout)["not_checked"]


def test_ones_own_run_finds_its_data_and_a_strangers_takes_what_is_named(own: Path, made: Path) -> None:
    printed("evaluate", own, "--samples", "1")
    strange(own)
    assert "give its data" in refused("evaluate", own)
    printed("evaluate", own, made.parent / "log.csv", "--samples", "1")
    found = json.loads(printed("verify", own, "--json", "--data", made.parent / "log.csv"))
    assert found["not_checked"] == ["signature"]


def test_exact_accuracy_is_readable_by_its_owner_alone(own: Path, tmp_path: Path) -> None:
    printed("report", own)
    assert (own / "report.html").stat().st_mode & 0o077 == 0
    printed("report", own, "--public", "--out", tmp_path / "public.html")


@pytest.mark.parametrize(
    ("old", "new"),
    [("epochs = 1", "epochs = 1000000000"), ("blocks = 1", "blocks = 1000000"), ("epsilon = 4.0", "epsilon = 1e-9")],
)
def test_no_config_keeps_verify_busy(own: Path, old: str, new: str) -> None:
    assert not verify(strange(own, old, new)).passed


def test_no_statement_keeps_verify_busy(own: Path) -> None:
    facts = json.loads((own / "privacy.json").read_text())
    event = facts["events"][-1]
    facts["events"] = [{**event, "noise_multiplier": 1 + n / 100} for n in range(100)]
    (own / "privacy.json").write_text(json.dumps(facts))
    assert not verify(own).passed


PIPES = ["metrics.jsonl", "checkpoint/data.json", "privacy.json", "privacy.json.sig", "model.safetensors"]


@pytest.mark.parametrize("name", [*PIPES, "releases.safetensors"])
def test_a_named_pipe_is_not_waited_for(own: Path, name: str) -> None:
    (own / name).unlink(missing_ok=True)
    os.mkfifo(own / name)
    verify(own)


def test_nested_metrics_are_a_finding(own: Path) -> None:
    (own / "metrics.jsonl").write_text("[" * 100_000)
    assert not verify(own).passed
    (own / "config.toml").write_text("a = " + "[" * 100_000)
    assert not verify(own).passed


@pytest.mark.parametrize(
    "line",
    ['{"step": "x", "loss": 1}', '{"step": 1, "loss": {}}', '{"step": 1, "masked": 3}', '{"step": 9, "served": {}}'],
)
def test_metrics_of_other_types_are_one_sentence(own: Path, line: str) -> None:
    (own / "metrics.jsonl").write_text(line + "\n")
    assert "is not the record of a step" in refused("report", own)


def test_markup_and_escapes_of_a_stranger_are_shown(own: Path) -> None:
    facts = json.loads((own / "privacy.json").read_text())
    facts["events"][-1]["label"] = "[/] \x1b[2J"
    facts["headline"] = "\x1b]0;owned\x07 fine"
    (own / "privacy.json").write_text(json.dumps(facts))
    found = command("verify", own)
    assert found.returncode == 1 and "\x1b" not in found.stdout and "\\u001b]0;owned\\u0007" in found.stdout
    assert visible("a\u202eb\x9b") == "a\\u202eb\\u009b"


def break_verify() -> None:
    import dpformer.verification.verify

    dpformer.verification.verify.verify = None  # type: ignore[assignment]


def test_a_verify_that_crashes_is_not_one_that_found_something(own: Path) -> None:
    found = command("verify", own, before=break_verify)
    assert found.returncode == 3 and "Traceback" in found.stderr
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **locale}
    assert subprocess.run([sys.executable, "-m", "dpformer", "verify", own], env=given).returncode == 0


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    line = ["calibrate", "--epsilon", "5", "--delta", "1e-5", "--sample-rate", "0.5", "--steps", "2"]
    full = command(*line, stdout="/dev/full")
    assert full.returncode == 2 and full.stderr == "dpformer: the output cannot be written: No space left on device\n"
    assert "Traceback" not in command(*line, stdout=None).stderr


def test_too_little_address_space_is_one_sentence(own: Path) -> None:
    """A native library crashed: no sentence, exit code -11."""
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = f"ulimit -v 900000; exec {sys.executable} -m dpformer"
    found = subprocess.run(["bash", "-c", f"{line} verify {own}"], capture_output=True, text=True, env=given)
    assert found.returncode == 2 and found.stderr.startswith("dpformer: the limit on address space is 0.86 GiB")
    assert found.stderr.count("\n") == 1


def test_names_that_cannot_be_made_are_one_sentence(tmp_path: Path) -> None:
    assert "cannot be created: File name too long" in refused("train", "--out", tmp_path / ("x" * 300))


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16", "complex64", "int32", "uint8", "bool"])
def test_a_model_of_other_types_is_refused_when_it_is_opened(own: Path, dtype: str) -> None:
    """It was opened, and failed in the middle of a recommendation."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    from dpformer.runs.model_file import _digest

    path = own / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        about: dict[str, Any] = json.loads(file.metadata()["dpformer"])
    about.pop("sha256")
    for name in tensors:
        if name.startswith("model.") or name == "frequencies":
            changed = {**tensors, name: tensors[name].to(getattr(torch, dtype))}
            if changed[name].dtype == tensors[name].dtype:
                continue
            header = {"dpformer": json.dumps({**about, "sha256": _digest(about, changed)})}
            save_file(changed, path, header)
            with pytest.raises(DpformerError, match="is not an intact dpformer model"):
                load_release(path)


@pytest.mark.parametrize("where", ["optimizer", "plan", "both", "bound", "rate"])
def test_halved_noise_in_a_checkpoint_is_refused(tmp_path: Path, where: str) -> None:
    """With a corrected digest, training continued with less noise, and ended in a traceback at the statement."""
    config = tiny_config(write_log(tmp_path / "log.csv"), seed=None, epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        crash_after(patch, 1)
        with pytest.raises(Crash):
            train(config, tmp_path / "run")
    path = tmp_path / "run" / "checkpoint" / "state.safetensors"
    hashed = Config.make(tmp_path / "run" / "config.toml").hash()
    state = load_checkpoint(path, config=hashed)
    if where in ("optimizer", "both"):
        state["trainer"]["optimizer"]["noise_multiplier"] /= 2
    if where in ("plan", "both"):
        state["plan"]["noise_multiplier"] /= 2
    if where == "bound":
        state["trainer"]["optimizer"]["clip_norm"] *= 2
    if where == "rate":
        state["trainer"]["batches"]["sample_rate"] *= 2
    save_checkpoint(path, state, config=hashed, data=state.pop("data"))
    assert invoke("verify", tmp_path / "run").exit_code == 1
    refused("train", "--resume", tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()
