"""A missing file is reported before torch is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from dpformer.data import log, read
from dpformer.data.readers import bad_rows
from dpformer.errors import DpformerError
from tests.tiny_runs import refused

SCRIPT = """
import sys
from dpformer.cli import run
sys.argv = ["dpformer", *sys.argv[1:]]
code = run()
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "nowhere.csv"], "nowhere.csv does not exist"),
        (["train", "--config", "no.toml"], "no.toml cannot be read"),
        (["data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["train", "log.csv", "--catalog", "no.csv"], "no.csv does not exist"),
        (["train", "log.csv", "--epsilon", "-1"], "epsilon is -1.0; it must be greater than 0"),
        (["train", "log.csv", "--model", "counts", "--epochs", "3"], "epochs applies to networks"),
        (["train", "log.csv", "--where", "event ="], "is not a condition in SQL"),
        (["train", "log.csv", "--event-weights", "view"], "event_weights is 'view'"),
        (["train", "log.csv", "--user-column", "buyer"], "log.csv has no column 'buyer'"),
        (["train", "log.csv", "--format", "excel"], "format is 'excel'"),
        (["train", "bad.csv"], "bad.csv, row 3: the timestamp 'soon' is not a time"),
        (["train", "--config", "run.toml"], "bad.csv, row 3: the timestamp 'soon' is not a time"),
        (["recommend", "nowhere", "--history", "a"], "nowhere is not a run folder: it does not exist"),
        (["recommend", ".", "--histories", "bad.csv"], "bad.csv, row 3: the timestamp 'soon' is not a time"),
        (["train", "--resume", "nowhere"], "nowhere is not a run folder: it does not exist"),
        (["evaluate", "nowhere"], "is not a run folder: it does not exist"),
        (["serve", "nowhere"], "is not a run folder: it does not exist"),
        (["compare", ".", "nowhere"], "is not a run folder: it does not exist"),
        (["verify", "nowhere"], "is not a run folder: it does not exist"),
    ],
)
def test_a_mistake_is_named_before_torch_is_imported(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\na,b,1\n")
    (tmp_path / "bad.csv").write_text("user_id,item_id,timestamp\na,b,1\na,c,soon\n")
    (tmp_path / "run.toml").write_text('file = "bad.csv"\nepsilon = 3.0\n')
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2 and words in found.stderr and found.stderr.rstrip().endswith("False"), found.stderr


def test_urls_globs_and_standard_input_are_left_to_the_command(tmp_path: Path) -> None:
    assert "nothing-*.csv does not exist" in refused("data", tmp_path / "nothing-*.csv")
    assert "does not exist" not in refused("data", "ftp://host/log.csv")


def test_a_device_is_refused_before_the_data_is_read(tmp_path: Path) -> None:
    rows = "a,b,1\n" * bad_rows.FIRST + "a,c,soon\n"  # beyond the first look
    (tmp_path / "log.csv").write_text("user_id,item_id,timestamp\n" + rows)
    assert "torch cannot compute on it" in refused("train", tmp_path / "log.csv", "--device", "xla:9")


def test_the_first_bad_row_stops_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the first rows is read of a log that has a bad one there."""
    path = tmp_path / "log.csv"
    path.write_text("user_id,item_id,timestamp\na,b,1\na,c,soon\n" + "a,b,2\n" * 50_000)
    monkeypatch.setattr(log, "_load", lambda *_: pytest.fail("all of the log was read"))
    with pytest.raises(DpformerError, match="row 3: the timestamp 'soon'"):
        read(path)
    path.write_text("user_id,item_id,timestamp\na,b,1\n" + "a,b,2\n" * bad_rows.FIRST + "a,c,soon\n")
    monkeypatch.undo()
    with pytest.raises(DpformerError, match=f"row {bad_rows.FIRST + 3}: the timestamp 'soon'"):
        read(path)
