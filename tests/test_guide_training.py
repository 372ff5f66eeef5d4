"""docs/guide/training.md: its commands run and print what it shows, its options exist and have the defaults it says."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dpformer.runs import Config
from tests.tiny_runs import printed
from tests.training.logs import write_log
from tests.training.memo import remember

TEXT = (Path(__file__).parent.parent / "docs" / "guide" / "training.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
OF_COMMANDS = {
    "dry-run",
    "users",
    "items",
    "json",
    "config",
    "resume",
    "public",
    "batch",
    "epsilon",
    "ledger",
}  # no choices
SPELT = {"re-attention": "reattention"}


def commands() -> list[list[str]]:
    lines = [line.removeprefix("$ ") for kind, block in BLOCKS if not kind for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("dpformer ")]


def choice(option: str) -> str:
    name = option.removeprefix("--no-").removeprefix("--")
    return SPELT.get(name, name.replace("-", "_"))


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remember(monkeypatch.setattr)
    write_log(tmp_path / "log.csv", users=200)
    monkeypatch.setenv("COLUMNS", "160")
    first, plan, one, eight, budget, counted, spent, again, doctor = commands()
    printed(*first, "--out", "runs/log-transformer-epsilon-5")
    shown = next(block for kind, block in BLOCKS if "--dry-run" in block)
    assert [line.rstrip() for line in printed(*plan).splitlines()] == shown.splitlines()[1:]
    for command, noise in ((one, "13.33"), (eight, "11.45")):
        assert noise in printed(*command) and f"noise in the sum {noise}" in TEXT
    printed(*budget)
    printed(*counted, "--assume-items-public", "--out", "runs/counted")
    assert "more runs like" in printed(*spent)
    assert again == ["train", "--resume", "runs/log-transformer-epsilon-5"]
    assert doctor == ["doctor", "--device", "cuda"]  # tests/cli/test_doctor.py
    assert "is finished" in printed(*again) or Path(again[-1], "model.safetensors").exists()


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remember(monkeypatch.setattr)
    write_log(tmp_path / "log.csv", users=200)
    names: dict[str, Any] = {}
    for kind, block in BLOCKS:
        if kind == "python":
            exec(compile(block, "training.md", "exec"), names)
    assert names["run"].statement["headline"].startswith("User-level differential privacy: ε = ")
    assert not names["run"].release.model.training


def test_the_file_of_choices_is_read(tmp_path: Path) -> None:
    (toml,) = [block for kind, block in BLOCKS if kind == "toml"]
    (tmp_path / "run.toml").write_text(toml)
    config = Config.make(tmp_path / "run.toml")
    assert (config.epsilon, config.recipe, config.evaluate_every) == (8, "paper", 5)


def test_every_option_is_one() -> None:
    fields = Config.model_fields
    for option in set(re.findall(r"--[a-z][a-z-]+", TEXT)):
        assert choice(option) in fields or option[2:] in OF_COMMANDS, f"{option} does not exist"


def test_defaults_are_those_of_the_code() -> None:
    checked = 0
    for options, defaults in re.findall(r"^\| [a-z]* ?\| (`--[^|]+) \| ([^|]+) \|", TEXT, re.MULTILINE):
        names = [choice(option) for option in re.findall(r"--[a-z-]+", options)]
        values = defaults.replace("`", "").strip().split(", ")
        for name, said in zip(names, values, strict=False):
            default = Config.model_fields[name].default
            if default is None or name == "model":  # described in words
                continue
            words = {"on": True, "off": False}
            value = words[said] if said in words else said if isinstance(default, str) else float(said)
            assert value == default, f"{name} is {default!r}, and the guide says {said}"
            checked += 1
    assert checked >= 14
