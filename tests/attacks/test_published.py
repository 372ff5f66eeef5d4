"""Which files of a run folder may be published: one list, in the code and in the documentation, and true of a run."""

import re
from pathlib import Path

import pytest

from dpformer.runs.folder import CONTENTS
from tests.tiny_runs import copied, printed, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401  (for all tests of this file)

PAGE = Path(__file__).parents[2] / "docs" / "privacy" / "threat-model.md"


def test_the_threat_model_lists_the_same_files() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("| in the run folder |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (yes|\*\*no\*\*) \|", section, re.MULTILINE)
    assert rows == [(c.name + "/" * (c.name == "checkpoint"), "yes" if c.public else "**no**") for c in CONTENTS]


def test_a_run_leaves_nothing_else_and_what_is_private_is_its_owners(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    run = copied(tiny_run(tmp_path_factory, model="counts"), tmp_path)
    deployment = tmp_path / "deployment.toml"
    said = ("name", "curator", "description", "intended_use", "region")
    lines = [f'{name} = "x"' for name in said] + ["date = 2026-11-17", 'authors = ["x"]']
    deployment.write_text("[deployment]\n" + "\n".join(lines) + "\n")
    printed("report", run)
    printed("audit", run, "--canaries", 100, "--seed", 0)
    printed("card", run, "--deployment", deployment)
    printed("card", run, "--opendp", "--deployment", deployment)
    printed("card", run, "--dpia", "--deployment", deployment)
    known = {content.name: content for content in CONTENTS}
    made = {path.name for path in run.iterdir() if path.name != ".lock"}
    assert made == known.keys() - {"SHA256SUMS", "SHA256SUMS.sig"}
    for name in made:
        assert known[name].public or (run / name).stat().st_mode & 0o077 == 0, name
