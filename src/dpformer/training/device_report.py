"""`dpformer doctor`: whether private training is right on a device, what it asks of it, and what it costs.

A small Transformer on random histories takes plain and private steps. **Checks** compare the device with the CPU:

    clipped sum      of the users' gradients, with the CPU's in float64; and with autograd, by the engine's self-check
    noise            on a sum of zeros, with its definition from the words of OpenSSL's cipher
    fingerprint      of tensors on the device, with that of the same tensors on the CPU

Calls, synchronisations and copies are counted by phase (device_calls.py); seconds are the median of steps that are not
counted. The sizes are small, so that the report takes seconds anywhere: it says what a step asks of the device, and not
how fast a large model trains.
"""

from __future__ import annotations

import copy
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from torch import nn

from dpformer.clipping import PhantomClipping, UnsupportedUse, normalize
from dpformer.errors import DpformerError
from dpformer.kernels import native
from dpformer.kernels.on_device import add_noise_on
from dpformer.models import Batch, Transformer
from dpformer.noise.fingerprint import Fingerprint
from dpformer.noise.noisy_sums import Numbers, SecureRandom, public_grid, release_sum
from dpformer.training.device_calls import Counts, DeviceCalls
from dpformer.training.optimizer import PrivateOptimizer

USERS, LENGTH, ITEMS, DIM, BLOCKS = 32, 32, 2000, 64, 2
NUMBERS = 100_000  # of noise that are compared
MOST_ERROR = 1e-4  # relative, of sums in float32
LIBRARIES = ("dpformer", "torch", "numpy", "triton")


@dataclass(frozen=True)
class Check:
    """One comparison with the CPU."""

    name: str
    passed: bool
    seen: str


@dataclass(frozen=True)
class Step:
    """What one step costs."""

    phases: dict[str, Counts]
    seconds: float  # the median
    peak_mib: float | None  # of memory: of the device, or of this process so far

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "total": sum(self.phases.values(), Counts()).to_dict()}


@dataclass(frozen=True)
class DeviceReport:
    """All that was found."""

    device: str
    versions: dict[str, str]
    kernels: dict[str, bool]
    checks: tuple[Check, ...]
    plain: Step
    private: Step

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def speed(self) -> float:
        """Private steps per plain step, in the same time."""
        return self.plain.seconds / self.private.seconds

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "device": self.device,
            "versions": self.versions,
            "kernels": self.kernels,
            "workload": {"users": USERS, "length": LENGTH, "items": ITEMS, "dim": DIM, "blocks": BLOCKS},
            "checks": [asdict(check) for check in self.checks],
            "plain": self.plain.to_dict(),
            "private": self.private.to_dict(),
            "speed": self.speed,
            "passed": self.passed,
        }


def examine(device: torch.device, steps: int = 5) -> DeviceReport:
    """Examine a device.

    Args:
        steps: that are timed, of each kind.
    """
    model, batch = workload()
    checks = (check_sums(model, batch, device), check_noise(device), check_fingerprint(device))
    plain = measured(_plain_step(model, batch, device), device, steps)
    private = measured(_private_step(model, batch, device), device, steps)
    return DeviceReport(name_of(device), versions(), kernels_on(device), checks, plain, private)


def workload() -> tuple[nn.Module, Batch]:
    """The model and its users, on the CPU; the same everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(ITEMS, LENGTH, dim=DIM, blocks=BLOCKS, dropout=0.0)
    lengths = 2 + np.arange(USERS) % LENGTH
    rng = np.random.default_rng(0)
    return model, Batch.from_histories([rng.integers(0, ITEMS, n + 1) for n in lengths], LENGTH)


# Checks.


def check_sums(model: nn.Module, batch: Batch, device: torch.device) -> Check:
    """The clipped sum of all users, which the engine compares with autograd too."""
    found, wanted = copy.deepcopy(model).to(device), copy.deepcopy(model).double()
    for each, users in ((found, batch.to(device)), (wanted, batch)):
        clipping = PhantomClipping(each)
        with clipping.users(users) as user:
            loss = each(user)
        try:
            clipping.backward(loss, normalize(1.0))
        except UnsupportedUse as refusal:
            return Check("clipped sum", False, str(refusal))
    sums, right = (
        torch.cat([p.grad.cpu().double().flatten() for p in each.parameters() if p.grad is not None])
        for each in (found, wanted)
    )
    error = float((sums - right).norm() / right.norm())
    return Check("clipped sum", error <= MOST_ERROR, f"relative error {error:.1e} of the CPU's in float64")


def check_noise(device: torch.device) -> Check:
    """round(σz / grid)·grid of each number z: one in 10¹¹ may be rounded to the other side (device_sums.py)."""
    random, deviation = SecureRandom("doctor", seed=0), 1.5
    sums = torch.zeros(NUMBERS, device=device)
    release_sum(sums, Numbers(random, 1, 0, NUMBERS), deviation, 1.0)
    grid = public_grid(deviation)
    cells = sums.cpu().double().numpy() / grid
    moved = int((cells != np.rint(deviation / grid * random.normal(NUMBERS, step=1))).sum())
    return Check("noise", moved == 0, f"{moved:,} of {NUMBERS:,} numbers in another cell of the grid than the CPU's")


def check_fingerprint(device: torch.device) -> Check:
    """Integer arithmetic is the same everywhere."""
    fingerprint = Fingerprint(SecureRandom("doctor", seed=0))
    tensors = [torch.arange(n, dtype=torch.float32).sin() for n in (1, 4095, 300_000)]
    same = fingerprint(tensors) == fingerprint([t.to(device) for t in tensors])
    return Check("fingerprint", same, "the same as the CPU's" if same else "not the CPU's")


# Costs.


Phase = Callable[[], None]


def _plain_step(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Phase]:
    """The phases of an ordinary step, to be called in order."""
    there, users = copy.deepcopy(model).to(device), batch.to(device)
    optimizer = torch.optim.Adam(there.parameters(), lr=1e-3)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses[:] = [there(users)]

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": forward, "backward": lambda: losses[0].mean().backward(), "step": step}


def _private_step(model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Phase]:
    """The same with clipping and noise; the engine's self-check, which runs now and then, is off."""
    there, users = copy.deepcopy(model).to(device), batch.to(device)
    clipping = PhantomClipping(there, self_check=False)
    inner = torch.optim.Adam(there.parameters(), lr=1e-3)
    optimizer = PrivateOptimizer(inner, noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=len(batch))
    losses: list[torch.Tensor] = []

    def forward() -> None:
        with clipping.users(users) as user:
            losses[:] = [there(user)]

    def backward() -> None:
        clipping.backward(losses[0], normalize(1.0))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": forward, "backward": backward, "step": step}


def measured(phases: dict[str, Phase], device: torch.device, steps: int) -> Step:
    """Two steps that nobody measures, some that are timed, and one that is counted."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(2 + steps):
        began = _now(device)
        for run in phases.values():
            run()
        seconds.append(_now(device) - began)
    with DeviceCalls(device) as counted:
        for name, run in phases.items():
            with counted.phase(name):
                run()
    return Step({name: counted.phases[name] for name in phases}, statistics.median(seconds[2:]), peak_mib(device))


def _now(device: torch.device) -> float:
    """The time, after all that the device was asked for."""
    torch.zeros(1, device=device).item()
    return time.perf_counter()


def peak_mib(device: torch.device) -> float | None:
    """Memory in use at most: of the device; on the CPU of this process, since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


# Facts.


def name_of(device: torch.device) -> str:
    """With the name of the hardware."""
    if device.type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    return f"{device}: {platform.machine()}, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)


def versions() -> dict[str, str]:
    """Of Python, the system and libraries."""
    found = {"python": platform.python_version(), "system": platform.platform()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "not installed"
    return found


def kernels_on(device: torch.device) -> dict[str, bool]:
    """Which kernels a step uses there; where one is missing, torch operations do the same."""
    return {
        "compiled for the CPU": native.supports(),
        "noise in Triton": device.type != "cpu" and add_noise_on(device) is not None,
    }


def refuse_steps(steps: int) -> None:
    """A median of no steps is nothing."""
    if steps < 1:
        raise DpformerError(f"--steps {steps}: time at least one step")
