"""What compiled code says of a call's tensors is what Python says."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpformer.clipping import gate, ordinary, picked
from dpformer.clipping.turned import mark_turned
from dpformer.kernels import native

needed = pytest.mark.skipif(native.objects is None, reason="nothing was compiled")
Pair = namedtuple("Pair", "first second")


def marked(name: str, value: Any) -> Tensor:
    t = torch.randn(2, 3)
    setattr(t, name, value)
    return t


frozen, trained = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
constant, turned, plain = torch.zeros(2), torch.randn(3, 2), torch.randn(2, 3)
mark_turned(turned)
OWN, CONSTANTS = {id(frozen), id(trained)}, {id(constant): (constant, 0)}
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one": ((plain,), {}),
    "beside a frozen parameter": ((plain, frozen, 3, None, "mean"), {}),
    "a frozen parameter alone": ((frozen,), {}),
    "beside a trained parameter": ((plain, trained), {}),
    "beside a trained parameter by name": ((plain,), {"weight": trained}),
    "beside a parameter of somebody else": ((plain, nn.Parameter(torch.ones(3), requires_grad=False)), {}),
    "a constant": ((plain, constant), {}),
    "nothing": ((1, 2.0, "x", None, [], {}), {}),
    "in lists": (([plain, (plain, [frozen])], {"a": {"b": plain}}), {"c": (plain,)}),
    "in a list, trained": (([plain, (plain, [trained])],), {}),
    "in a named tuple": ((Pair(plain, {"t": turned}),), {}),
    "turned": ((plain, turned), {}),
    "public": ((plain, marked("_phantom_public", True)), {}),
    "public no longer": ((plain, marked("_phantom_public", False)), {}),
    "picked": ((marked("_phantom_picked", picked.Picked(None, 2, None)),), {}),
    "picked no longer": ((marked("_phantom_picked", None),), {}),
    "computed": ((marked("_phantom_computed", True), plain), {}),
    "an attribute of the user's own": ((marked("note", "x"),), {}),
}


@needed
@pytest.mark.parametrize("call", CALLS)
def test_tensors_of_users(call: str) -> None:
    args, kwargs = CALLS[call]
    ours = ordinary.tensors_of_users(args, kwargs, OWN, CONSTANTS)
    theirs = ordinary.in_python[0](args, kwargs, OWN, CONSTANTS)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert list(map(id, ours)) == list(map(id, theirs))


def test_both_answers_come() -> None:
    found = [ordinary.in_python[0](*call, OWN, CONSTANTS) is None for call in CALLS.values()]
    assert 5 < sum(found) < len(found) - 5


@pytest.mark.parametrize("mark", [ordinary.in_python[1], ordinary.marked_computed], ids=["Python", "compiled"])
def test_what_was_computed_is_marked(mark: Any) -> None:
    given, made, other = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    out = (made, [given, {"x": other}], None, 3)
    assert mark(out, [given]) is out
    assert [picked.is_computed(t) for t in (given, made, other)] == [False, True, True]
    assert mark(5, [given]) == 5


@needed
def test_arguments_that_contain_themselves_are_an_error() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        ordinary.tensors_of_users((endless,), {}, set(), {})


@needed
def test_wrong_types_are_refused() -> None:
    assert native.objects is not None
    objects = native.objects
    home: dict[str, Any] = {}
    for function, arguments in [
        (objects.of_users, ([], {}, set(), {})),
        (objects.of_users, ((), {}, {}, {})),
        (objects.of_users, ((), {})),
        (objects.mark_computed, (plain, (plain,))),
        (objects.mark_computed, (plain,)),
        (objects.are_same, ((),)),
        (objects.are_same, ([3],)),
        (objects.are_same, ([(nn.Linear(1, 1), "_parameters", home, (), [])],)),
        (objects.are_same, ([(nn.Linear(1, 1), "_parameters")],)),
    ]:
        with pytest.raises(TypeError):
            function(*arguments)


HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda t: t.transpose(1, 2),
    "transpose from behind": lambda t: t.transpose(-1, -2),
    "transpose the batch": lambda t: t.transpose(0, 1),
    "transpose the batch from behind": lambda t: t.transpose(-3, 2),
    "to": lambda t: t.to(torch.float64),
    "to what it is": lambda t: t.to(t.dtype),
    "contiguous": lambda t: t.mT.contiguous(),
    "clone": lambda t: t.clone(),
}


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("name", HARMLESS)
def test_the_short_way_says_what_the_long_way_says(name: str, computed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> tuple[dict[str, Any], set[int]]:
        watch = gate.Gate({}, lambda *_: None)
        data = torch.randn(4, 3, 2)
        with watch:
            out = HARMLESS[name](data * 2 if computed else data)
        return {key: value for key, value in vars(out).items() if value}, watch.doubts

    short = said()
    monkeypatch.setattr(gate, "_is_harmless", lambda *_: False)
    assert short == said()
