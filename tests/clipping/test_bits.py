"""Sums of bits, and the walk over a model, against what torch does itself."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from dpformer import native
from dpformer.clipping.bits import SMALL, bits_of, bits_of_all
from dpformer.clipping.registered import Walk, registered


@pytest.fixture(autouse=True, params=["compiled", "in Python"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and its twin pass the same tests."""
    if request.param == "in Python":
        monkeypatch.setattr(native, "kernels", None)
        monkeypatch.setattr(native, "objects", None)


def tensors() -> list[Tensor]:
    sizes = [(), (1,), (0,), (7,), (3, 5), (SMALL - 1,), (SMALL,), (SMALL + 1,), (90, 90)]
    found = [torch.randn(size).to(t) for size in sizes for t in (torch.float32, torch.float64, torch.bfloat16)]
    found += [torch.randn(6, 4).T, torch.randn(9)[1:], torch.randn(3, dtype=torch.complex64), torch.arange(5)]
    return [*found, nn.Parameter(torch.randn(8)), torch.tensor([True, False, True])]


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "signs": torch.neg,
    "signs of two": lambda t: torch.cat([-t[:2], t[2:]]),
    "signs of every other": lambda t: torch.where(torch.arange(len(t)) % 2 == 1, -t, t),
    "doubled": lambda t: 2 * t,
    "every other doubled": lambda t: torch.where(torch.arange(len(t)) % 2 == 1, 2 * t, t),
    "a factor": lambda t: 1024 * t,
    "turned round": lambda t: t.flip(0),
    "mixed": lambda t: t[torch.randperm(len(t), generator=torch.Generator().manual_seed(0))],
    "two change places": lambda t: torch.cat([t[1:2], t[:1], t[2:]]),
    "two far ones change places": lambda t: torch.cat([t[52:53], t[1:52], t[:1], t[53:]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_equal_size_do_not_cancel(change: str, dtype: torch.dtype) -> None:
    for size in (63, 64, 4096, 1 << 16):
        t = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
        assert bits_of(CHANGES[change](t).resolve_neg().contiguous()) != bits_of(t)


def test_a_single_number_is_seen_wherever_it_is() -> None:
    t = torch.zeros(70)
    seen = set()
    for place in range(len(t)):
        t[place] = 1
        seen.add(bits_of(t))
        t[place] = 0
    assert len(seen) == len(t)


def test_many_at_once_are_each_of_them() -> None:
    every = tensors()
    assert bits_of_all(every) == [bits_of(t) for t in every]
    assert all(isinstance(bits, int) for bits in bits_of_all(every))
    assert bits_of_all([]) == []


@pytest.mark.parametrize("place", range(len(tensors())))
def test_a_change_of_one_number_is_seen(place: int) -> None:
    t = tensors()[place].detach()
    if not t.numel():
        return
    before = bits_of(t)
    first = t.flatten()[:1]
    t[(0,) * t.ndim] = ~first[0] if t.dtype == torch.bool else first[0] + 1
    assert bits_of(t) != before


def test_the_walk_finds_what_torch_finds() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = nn.ModuleDict({"a": inner, "b": nn.Linear(3, 3), "c": inner, "d": nn.ModuleList([nn.GRU(3, 3), inner])})
    model["b"].weight = inner[0].weight  # tied
    model["b"].register_parameter("nothing", None)
    model.register_buffer("both", inner[0].bias)  # a parameter that is a buffer as well
    model.add_module("none", None)
    found = registered(model)
    assert list(found.parameters) == [name for name, _ in model.named_parameters()]
    assert list(found.buffers) == [name for name, _ in model.named_buffers()]
    assert all(found.parameters[name] is p for name, p in model.named_parameters())
    assert all(found.buffers[name] is b for name, b in model.named_buffers())


def test_a_walk_is_taken_again_when_something_was_replaced_added_or_removed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    walk = Walk(model)
    found = walk()
    assert walk() is found
    changes = [
        lambda: setattr(model[1][0], "weight", nn.Parameter(torch.zeros(3, 3))),
        lambda: model[0].register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda: delattr(model[0], "more"),
        lambda: model[1][1].register_buffer("running_mean", torch.ones(3)),
        lambda: model[1].append(nn.Linear(3, 3)),
        lambda: model[0]._parameters.update(weight=model[0]._parameters.pop("weight")),  # last now
        lambda: model[0].__dict__.update(_parameters={"weight": nn.Parameter(torch.ones(3, 3)), "bias": None}),
    ]
    for change in changes:
        change()
        again = walk()
        assert again is not found
        assert list(again.parameters) == [name for name, _ in model.named_parameters()]
        assert all(again.parameters[name] is p for name, p in model.named_parameters())
        assert all(again.buffers[name] is b for name, b in model.named_buffers())
        assert walk() is again
        found = again


def test_a_walk_does_not_trust_the_model_to_name_its_modules() -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def named_modules(self, *args: object, **options: object) -> Iterator[tuple[str, nn.Module]]:
            yield "", self

    model = Hides()
    walk = Walk(model)
    found = walk()
    model.inner.bias = nn.Parameter(torch.ones(3))
    assert walk() is not found


def test_scripted_modules_are_walked_over() -> None:
    model = nn.Sequential(nn.Linear(4, 1), torch.jit.script(nn.ReLU()))
    walk = Walk(model)
    assert list(walk().parameters) == list(walk().parameters) == ["0.weight", "0.bias"]


def test_a_tensor_that_was_looked_at_can_be_resized() -> None:
    """FSDP gives the memory of gathered parameters back."""
    for size in (10, 2 * SMALL):
        t = nn.Parameter(torch.randn(size))
        bits_of(t)
        t.untyped_storage().resize_(0)
