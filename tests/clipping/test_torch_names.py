"""The private names of torch that the engine needs are there, and do what it needs them for."""

import torch

from dpformer.clipping import torch_names
from dpformer.clipping.vmap_level import Outside, VmapLevel, physical


def test_all_are_there() -> None:
    for name in torch_names.__all__:
        assert hasattr(torch_names, name)
    for module, name in torch_names.WRAPPERS:
        assert callable(getattr(module, name))


def test_a_level_batches_and_steps_aside() -> None:
    data = torch.randn(3, 2, 5)
    level = VmapLevel(3)
    try:
        one = level.wrap(data)
        assert one.shape == (2, 5) and level.is_current()
        assert torch.equal(physical((one.T @ one).T), (data.mT @ data).mT)
        with Outside():
            assert not level.is_current() and physical(one).shape == (3, 2, 5)
        assert level.is_current()
    finally:
        level.leave()
    assert torch_names.maybe_current_level() is None


def test_its_own_torch_func_is_as_before() -> None:
    assert torch.equal(torch.func.vmap(torch.sum)(torch.ones(2, 3)), torch.full((2,), 3.0))
