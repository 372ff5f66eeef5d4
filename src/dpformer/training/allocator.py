"""Keep freed memory: malloc reuses large blocks instead of returning them to the system after every use.

A training step allocates and frees tensors of many megabytes. By default glibc returns each such block immediately, and
the next one must be faulted in page by page, which costs more than the arithmetic on it (keeping them made a plain
training step of the paper's model 1.7 times as fast). The price: memory once used stays with the process, so this is
used for training networks only.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
_USUAL = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}


def keep_freed_memory() -> bool:
    """Tell malloc to reuse large blocks; False if the C library is not glibc."""
    library = _glibc()
    if library is None:
        return False
    return bool(library.mallopt(_MMAP_MAX, 0)) and bool(library.mallopt(_TRIM_THRESHOLD, 2**31 - 1))


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """The same within a context; afterwards blocks are returned as usual, starting with those that are free."""
    kept = keep_freed_memory()
    try:
        yield
    finally:
        library = _glibc() if kept else None
        if library is not None:
            for option, usual in _USUAL.items():
                library.mallopt(option, usual)
            library.malloc_trim(0)


def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        library.mallopt, library.malloc_trim  # noqa: B018
    except (AttributeError, OSError):
        return None
    return library
