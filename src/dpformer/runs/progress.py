"""Progress of a run: a bar on a terminal or in a notebook, else plain lines. Loss and norms are not covered by ε."""

from __future__ import annotations

import math
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINES = 20  # approximate number of plain lines per run


class TrainingProgress:
    """Shows each step's loss, median gradient norm, ε spent and the remaining time; a context around the loop."""

    def __init__(self, steps: int, *, start: int = 0, private: bool = True, console: Console | None = None) -> None:
        self.steps, self.start, self.private = steps, start, private
        self.console = console or Console(stderr=True)
        self.began = time.monotonic()
        self.bar: Progress | None = None
        self.notebook = NotebookBar(steps) if self.console.is_jupyter else None
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("training" if private else "training (not private)"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=steps, completed=start, facts="")

    def __enter__(self) -> TrainingProgress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show the record of a step."""
        done = record["step"]
        if self.bar is not None:
            self.bar.update(self.task, completed=done, facts=self._facts(record))
        elif self.notebook is not None:
            self.notebook.update(done, f"{self._facts(record)}  {self._left(done)}")
        elif done == self.steps or done % max(1, self.steps // LINES) == 0:
            self.say(f"step {done:,}/{self.steps:,}  {self._facts(record)}  {self._left(done)}")

    def say(self, line: str) -> None:
        """Print a separate line, above the bar if there is one."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _facts(self, record: dict[str, Any]) -> str:
        norm = f"norm {record['median_norm']:.3g}  " if record["median_norm"] is not None else ""
        loss = "–" if record["loss"] is None else f"{record['loss']:.4f}"
        spent = "not private" if record["epsilon"] is None else f"ε {record['epsilon']:.2f}"
        return f"loss {loss}  {norm}{spent}"

    def _left(self, done: int) -> str:
        if done == self.steps:
            return f"{time.monotonic() - self.began:.0f} s in total"
        pace = (time.monotonic() - self.began) / max(1, done - self.start)
        return f"{math.ceil(pace * (self.steps - done)):,} s left"


class NotebookBar:
    """A bar that a notebook redraws in place, in plain HTML without widgets."""

    EACH = 0.25  # seconds between two updates

    def __init__(self, steps: int) -> None:
        from IPython.display import HTML, display

        self.steps, self.drawn, self.html = steps, 0.0, HTML
        self.handle = display(HTML(self._picture(0, "")), display_id=True)

    def update(self, done: int, facts: str) -> None:
        now = time.monotonic()
        if done == self.steps or now - self.drawn >= self.EACH:
            self.drawn = now
            self.handle.update(self.html(self._picture(done, facts)))

    def _picture(self, done: int, facts: str) -> str:
        return f"<progress max='{self.steps}' value='{done}'></progress> {done:,} of {self.steps:,} steps  {facts}"
