"""What a device is asked for is counted: calls, synchronisations and copies."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpformer.training.device_calls import Counts, DeviceCalls
from tests import second_device
from tests.distributed import jobs

needs_second = pytest.mark.skipif(not second_device.POSSIBLE, reason=second_device.REASON)
CASES: dict[str, tuple[Callable[[Tensor], object], Counts]] = {  # of a tensor on the second device
    "arithmetic": (lambda t: t + 1, Counts(calls=1)),
    "in place": (lambda t: t.mul_(2), Counts(calls=1)),
    "many tensors at once": (lambda t: torch._foreach_add_([t, t], 1.0), Counts(calls=1)),
    "a view": (lambda t: t[1:].view(-1).T.expand(2, 3), Counts()),
    "an allocation": (lambda t: torch.empty_like(t), Counts()),
    "a factory": (lambda t: torch.zeros(3, device=t.device), Counts(calls=1)),
    "a value": (lambda t: t.sum().item(), Counts(calls=2, synchronisations=1)),
    "a decision": (lambda t: bool((t > 0).all()), Counts(calls=3, synchronisations=1)),
    "values in a list": (lambda t: t.tolist(), Counts(synchronisations=1)),
    "to the host": (lambda t: t.cpu(), Counts(synchronisations=1)),
    "into a tensor of the host": (lambda t: torch.empty(4).copy_(t), Counts(synchronisations=1)),
    "where it is not zero": (lambda t: t.nonzero(), Counts(calls=1, synchronisations=1)),
    "by a mask": (lambda t: t[t > 0], Counts(calls=2, synchronisations=1)),
    "by indices of the host": (lambda t: t[torch.tensor([0, 2])], Counts(calls=1, copies=1)),
    "equality": (lambda t: torch.equal(t, t), Counts(calls=1, synchronisations=1)),
    "from the host": (lambda t: torch.ones(3).to(t.device), Counts(copies=1)),
    "from Python": (lambda t: torch.tensor([1.0, 2.0], device=t.device), Counts(copies=1)),
    "on the host": (lambda t: torch.ones(3).sum().item(), Counts()),
    "another dtype": (lambda t: t.double(), Counts(calls=1)),
}


def counted_there() -> None:
    second_device.add()
    for name, (work, wanted) in CASES.items():
        given = torch.ones(4).to("second")
        with DeviceCalls("second") as counted, counted.phase("all"):
            work(given)
        assert counted.phases["all"] == wanted, (name, counted.phases)
    linear, x = nn.Linear(3, 2).to("second"), torch.ones(5, 3).to("second")
    with DeviceCalls("second") as counted:
        with counted.phase("forward"):
            loss = linear(x).sum()
        with counted.phase("backward"):  # in the device's own thread
            loss.backward()
    assert counted.phases["forward"] == Counts(calls=2) and counted.phases["backward"].calls >= 3


@needs_second
def test_what_counts_on_a_device() -> None:
    assert jobs.finish(jobs.start(1, counted_there)) == [0]


def test_phases_add_up() -> None:
    with DeviceCalls("cpu") as counted:
        with counted.phase("first"):
            t = torch.ones(3)
            with counted.phase("within"):
                t.sum().item()
            t.add_(1)
        t.add_(1)
    assert counted.phases == {
        "first": Counts(calls=2),
        "within": Counts(calls=2, synchronisations=1),
        "other": Counts(calls=1),
    }
    assert counted.total.to_dict() == {"calls": 5, "synchronisations": 1, "copies": 0}
