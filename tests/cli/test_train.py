"""The command itself, as a program: exit codes, one-sentence errors, stopping and going on."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dpformer.cli import app, main
from dpformer.errors import DpformerError
from dpformer.runs.config import Config
from tests.commands import Command, command
from tests.distributed.jobs import stay
from tests.training.logs import write_log

CHOICES = {"epsilon": 4, "batch-size": 20, "epochs": 4, "dim": 8, "blocks": 1, "max-length": 6, "seed": 7, "threads": 1}
PUBLIC = "--assume-items-public"  # a log of 60 users has too few for a private list of items
SMALL = [*(word for name, value in CHOICES.items() for word in (f"--{name}", str(value))), PUBLIC]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.csv")


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def refused(*arguments: Any) -> str:
    """The sentence that `main` prints before it exits with 2."""
    result = invoke(*arguments)
    assert isinstance(result.exception, DpformerError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_a_run_from_the_command_line(log: Path, tmp_path: Path) -> None:
    result = invoke("train", log, *SMALL, "--out", tmp_path / "run", "--no-re-attention")
    assert result.exit_code == 0, result.output
    assert "NOT PRIVATE: noise for ε = " in result.stdout and "dpformer evaluate" in result.stdout
    assert "step 12/12" in result.stderr and "ε 4.00" in result.stderr, "plain lines where there is no terminal"
    config = Config.make(tmp_path / "run" / "config.toml")
    assert (config.reattention, config.batch_size) == (False, 20)
    assert str(log) in (tmp_path / "run" / "config.toml").read_text()
    again = invoke("train", "--resume", tmp_path / "run", "--json")
    assert json.loads(again.stdout)["steps"] == 12


def test_without_choices_it_is_one_release_of_whole_histories(log: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = invoke("train", log, "--out", run, PUBLIC)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("User-level differential privacy: ε = ")
    config, facts = Config.make(run / "config.toml"), json.loads((run / "privacy.json").read_text())
    assert (config.model, config.max_length, config.recipe) == ("counts", None, "default")
    assert facts["steps"] is None and [event["label"] for event in facts["events"]] == ["transition counts"]
    assert "One user is one sequence; all items of a user are used for training." in facts["data"]
    for words in (["evaluate", run], ["report", run], ["verify", run], ["recommend", run, "--history", "i1,i2"]):
        assert invoke(*words).exit_code == 0, words
    audited = json.loads(invoke("audit", run, "--canaries", 100, "--seed", 0, "--json").stdout)
    assert audited["passed"] and audited["of"] == "transition counts"
    assert "no matrices to store in int8" in refused("export", run, tmp_path / "m.onnx", "--int8")
    assert invoke("export", run, tmp_path / "m.onnx").exit_code == 0
    page = (run / "report.html").read_text()
    assert "learning_rate" not in page and "<h2>Training" not in page


def test_the_papers_recipe_is_a_flag_away(log: Path) -> None:
    result = invoke("train", log, "--recipe", "paper", "--dry-run", "--users", 6040, "--json")
    facts = json.loads(result.stdout)
    assert facts["steps"] == 590 and facts["expected_batch_size"] == 1024


def test_a_config_file_and_flags_on_top(log: Path, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'file = "{log}"\nepsilon = 2.0\nepochs = 1\ndim = 8\nblocks = 1\nseed = 1\n')
    result = invoke("train", "--config", tmp_path / "c.toml", "--epsilon", "inf", "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert "NOT PRIVATE: trained without clipping and without noise" in result.stdout
    assert "not private" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--epsilon", 0], "epsilon is 0.0; it must be greater than 0"),
        (["--model", "bert"], "model is 'bert'"),
        (["--batch-size", 100], "batch_size is 100, but there are only 60 users"),
        (["--user-column", "who"], "who"),
        (["--items", 5], "--items needs --dry-run"),
        (["--config", "none.toml"], "none.toml cannot be read"),
        (["--catalog", "none.csv"], "none.csv"),
        (["--dry-run"], "give --users N"),
        (["--resume", ".", "--epochs", "3"], "give no other options"),
    ],
)
def test_bad_choices(log: Path, tmp_path: Path, arguments: list[Any], sentence: str) -> None:
    where = [] if "--resume" in arguments or "--dry-run" in arguments else ["--out", tmp_path / "run"]
    assert sentence in refused("train", log, *where, *arguments)
    assert not (tmp_path / "run").exists(), "nothing is left behind"


@pytest.mark.parametrize(
    "content", [b"", b"user_id,item_id\n", b"\x00\xff\x00junk\n", b"a,b,c\n1,2,x\n", b"u,i\n1,2\n"]
)
def test_bad_data(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log.csv").write_bytes(content)
    refused("train", tmp_path / "log.csv", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert "log2.csv" in refused("train", tmp_path / "log2.csv", "--out", tmp_path / "run")


def test_a_folder_in_the_way(log: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert "already exists: resume it with --resume" in refused("train", log, *SMALL, "--out", tmp_path / "run")
    assert "is not a run folder" in refused("train", "--resume", tmp_path / "run")
    assert "is not a run folder" in refused("train", "--resume", tmp_path / "nowhere")


def test_errors_of_the_program_exit_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["dpformer", "train", str(tmp_path / "none.csv"), "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("dpformer: ") and error.count("\n") == 1 and "Traceback" not in error


def test_the_dry_run_touches_no_data(tmp_path: Path) -> None:
    """The file need not even be there."""
    result = invoke("train", tmp_path / "none.csv", "--dry-run", "--users", 6040, "--batch-size", 1024, "--json")
    plan = json.loads(result.stdout)
    assert (plan["steps"], plan["private"], plan["estimate"]) == (590, True, None)
    assert 4.9 < plan["epsilon"] <= 5 and [event["label"] for event in plan["releases"]] == ["items"]
    assert list(tmp_path.iterdir()) == []


def test_the_dry_run_estimates_time_and_memory(tmp_path: Path) -> None:
    choices = ["--dim", 8, "--max-length", 10, "--threads", 1, "--micro-batch-tokens", 100, "--epochs", 1]
    result = invoke("train", tmp_path / "none.csv", "--dry-run", "--users", 100, "--items", 50, *choices)
    assert result.exit_code == 0, result.output
    for words in ("noise multiplier σ", "steps T", "for items", "parameters", "GiB", "min, if every user"):
        assert words in result.stdout


def test_the_options_are_the_choices_of_the_config() -> None:
    from typer.main import get_command

    command = get_command(app).commands["train"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params}
    assert set(Config.model_fields) - {"deployment", "previous"} <= names  # a section of a file; --warm-start RUN
    own = {"out", "config", "resume", "dry_run", "items", "as_json", "help_all", "ledger", "sign", "key_file"}
    assert names - set(Config.model_fields) == own


def test_ctrl_c_saves_and_resume_ends_in_the_same_model(log: Path, tmp_path: Path) -> None:
    more = ["train", log, *SMALL, "--epochs", 15]
    assert invoke(*more, "--out", tmp_path / "whole").exit_code == 0
    before_the_end = partial(stay, 40, tmp_path / "leave")  # of 45 steps
    running = Command(*more, "--out", tmp_path / "broken", before=before_the_end)
    running.wait_for_lines(tmp_path / "broken" / "metrics.jsonl", 3)
    os.kill(running.pid, signal.SIGINT)
    (tmp_path / "leave").touch()
    broken = running.ended()
    assert broken.returncode == 130, broken.stderr
    assert (
        "everything is saved; resume with: dpformer train --resume" in broken.stderr
        and "Traceback" not in broken.stderr
    )
    assert command("train", "--resume", tmp_path / "broken").returncode == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert models[0] == models[1]


def temporary(folder: str) -> None:
    tempfile.tempdir = folder


def test_sigterm_while_a_log_is_read_is_one_sentence(tmp_path: Path) -> None:
    """Before there is anything to resume; the private folder of the engine goes, too."""
    log, spill = tmp_path / "log.csv", tmp_path / "spill"
    log.write_text("user_id,item_id,timestamp\n" + "".join(f"{n % 9999},{n % 777},{n}\n" for n in range(1_000_000)))
    spill.mkdir()
    running = Command("train", log, "--out", tmp_path / "run", before=partial(temporary, str(spill)))
    while not any(spill.iterdir()):
        assert running.process.is_alive(), running.written()
        time.sleep(0.02)
    os.kill(running.pid, signal.SIGTERM)
    stopped = running.ended()
    assert stopped.returncode == 130 and "Traceback" not in stopped.stderr, stopped.stderr
    assert stopped.stderr.endswith("dpformer: interrupted; the last checkpoint is intact\n")
    assert not any(spill.iterdir()) and not (tmp_path / "run").exists()


def test_help_is_quick_because_torch_stays_out() -> None:
    code = "import sys; from dpformer.cli import app; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
