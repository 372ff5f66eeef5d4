"""Memory that stays: the C library keeps large blocks instead of returning them to the system after every use.

A training step makes and drops tensors of many megabytes. By default glibc gives each such block back at once, and the
next one has to be faulted in page by page, which costs more than the arithmetic done in it (a plain training step of
the paper's model became 1.7 times as fast by this alone). The price: memory once used stays with the process.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h


def keep_freed_memory() -> bool:
    """Tells malloc to reuse large blocks; False where the C library is not glibc and knows no such thing."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
