"""What commands write to a terminal: text only, whatever stands in the files they read, and whatever the locale.

Ids, titles, labels and sentences of a statement come from strangers. A terminal obeys escape sequences in them
(colours, the title of the window, lines that overwrite a verdict), so control characters are shown instead of sent.
What the locale cannot write is escaped too, instead of ending a command half-way.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# C0 but for tab and newline, DEL, C1, and what reorders text (so that a line could read other than it is).
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with control characters shown, as JSON writes them (`\\u001b`), so that no terminal obeys them."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _TextOnly:
    """A stream that shows control characters of what is written. It is no terminal to those who ask: no colours."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(visible(text))
        return len(text)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Output:
    """How a command ends, whether or not its output can still be written."""

    def sentence(self, text: str, code: int = 2) -> int:
        """One sentence on stderr."""
        with suppress(OSError, ValueError):
            print(f"dpformer: {visible(' '.join(text.split()))}", file=sys.stderr, flush=True)
        return self.flushed(code)

    def flushed(self, code: int) -> int:
        """Writes what is left; a reader that has gone is no error of ours, a full disk is."""
        try:
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            _give_up_on(sys.stdout)
            if isinstance(error, OSError) and error.errno != errno.EPIPE:
                return self.sentence(f"the output cannot be written: {error.strerror}")
            return code or 1
        return code

    def gone(self, error: OSError) -> int:
        """Nothing more can be written."""
        _give_up_on(sys.stdout)
        return self.sentence(f"the output cannot be written: {error.strerror or error}")

    def broken(self, error: OSError) -> bool:
        """Whether it was the output that could not be written, not a file (those errors have been made sentences)."""
        return error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EBADF)


@contextmanager
def plain_output() -> Iterator[Output]:
    """Standard output as `visible` text, and no error in any locale, for the length of a command."""
    before = sys.stdout, sys.stderr
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, _TextOnly(sys.stdout))  # progress bars are on stderr, which shows nothing of a stranger's
    try:
        yield Output()
    finally:
        sys.stdout, sys.stderr = before


def _give_up_on(stream: Any) -> None:
    """So that Python does not complain a second time when it closes the stream."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
