"""Sums of bits, and the walk over a model, against what torch does itself."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from dpformer.clipping.model_state import Walk, registered
from dpformer.kernels import checksum as bits_module
from dpformer.kernels import native
from dpformer.kernels.checksum import SMALL, bits_and_finite, bits_of, bits_of_all, equal


@pytest.fixture(autouse=True, params=["compiled", "by address", "in Python"])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code and its twin pass the same tests."""
    if request.param == "by address":  # with a version of torch that does not let compiled code read tensors
        monkeypatch.setattr(native, "_offered", False)
    if request.param == "in Python":
        monkeypatch.setattr(native, "kernels", None)


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


@pytest.mark.parametrize("at_once", [5, 100, 1 << 22])
def test_on_a_device_all_tensors_are_read_together(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum is that of its tensor alone, whatever is read with it and in how many pieces."""
    every = [t.detach() for t in tensors() if t.numel() < 200]
    alone = [int(bits_module._sum(bits_module._words(t))) for t in every]
    monkeypatch.setattr(bits_module, "ON_DEVICE", at_once)
    assert [int(total) for total in bits_module._on_devices(every)] == alone
    assert len(set(alone)) > len(every) - 5, "those without numbers are alike"


def test_sums_that_differ_are_found_wherever_they_are_kept() -> None:
    there = list(torch.tensor([1, 2, 3]).unbind())
    assert equal([*there, 7, 8], [*there, 7, 9]) == [True, True, True, True, False]
    assert equal([there[0], 1, there[1]], [there[0], there[0], there[2]]) == [True, False, False]
    assert equal([], []) == []


def by_definition(words: list[int]) -> int:
    """NH of blocks of 16 words whose keys move on from block to block, modulo 2⁶⁴."""
    words = words + [0] * (-len(words) % 16)
    keyed = [
        (word + (n % 16 + 1) * 0x9E3779B9 + n // 16 * (2 * (n % 16) + 1) * 0x85EBCA6B) % 2**32
        for n, word in enumerate(words)
    ]
    total = sum(a * b for a, b in zip(keyed[::2], keyed[1::2], strict=True)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 31, 33, 100, 4099])
def test_compiled_sums_are_what_they_are_said_to_be(count: int) -> None:
    """On every processor, whatever vectors it has."""
    if native.kernels is None:
        pytest.skip("nothing was compiled")
    t = torch.randn(count, generator=torch.Generator().manual_seed(count))
    words = [word % 2**32 for word in t.view(torch.int32).tolist()]
    assert bits_of(t) == by_definition(words)
    assert native.kernels.sums_of_words([(t.data_ptr(), count)]) == ([by_definition(words)], True)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 7, 8, 15, 16, 40])
def test_numbers_that_are_not_finite_are_seen(bad: float, place: int) -> None:
    fine, strange = torch.randn(41), torch.randn(41)
    strange[place] = bad
    assert not bits_and_finite([fine, strange])[1]
    assert bits_and_finite([fine])[1] == (native.kernels is not None), "False where nobody has looked"
    assert not bits_and_finite([fine, torch.zeros(3, dtype=torch.float64)])[1]
