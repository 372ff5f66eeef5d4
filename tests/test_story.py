"""The guide's story of a shop, with the real components: every command and program of docs/guide/shop.md, in order.

CSV → filtered private run → evaluation over time → service with rules → batch file → ONNX → the page for the data
protection officer → next week's run within the same plan.
"""

import contextlib
import csv
import json
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dpformer.runs.ledger_file import read as read_ledger
from tests.shop_log import write_catalog, write_log
from tests.tiny_runs import invoke

pytest.importorskip("uvicorn", reason="uvicorn is not installed: dpformer[serve]")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: dpformer[export]")
pytest.importorskip("pandas")

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "shop.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@contextlib.contextmanager
def serving(arguments: list[str]) -> Iterator[str]:
    """The command `dpformer serve` as a process of its own; its address."""
    command = [sys.executable, "-m", "dpformer", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://[\d.]+:\d+", line)))
        finally:
            process.terminate()


def posted(address: str, command: list[str]) -> Any:
    """The JSON that curl would get."""
    (url,) = (word for word in command if word.startswith("localhost:8000"))
    body, header = command[command.index("-d") + 1], command[command.index("-H") + 1].split(": ")
    asked = urllib.request.Request(url.replace("localhost:8000", address), body.encode(), dict([header]))
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the page's commands printed, by command, and the variables of its programs."""
    folder = tmp_path_factory.mktemp("shop")
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as services:
        patch.chdir(folder)
        write_catalog(Path("items.csv"))
        write_log(Path("shop.csv"), datetime(2026, 6, 8))
        write_log(Path("shop-2.csv"), datetime(2026, 6, 15))
        found: dict[str, Any] = {"folder": folder}
        address = ""
        for language, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
            if language == "toml":
                Path("weekly.toml").write_text(text)
            elif language == "python":
                exec(text, found)
            for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                program, *words = shlex.split(line)
                if program == "curl":
                    found["curl"] = posted(address, words)
                    plain = json.dumps({"history": ["SKU-12", "SKU-16"], "k": 10})
                    found["plain"] = posted(address, [*words[:3], "-d", plain])
                elif words[0] == "serve":
                    address = services.enter_context(serving(words))
                else:
                    answer = invoke(*words)
                    assert answer.exit_code == 0, f"{line}\n{answer.output}{answer.stderr}"
                    found[" ".join(word for word in words if word[0] != "-")] = answer.output
        return found


def printed(story: dict[str, Any], start: str) -> str:
    (found,) = (text for command, text in story.items() if command.startswith(start))
    return " ".join(str(found).split())


def test_the_run_uses_what_the_filter_leaves(story: dict[str, Any]) -> None:
    facts = json.loads((story["folder"] / "runs/week-1/privacy.json").read_text())
    said = " ".join(facts["data"])
    assert "Only interactions with event IN ('purchase', 'view') were used" in said
    assert "weighted by their event (purchase = 3, view = 1)" in said
    assert "2026-06-01 onwards are held out" in said
    assert "search" not in (story["folder"] / "lists.csv").read_text()


def test_evaluation_over_time(story: dict[str, Any]) -> None:
    said = printed(story, "evaluate")
    assert "Held-out items from 2026-06-01, by whether user and item occur in training" in said and "new user" in said
    model, popularity = re.search(r"ndcg@10 │ ([\d.]+) │ [\d.]+ … [\d.]+ │ ([\d.]+)", said).groups()  # type: ignore[union-attr]
    assert float(model) > 3 * float(popularity)


def test_rules_are_the_same_over_http_in_python_and_in_the_file(story: dict[str, Any]) -> None:
    served = [one["item_id"] for one in story["curl"]["recommendations"]]
    with (story["folder"] / "items.csv").open(encoding="utf-8") as file:
        catalog = {row["item_id"]: row for row in csv.DictReader(file)}
    assert served == list(story["top"]["item_id"])
    assert len(served) == 5 and "SKU-24" not in served
    assert {catalog[item]["category"] for item in served} == {"Shoes"}
    assert len({catalog[item]["brand"] for item in served}) == 5
    with (story["folder"] / "lists.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {catalog[row["item_id"]]["category"] for row in rows} == {"Shoes"} and len(rows) > 10_000


def test_onnx_gives_the_list_of_the_service(story: dict[str, Any]) -> None:
    assert story["onnx_list"] == [one["item_id"] for one in story["plain"]["recommendations"]]


def test_the_officers_page_and_verify(story: dict[str, Any]) -> None:
    page = (story["folder"] / "dpia.md").read_text()
    for part in (
        "## What is protected",
        "EDPB Opinion 28/2024",
        "NIST SP 800-226",
        "withdraws",
        "Legal basis",
        "_____",
    ):
        assert part in page, part
    assert "of 8 at δ" in page and "spent by 1 run" in page
    assert "Nothing contradicts the statement" in printed(story, "verify")


def test_next_week_within_the_same_plan(story: dict[str, Any]) -> None:
    facts = json.loads((story["folder"] / "runs/week-2/privacy.json").read_text())
    assert facts["prior"]["runs"] == 1 and facts["epsilon"] < 1.2
    assert "50 of 52 runs are left" in printed(story, "ledger show")
    assert "All runs together" in printed(story, "compare")
    assert read_ledger(story["folder"] / "shop.db").plan is not None
