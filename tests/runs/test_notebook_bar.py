"""Progress in a notebook: one picture that is drawn anew in its place, without widgets."""

import io

import pytest
from rich.console import Console

from dpformer.runs.progress import NotebookBar, TrainingProgress


def test_the_bar_is_drawn_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    drawn: list[str] = []

    class Handle:
        def update(self, picture: object) -> None:
            drawn.append(str(picture.data))  # type: ignore[attr-defined]

    def show(picture: object, display_id: bool) -> Handle:
        assert display_id
        drawn.append(str(picture.data))  # type: ignore[attr-defined]
        return Handle()

    monkeypatch.setattr(display, "display", show)
    monkeypatch.setattr(NotebookBar, "EACH", 3600.0)
    console = Console(file=io.StringIO(), force_jupyter=True)
    record = {"loss": 1.5, "median_norm": 2.0, "epsilon": 0.5}
    with TrainingProgress(3, console=console) as progress:
        for step in (1, 2, 3):
            progress.update({"step": step, **record})
    assert drawn[0].startswith("<progress max='3' value='0'>")
    assert drawn[-1].startswith("<progress max='3' value='3'>") and "loss 1.5000" in drawn[-1]
    assert len(drawn) <= 3  # the first, perhaps one on the way, the last
