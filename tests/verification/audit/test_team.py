"""The audit of several processes: a real job on loopback, two of them, with and without faults in every process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import jobs
from tests.verification.audit import team


def found(fault: str, tmp_path: Path) -> tuple[dict[str, Any], set[str]]:
    """The audit, and the names of the checks that accuse."""
    out = tmp_path / "audit.json"
    assert jobs.finish(jobs.start(2, team.audited, fault, out), seconds=400) == [0, 0]
    result = json.loads(out.read_text())
    return result, {check["name"] for check in result["checks"] if not check["passed"]}


def test_a_correct_team_passes(tmp_path: Path) -> None:
    """Noise exactly once, every share exactly once, users of all ranks independent."""
    result, accused = found("none", tmp_path)
    assert accused == set() and result["passed"]
    assert 0.3 * result["epsilon_claimed"] < result["epsilon_lower"] < 1.4 * result["epsilon_claimed"]


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("noise of each rank divided by their number", "noise: standard deviation"),
        ("all noise on every rank", "noise: standard deviation"),
        ("the same share twice", "contribution: spread for one user"),
        ("a lost share", "contribution of one user, in clip norms"),
    ],
)
def test_a_fault_of_the_team_is_accused(tmp_path: Path, fault: str, check: str) -> None:
    result, accused = found(fault, tmp_path)
    assert check in accused and not result["passed"]


def test_a_share_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """By the users that the sum names, before it is released."""
    codes = jobs.finish(jobs.start(2, team.audited, "the same share twice, refused", tmp_path / "audit.json"))
    assert 0 not in codes and not (tmp_path / "audit.json").exists()


def test_what_is_too_little_noise_shows_as_epsilon_too(tmp_path: Path) -> None:
    result, accused = found("noise of each rank divided by their number", tmp_path)
    assert "canaries guessed wrong" in accused and result["epsilon_lower"] > result["epsilon_claimed"]
