"""Counts what a device is asked for: calls, synchronisations and copies, by phase of a training step.

On a GPU, work is queued: a call costs the host a few microseconds however little it computes, and a synchronisation
waits until the device has done everything queued before it. So a step with few calls and few synchronisations keeps the
device busy. The counts are those of torch's dispatcher, the same for every device.

    calls              functions that compute on the device; views and allocations are free
    synchronisations   the host waits: a value is read, or the shape of a result depends on values
    copies             from the host to the device
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dpformer.compat import TorchDispatchMode, tree_leaves

FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_", "_unsafe_view"}
WAIT = {  # functions that read values, or whose result has as many entries as values say
    "_local_scalar_dense", "_unique2", "bincount", "equal", "histc", "is_nonzero", "masked_select", "nonzero",
    "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
COPY = {"_to_copy", "copy_", "copy"}


@dataclass
class Counts:
    """What a device was asked for."""

    calls: int = 0
    synchronisations: int = 0
    copies: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.calls + other.calls, self.synchronisations + other.synchronisations, self.copies + other.copies
        )

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class DeviceCalls(TorchDispatchMode):
    """Counts while it is entered.

    >>> with DeviceCalls("cpu") as counted:
    ...     with counted.phase("forward"):
    ...         total = torch.ones(3).sum()
    ...     with counted.phase("reading"):
    ...         value = total.item()
    >>> counted.phases["forward"]
    Counts(calls=2, synchronisations=0, copies=0)
    >>> counted.total.synchronisations
    1

    Compiled code that does not go through torch's dispatcher is not counted; on devices other than the CPU there is
    none.

    Args:
        device: functions without a tensor on it are not counted.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        self.type = torch.device(device).type
        self.phases: dict[str, Counts] = {}
        self._phase = "other"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what follows under this name."""
        before, self._phase = self._phase, name
        self.phases.setdefault(name, Counts())
        try:
            yield
        finally:
            self._phase = before

    @property
    def total(self) -> Counts:
        return sum(self.phases.values(), Counts())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        counts = self.phases.setdefault(self._phase, Counts())
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        if any(t.device.type == self.type for t in [*given, *made]):
            self._count(counts, func, given, made)
        return found

    def _count(self, counts: Counts, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        if name == "lift_fresh":  # torch.tensor(values, device=…), whose copy torch does not show
            counts.copies += self.type != "cpu"
            return
        if name in FREE or _is_view(func):
            return
        if name in COPY and self._is_between_devices(counts, name, given, made):
            return
        counts.calls += 1
        if name in INDEX:
            indices = given[1:]
            counts.synchronisations += any(t.dtype == torch.bool for t in indices)  # looks for what is true
            counts.copies += any(t.device.type != self.type for t in indices)
        counts.synchronisations += name in WAIT

    def _is_between_devices(self, counts: Counts, name: str, given: list[Tensor], made: list[Tensor]) -> bool:
        """Whether this is a copy from or to the host, which is counted as such."""
        source, target = (given[0], made[0]) if name == "_to_copy" else (given[1], given[0])
        if source.device.type == target.device.type:
            return False
        if source.device.type == self.type:
            counts.synchronisations += 1
        else:
            counts.copies += 1
        return True


def _is_view(func: Any) -> bool:
    """Whether its result is its argument's memory, unchanged."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)
