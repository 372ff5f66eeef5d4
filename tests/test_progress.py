"""Progress: nothing of what is quick, a line now and then of what is not, with an estimate; phases with their costs."""

import io

import pytest
from rich.console import Console

from dpformer import progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    process_time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def test_lines_come_now_and_then_and_estimate_what_is_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown(), progress.stage("ranking", 100):
        for _ in range(10):
            clock.now += 6
            progress.advance(10)
            with progress.stage("a part of it", 5):  # not shown by itself
                pass
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] in ("ranking: 20%, about 48 s left", "ranking: 20%, about 49 s left")
    assert lines[-1] == "ranking: 100%, about 0 s left"
    assert len(lines) == 5


def test_quick_work_and_work_that_nobody_watches_say_nothing(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown(), progress.stage("ranking", 100):
        clock.now += 1
        progress.advance(50)
    with progress.stage("ranking", 100):
        clock.now += 100
        progress.reach(70)
    progress.advance(3)
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar() -> None:
    file = io.StringIO()
    made = progress._Stage("ranking", 10, Console(file=file, force_terminal=True))
    made.began -= 100
    made.reach(4)
    made.end()
    assert "ranking" in file.getvalue() and "40%" in file.getvalue()


def test_a_worker_that_says_nothing_is_asked() -> None:
    asked = []

    def share() -> float:
        asked.append(True)
        return 0.5

    with progress.shown(), progress.watching("reading", share):
        while not asked:
            pass
    with progress.watching("reading", share):  # nobody watches
        pass


def test_phases_tell_time_and_memory(clock: Clock) -> None:
    phases = progress.Phases()
    for name, seconds in (("reading", 2.0), ("release", 0.5)):
        with phases(name):
            clock.now += seconds
    assert str(phases).startswith("time and memory: reading 2.0 s (2.0 s CPU, ")
    assert "release 0.5 s" in str(phases) and phases.found[0][3] > 0
