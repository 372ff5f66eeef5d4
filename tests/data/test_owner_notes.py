"""What the owner of a log is told: hints at mistakes, what is left of the items; never in what may be published."""

import json
from pathlib import Path

import numpy as np
import pytest

from dpformer.data import Dataset, prepare
from dpformer.data.owner_notes import NOT_PRIVATE, hints, kept_items
from tests.tiny_runs import invoke, printed
from tests.training.memo import accountant_remembers  # noqa: F401


def log(path: Path, rows: list[str]) -> Path:
    path.write_text("user_id,item_id,timestamp\n" + "\n".join(rows) + "\n")
    return path


USUAL = [f"u{user},i{user + step},{1_700_000_000 + step}" for user in range(50) for step in range(4)]


def test_a_usual_log_has_no_hints(tmp_path: Path) -> None:
    assert hints(prepare(log(tmp_path / "log.csv", USUAL))) == []


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([f"NULL,i{n},{n + 10**9}" for n in range(9)], "user 'NULL' has 9 interactions"),
        ([f"Anonymous,i{n},{n + 10**9}" for n in range(9)], "\"who <> 'Anonymous'\""),
        ([f"u1,none,{n + 10**9}" for n in range(9)], "item 'none' has 9 interactions"),
        ([f"bot,i{n},{n + 10**9}" for n in range(10_001)], "user 'bot' has 10,001 interactions, but the median is 4"),
        (["u1,i1,1700000000000"], "some seem to be seconds, others milliseconds"),
        ([f"u1,i{n % 5},{n + 10**9}" for n in range(90)], "of the interactions repeat an item of the user's history"),
    ],
)
def test_what_is_odd_is_said(rows: list[str], says: str, tmp_path: Path) -> None:
    found = hints(prepare(log(tmp_path / "log.csv", USUAL + rows)), "who")
    assert any(says in hint for hint in found), found
    assert all(hint.startswith(f"hint ({NOT_PRIVATE})") for hint in found)


def test_what_is_kept_of_the_items() -> None:
    dataset = Dataset.from_histories([[0, 1, 2, 0], [0, 1, 3, 1], [0, 4, 5, 2]], 7)  # the last of each is held out
    said = kept_items(dataset, np.array([0, 1]))
    assert said.startswith("items: 2 are frequent enough to be released within ε; with a public item list (--catalog)")
    assert (
        f"{NOT_PRIVATE}: the data has 6 items, and the released ones account for 56% of the 9 training interactions"
        in said
    )


def test_train_says_it_on_the_terminal_and_publishes_nothing_of_it(tmp_path: Path) -> None:
    rows = [f"u{user},i{(user * step) % 40},{step}" for user in range(200) for step in range(6)]
    path = log(tmp_path / "log.csv", [*rows, *(f"null,rare{n},{n}" for n in range(5))])
    done = invoke("train", path, "--out", tmp_path / "run", "--epsilon", "20", "--model", "counts")
    assert done.exit_code == 0, done.output
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("items: ")]
    number = (
        json.loads((tmp_path / "run" / "privacy.json").read_text())["data"][0].split("vocabulary of ")[1].split()[0]
    )
    assert f"items: {number} are frequent enough" in said and NOT_PRIVATE in said and "--catalog" in said
    assert "user 'null' has" in done.stderr
    for file in ("privacy.json", "config.toml"):
        text = (tmp_path / "run" / file).read_text()
        assert "not private:" not in text and "null" not in text.replace(": null", "")
    shown = json.loads(printed("data", path, "--json"))
    assert any("user 'null' has 5 interactions" in hint for hint in shown["hints"])
    assert "user 'null' has 5 interactions" in printed("data", path)


def test_a_list_that_is_public_needs_no_word(tmp_path: Path) -> None:
    (tmp_path / "items.csv").write_text("item_id\n" + "".join(f"i{n}\n" for n in range(60)))
    path = log(tmp_path / "log.csv", USUAL)
    done = invoke("train", path, "--catalog", tmp_path / "items.csv", "--out", tmp_path / "run", "--epsilon", "20")
    assert done.exit_code == 0 and "items: " not in done.stderr
