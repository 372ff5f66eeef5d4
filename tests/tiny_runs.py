"""Small finished runs, made once a session, and the command line as a test calls it."""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dpformer.cli import app
from dpformer.errors import DpformerError
from dpformer.runs import Config, train
from dpformer.runs.folder import RunFolder
from dpformer.runs.trust import mark_as_own
from tests.training.logs import TINY, tiny_choices, write_log
from tests.training.memo import remember

ITEMS = 20
EVIL = "<script>alert('i0')</script>"  # the title of item i0
CHOICES: dict[str, Any] = {**TINY, "evaluate_every": 2}
_made: dict[str, Path] = {}


def tiny_run(factory: pytest.TempPathFactory, **changes: Any) -> Path:
    """A run folder on a small log with titled items; the same one for the same choices. Do not write to it."""
    key = repr(sorted(changes.items()))
    if key not in _made:
        folder = factory.mktemp("runs")
        log, catalog = write_log(folder / "log.csv"), write_catalog(folder / "catalog.csv")
        with pytest.MonkeyPatch.context() as patch:
            remember(patch.setattr)
            choices = tiny_choices(**{"catalog": catalog, **CHOICES, **changes})
            choices["assume_items_public"] = choices["catalog"] is None
            train(Config.make(file=log, **choices), folder / "run")
        _made[key] = folder / "run"
    return _made[key]


def write_catalog(path: Path) -> Path:
    titles = [EVIL, *(f"Title {item}" for item in range(1, ITEMS))]
    path.write_text("item_id,title\n" + "".join(f"i{item},{title}\n" for item, title in enumerate(titles)))
    return path


def point_at(run: Path, log: Path) -> None:
    """The owner of a run moves its data: the folder is still one's own."""
    config = run / "config.toml"
    config.write_text(re.sub(r'file = ".*"', f'file = "{log}"', config.read_text()))
    mark_as_own(RunFolder(run))


def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of a run that a test may spoil."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def same_ranking(found: Iterable[tuple[Any, float]], expected: Iterable[tuple[Any, float]]) -> None:
    """Two lists of items with their scores, the best first, are the same.

    Two ways of adding up round differently. So items whose scores are the same up to rounding may stand in another
    order, and at the end of the lists one may stand for another: with noise of a fresh key, that happens.
    """
    ours, theirs = list(found), list(expected)
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], rel=1e-4, abs=1e-4)
    scores = dict(theirs)
    for item, score in ours:
        assert score == pytest.approx(scores.get(item, theirs[-1][1]), rel=1e-4, abs=1e-4), item
    assert len({item for item, _ in ours}) == len(ours)


def ranking_of(entries: Iterable[dict[str, Any]]) -> list[tuple[Any, float]]:
    """Recommended items as they are printed, for `same_ranking`."""
    return [(entry["item_id"], float(entry["score"])) for entry in entries]


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments: Any) -> str:
    """What a command that succeeds prints."""
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: Any) -> str:
    """The sentence that `main` prints before it exits with 2."""
    result = invoke(*arguments)
    assert isinstance(result.exception, DpformerError), (result.output, result.exception)
    assert "\n" not in str(result.exception)
    return str(result.exception)
