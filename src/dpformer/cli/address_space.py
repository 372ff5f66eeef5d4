"""Check the limit on address space (`ulimit -v`) first: native libraries that do not fit crash without a message."""

from __future__ import annotations

import sys
from importlib import import_module

from dpformer.errors import DpformerError

LEAST = 2 << 30  # bytes; a small training with two threads reached 1.6 GiB
HARMLESS = {"--help", "--help-all", "--version"}  # load no library


def check_address_space() -> None:
    """Refuse a limit that is too small for the libraries, unless only help was asked for."""
    try:
        resource = import_module("resource")
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or limit >= LEAST or len(sys.argv) < 2 or HARMLESS & set(sys.argv):
        return
    raise DpformerError(
        f"the limit on address space is {limit / 2**30:.2f} GiB, and the libraries need {LEAST >> 30}: raise it (ulimit"
        " -v), or limit memory instead of addresses (a container, systemd's MemoryMax)"
    )
