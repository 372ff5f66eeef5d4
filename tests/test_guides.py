"""The guides run: all ```python blocks of a page one after the other, as they stand, and its commands in small."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dpformer.cli import app
from tests.training.memo import remember

GUIDE = Path(__file__).parent.parent / "docs" / "guide"
PAGES: dict[str, list[str] | None] = {
    "bring-your-own-model.md": ["transformers", "peft"],
    "coming-from-opacus.md": [],
    "language-models.md": [],
    "trainers.md": ["transformers", "accelerate", "lightning"],
    "several-machines.md": None,  # its blocks need several processes: tests/integrations runs them
}


@pytest.mark.parametrize("page", [page for page, needed in PAGES.items() if needed is not None])
def test_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for needed in PAGES[page] or []:
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (GUIDE / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {"__name__": page}
    with torch.random.fork_rng(devices=[]):
        for block in blocks:
            exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)", (GUIDE / page).read_text(encoding="utf-8")):
        assert "://" in link or (GUIDE / link).exists(), link


def commands(page: str, program: str) -> list[list[str]]:
    """The commands of a page that start a program: in indented lines, or after `$ `."""
    text = (GUIDE / page).read_text(encoding="utf-8")
    found = re.findall(rf"^(?:    |\$ )({program} .*)$", text, re.MULTILINE)
    return [shlex.split(command, comments=True)[1:] for command in found]


SMALL = shlex.split("--dim 8 --heads 2 --blocks 1 --max-length 12 --epochs 1 --batch-size 20 --evaluate-every 1")


def test_commands_for_text_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    remember(monkeypatch.setattr)  # the accountant's answers
    for name in ("corpus.txt", "tinyshakespeare.txt"):
        Path(name).write_text("".join(f"ROMEO {n}:\nto be or not to be\n" for n in range(60)))
    shown = re.search(r"```\n(\{.*?)```", (GUIDE / "language-models.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    rows = [{**json.loads(line), "author": f"u{i}"} for i in range(60) for line in shown[1].splitlines()]
    Path("messages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    written = commands("language-models.md", "dpformer")
    assert {command[0] for command in written} == {"train", "evaluate", "generate"} and len(written) >= 5
    for number, command in enumerate(written):
        given = command
        if command[0] == "train":
            given = [*command, *SMALL] + (["--out", f"runs/{number}"] if number else [])
        done = CliRunner().invoke(app, given, catch_exceptions=False)
        assert done.exit_code == 0, (given, done.output)


def test_commands_of_torchrun_are_understood() -> None:
    """By torchrun's own parser, and what it starts by ours. `tests/distributed` runs them."""
    from torch.distributed.run import get_args_parser

    written = commands("several-machines.md", "torchrun")
    assert len(written) >= 4
    for command in written:
        given = get_args_parser().parse_args(command)
        assert given.module and given.training_script == "dpformer"
        what, *choices = given.training_script_args
        assert what == "train"
        if choices[0] != "--resume":
            done = CliRunner().invoke(app, ["train", *choices, "--dry-run", "--users", "100"])
            assert done.exit_code == 0, (command, done.output)
