"""Errors that a user can cause, each one sentence with the value seen and the fix."""

import errno


class DpformerError(Exception):
    """Bad input: the command line prints the sentence and exits with code 2, without a traceback."""


class MissingExtra(DpformerError):
    """An optional dependency is required but not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; run: pip install 'dpformer[{extra}]'")


class UnsupportedUse(RuntimeError):
    """A trainable parameter is used in a way for which there is no exact per-user rule.

    The message names the parameter, the function and the fix. Raising is the point: a use that were skipped, or whose
    rows were given to the wrong user, would release more of a user than the privacy statement says.
    """


class CannotBatch(UnsupportedUse):
    """What torch cannot compute for all users together; one user at a time it may be possible (fallback.py)."""


# How libraries report that memory ran out: the loader, torch, NumPy, C++ and threads.
_NO_MEMORY = (
    "failed to map segment", "allocate memory", "bad_alloc", "bad allocation", "start new thread", "not enough memory",
    "unable to allocate",
)  # fmt: skip


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, whichever library noticed, and however the error was wrapped."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if any(words in str(error).lower() for words in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: BaseException | None) -> str:
    """Of its text, or its kind."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
