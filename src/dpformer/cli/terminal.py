"""What commands write to a terminal: plain text, whatever the files they read contain, and in any locale.

Ids, titles, labels and sentences of a statement may come from untrusted files. A terminal obeys escape sequences in
them (colours, the window title, overwriting a verdict), so control characters are shown instead of sent. Characters
that the locale cannot encode are escaped as well, instead of aborting a command.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# C0 except tab and newline, DEL, C1, and characters that reorder text (so that a line reads differently).
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with control characters shown as JSON writes them (`\\u001b`), so that no terminal obeys them."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _TextOnly:
    """A stream that escapes control characters. It is not a tty, so nothing writes colours to it."""

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
        """Print one sentence on stderr."""
        with suppress(OSError, ValueError):
            print(f"dpformer: {visible(' '.join(text.split()))}", file=sys.stderr, flush=True)
        return self.flushed(code)

    def flushed(self, code: int) -> int:
        """Flush the output; a closed pipe is not our error, a full disk is."""
        try:
            sys.stdout.flush()
        except (OSError, ValueError) as error:
            _give_up_on(sys.stdout)
            if isinstance(error, OSError) and error.errno != errno.EPIPE:
                return self.sentence(f"the output cannot be written: {error.strerror}")
            return code or 1
        return code

    def gone(self, error: OSError) -> int:
        """Give up on the output, because nothing more can be written."""
        _give_up_on(sys.stdout)
        return self.sentence(f"the output cannot be written: {error.strerror or error}")

    def broken(self, error: OSError) -> bool:
        """Whether the error came from the output and not from a file (file errors have become sentences already)."""
        return error.errno in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EBADF)


@contextmanager
def plain_output() -> Iterator[Output]:
    """Within the context, standard output is `visible` text and never raises because of the locale."""
    before = sys.stdout, sys.stderr
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.stdout = cast(TextIO, _TextOnly(sys.stdout))  # progress bars go to stderr, which shows no untrusted text
    try:
        yield Output()
    finally:
        sys.stdout, sys.stderr = before


def _give_up_on(stream: Any) -> None:
    """Redirect a broken stream, so that Python does not complain a second time when it closes it."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
