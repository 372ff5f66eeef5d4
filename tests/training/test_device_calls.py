"""What a device is asked for is counted: calls, synchronisations and copies; those of a noisy step are few."""

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dpformer as dp
from dpformer.noise.mechanisms import INDEPENDENT, Banded, Noise
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


IN_TORCH = 600  # operations of the noise without Triton, however many parameters there are


def counts_of_steps(layers: int, noise: Noise) -> tuple[Counts, Counts]:
    """A step of Adam, and a private one around it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(layers))).to("second")
    inner, plain = (torch.optim.Adam(model.parameters(), foreach=True) for _ in range(2))
    private = dp.PrivateOptimizer(
        inner, noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=4, assume_clipped=True, noise=noise
    )
    found = []
    for optimizer in (plain, private):
        for _ in range(3):  # the first creates the state of Adam and the keys of the fingerprint
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            with DeviceCalls("second") as counted:
                optimizer.step()
        found.append(counted.total)
    return found[0], found[1]


def noisy_steps(in_triton: bool) -> None:
    if in_triton:
        os.environ["TRITON_INTERPRET"] = "1"
    second_device.add()
    for noise in (INDEPENDENT, Banded(2)):
        most = 20 if in_triton and noise is INDEPENDENT else IN_TORCH
        few, many = counts_of_steps(2, noise), counts_of_steps(24, noise)
        assert few == many, "calls must not depend on the number of parameters"
        plain, private = many
        assert private.calls <= plain.calls + most, (plain, private)
        assert private.synchronisations == 1 and private.copies <= 2, private


@needs_second
@pytest.mark.parametrize("in_triton", [False, True])
def test_a_noisy_step_takes_few_calls(in_triton: bool) -> None:
    """As many for 48 parameters as for 4: at most 20 more than the inner optimizer's, in Triton."""
    if in_triton and importlib.util.find_spec("triton") is None:
        pytest.skip("could not import 'triton'")
    assert jobs.finish(jobs.start(1, noisy_steps, in_triton)) == [0]


def not_finite_there() -> None:
    second_device.add()
    for noise_multiplier in (0.0, 1.0):
        model = nn.Linear(3, 2).to("second")
        before = model.weight.detach().cpu().clone()
        optimizer = dp.PrivateOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            noise_multiplier=noise_multiplier,
            clip_norm=1.0,
            expected_batch_size=4,
            assume_clipped=True,
        )
        for value in (float("nan"), float("inf"), -float("inf")):
            model.weight.grad = torch.ones_like(model.weight)
            model.bias.grad = torch.tensor([1.0, value]).to("second")
            with pytest.raises(ValueError, match=r"gradient of a parameter of shape \(2,\) is not finite"):
                optimizer.step()
        assert optimizer.steps == 0 and torch.equal(model.weight.detach().cpu(), before)


@needs_second
def test_what_is_not_finite_is_refused_before_anything_is_released() -> None:
    """The flag is read once, together with the fingerprint of the sums."""
    assert jobs.finish(jobs.start(1, not_finite_there)) == [0]


def whole_steps() -> None:
    second_device.add()
    from benchmarks.device_calls import MODELS, count

    found = {}
    for name in LIMITS:
        torch.manual_seed(0)
        model, losses, data = MODELS[name]()
        plain, private = (count(model, losses, data, private) for private in (False, True))
        assert private["forward"].calls <= plain["forward"].calls + MARKS_OF_A_MODEL, (name, plain, private)
        assert private["backward"].calls <= LIMITS[name] * plain["backward"].calls, (name, plain, private)
        assert private["step"].calls <= IN_TORCH + MARKS_OF_A_SUM, (name, private)
        found[name] = sum(private.values(), Counts()).synchronisations - sum(plain.values(), Counts()).synchronisations
    assert all(more <= 12 for more in found.values()), found


MARKS_OF_A_MODEL = 80  # calls that look whether a forward pass has changed the model, however large it is
MARKS_OF_A_SUM = 30  # and that check whether the clipped sum was changed
LIMITS = {  # times the calls of a plain backward pass
    "HF GPT-2, 2 layers": 3.0,
    "HF BERT, 2 layers": 4.6,
    "HF GPT-2, 2 layers, LoRA": 2.5,
    "our Transformer": 4.0,
}


@needs_second
def test_a_private_step_takes_few_calls_and_synchronisations() -> None:
    assert jobs.finish(jobs.start(1, whole_steps)) == [0]
