"""The cheaper way to a norm depends on the device: float64 costs 2 times float32 on some GPUs, 32 times on others."""

import pytest
import torch

from dpformer.clipping.uses import cost


def test_the_ratio_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = {0: (8, 0), 1: (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
    cost._double_in_cuda.cache_clear()
    fast, slow = (cost._double(torch.device("cuda", index)) for index in (0, 1))
    cost._double_in_cuda.cache_clear()
    assert (fast, slow) == (2.0, 32.0)
    width, numbers = 256, 128 * 128
    assert cost._reach(fast, width, 0, numbers) > cost._reach(slow, width, 0, numbers), "products in float64 pay more"
    assert cost._double(torch.device("cpu")) <= 2 and cost._double(torch.device("xpu")) == 32
