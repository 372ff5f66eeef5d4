"""`dpformer doctor`: what it says of the CPU and of a device, and that what is wrong shows."""

import json
from typing import Any

import pytest
import torch

from dpformer.cli import app
from dpformer.training import device_report
from tests import second_device
from tests.distributed import jobs
from tests.tiny_runs import printed, refused

needs_second = pytest.mark.skipif(not second_device.POSSIBLE, reason=second_device.REASON)


def test_it_checks_counts_and_times_the_cpu() -> None:
    facts = json.loads(printed("doctor", "--device", "cpu", "--steps", 1, "--json"))
    assert facts["passed"] and [check["name"] for check in facts["checks"]] == ["clipped sum", "noise", "fingerprint"]
    assert facts["versions"]["torch"] == torch.__version__ and facts["device"].startswith("cpu")
    for kind in ("plain", "private"):
        phases = facts[kind]["phases"]
        assert list(phases) == ["forward", "backward", "step"] and facts[kind]["seconds"] > 0
        assert facts[kind]["total"]["calls"] == sum(phase["calls"] for phase in phases.values()) > 0
    assert facts["speed"] == facts["plain"]["seconds"] / facts["private"]["seconds"]


def test_bad_input_is_refused() -> None:
    assert "time at least one step" in refused("doctor", "--steps", 0)
    assert "torch cannot compute on it" in refused("doctor", "--device", "tpu")


def test_it_shows_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("doctor", "--device", "cpu", "--steps", 1)
    assert "noise         right: " in text and "private backward" in text and "All checks passed." in text
    wrong = device_report.Check("noise", False, "all numbers in another cell of the grid than the CPU's")
    monkeypatch.setattr(device_report, "check_noise", lambda device: wrong)
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--steps", "1"])
    assert result.exit_code == 1 and "noise         WRONG" in result.output
    assert "Do not train privately on this device" in result.output


def faults() -> None:
    """What a device computes wrongly is seen: products in a sum, logarithms in noise, products of integers."""
    second_device.add()
    device = torch.device("second")
    report = device_report.examine(device, steps=1)
    assert report.passed and report.device == "second", report.checks
    assert report.private.phases["step"].calls > 500 and not report.kernels["noise in Triton"]
    model, batch = device_report.workload()
    library = torch.library.Library("aten", "IMPL")

    def fault(name: str, wrong: object) -> None:
        library.impl(name, wrong, "PrivateUse1")

    def sine(t: torch.Tensor) -> torch.Tensor:  # in single precision
        return t.copy_(t.cpu().float().sin().to(t.dtype))

    fault("sin_", sine)
    assert not device_report.check_noise(device).passed
    assert device_report.check_sums(model, batch, device).passed and device_report.check_fingerprint(device).passed

    def shifted(t: torch.Tensor, by: int, out: torch.Tensor) -> torch.Tensor:  # without the sign
        return out.copy_((t.cpu() >> by) & (2 ** (64 - by) - 1))

    fault("bitwise_right_shift.Tensor_Scalar_out", shifted)
    assert not device_report.check_fingerprint(device).passed

    def normal(x: torch.Tensor, shape: list[int], *given: Any) -> tuple[torch.Tensor, ...]:
        here = [t.cpu() if isinstance(t, torch.Tensor) else t for t in given]
        return tuple((t * 1.001).to(x.device) for t in torch.ops.aten.native_layer_norm(x.cpu(), shape, *here))

    fault("native_layer_norm", normal)
    assert not device_report.check_sums(model, batch, device).passed


@needs_second
def test_what_a_device_gets_wrong_is_seen() -> None:
    assert jobs.finish(jobs.start(1, faults)) == [0]
