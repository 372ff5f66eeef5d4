"""Options for the run itself: where it computes. They do not change the result."""

from __future__ import annotations

from typing import ClassVar

from dpformer.options import Count, NotNegative, Options, option


class RunOptions(Options):
    """The section `Run`."""

    section: ClassVar[str] = "Run"

    threads: Count | None = option(None, "Number of CPU threads (default: all).")
    device: str | None = option(None, "Device: cpu or cuda (default: a GPU if there is one).")
    checkpoint_seconds: NotNegative = option(60.0, "Seconds between checkpoints.")
