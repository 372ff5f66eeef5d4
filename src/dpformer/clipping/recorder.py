"""What the rules ask of the engine: which tensors are public, which are trained, and to record a call.

Public tensors are the same for every user. Those that depend on parameters are *managed*: a parameter itself, or an
expression of parameters (`weight.T`, `positions[:T]`, `scale.exp()`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.graph import leaves
from dpformer.clipping.recorded_call import CHANGED, Build, Paired, RecordedCall, own
from dpformer.clipping.registered import Registered
from dpformer.clipping.trees import tensors_of
from dpformer.clipping.user_rows import UserRows

FREEZE_BATCH_NORM = (
    "it takes statistics over the batch, which mixes users: call .eval() on the batch normalisation layers (after "
    "model.train()), so that their statistics are constants, or use GroupNorm, LayerNorm or RMSNorm instead"
)
_REGISTERED = ("_parameters", "_buffers", "_modules")  # of every nn.Module


class Recorder(TorchFunctionMode):
    """Knows the model's tensors, and records the calls of forward passes that use parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trainable: list[Tensor] = []
        self.names: dict[int, str] = {}  # of the trainable parameters, by identity
        self.own: set[int] = set()  # parameters, frozen ones too, and buffers
        self.constants: dict[int, tuple[Tensor, int]] = {}  # with their count of writes
        self.lists: dict[int, tuple[Any, str]] = {}  # lists and tuples of the model, with what was in them
        self.calls: list[RecordedCall] = []
        self.context = 0  # counts the contexts that were entered
        self.hooked = False  # whether the model has put a hook on a tensor, which expects a gradient
        self.rewritten: dict[int, int] = {}  # by storage: the count of writes of public numbers, the last that was seen
        self.written: dict[int, Tensor] = {}  # by storage: made of constants, and users' data was written into it
        self.sink: list[Callable[[RecordedCall, Tensor], None]] = []
        self.token = torch.zeros((), requires_grad=True)

    def survey(self, found: Registered) -> None:
        """Takes the model's parameters and buffers anew: they may have been frozen or replaced since."""
        self.trainable = [p for p in found.parameters.values() if p.requires_grad]
        self.names = {id(p): name for name, p in found.parameters.items() if p.requires_grad}
        self.own = {id(t) for t in found.all().values()}
        self.found = found

    def remember_constants(self, model: nn.Module) -> None:
        """Tensors in attributes of the model before it has seen any user, as peft's prompt tokens; while unchanged."""
        for module in model.modules():
            for t in tensors_of(*(v for name, v in vars(module).items() if name not in _REGISTERED)):
                self.constants[id(t)] = (t, t._version)

    def remember_lists(self, model: nn.Module) -> None:
        """Lists and tuples in attributes of the model before it has seen any user; while unchanged."""
        for module in model.modules():
            for value in vars(module).values():
                for one in (value, *(value.values() if isinstance(value, dict) else ())):
                    if isinstance(one, (list, tuple)):
                        self.lists[id(one)] = (one, repr(one))

    def is_public(self, t: Tensor) -> bool:
        if id(t) in self.own:
            return True
        seen = getattr(t, "_phantom_public", False)
        if seen is False:
            if id(t) not in self.constants or self.constants[id(t)][1] != t._version:
                return False
        elif seen != (now := version_of(t)) and self.rewritten.get(storage_of(t)) != now:
            return False  # it was written to where it was not seen
        return not self.written or storage_of(t) not in self.written  # views of it share what was written

    def is_managed(self, t: Any) -> TypeGuard[Tensor]:
        """A trainable parameter or an expression of some."""
        return isinstance(t, Tensor) and t.requires_grad and self.is_public(t)

    def name(self, t: Tensor) -> str:
        if id(t) in self.names:
            return f"parameter '{self.names[id(t)]}'"
        return "an expression of " + ", ".join(f"'{self.names.get(id(p), '?')}'" for p in leaves(t))

    def refusal(self, parameter: Any, func: Any, fix: str) -> UnsupportedUse:
        who = self.name(parameter) if isinstance(parameter, Tensor) else "a parameter"
        return UnsupportedUse(f"{who} is used by {label(func)}, which has no exact rule here; {fix}")

    def cut(self, t: Any) -> Any:
        """The value of a managed tensor, out of the graph; anything else as it is."""
        return t.detach() if self.is_managed(t) else t

    def fill(self, fresh: Sequence[Tensor], *slots: Any) -> tuple[Any, ...]:
        """The arguments with their managed ones replaced, in order, by fresh tensors (for the proof)."""
        values = iter(fresh)
        return tuple(next(values) if self.is_managed(slot) else slot for slot in slots)

    def record(
        self,
        func: Any,
        managed: list[Tensor],
        paired: Paired,
        build: Build,
        out: Tensor,
        rows: Tensor,
        reads: Sequence[Tensor] = (),
        inside: bool = False,
    ) -> Tensor:
        """Records a call with its output `out`.

        Args:
            rows: the tensor whose first dimension counts the rows.
            reads: what `build` reads in the backward pass: it must not be written to until then.
            inside: whether the output stays inside the rule, so that the model cannot write into it.
        """
        out = out if inside else own(out)
        for parameter in managed:
            if not parameter.numel():
                raise self.refusal(parameter, func, "it has no numbers, so nothing can be trained: leave its layer out")
            if parameter.grad_fn is not None and any(id(leaf) not in self.names for leaf in leaves(parameter)):
                fix = "users' data was written into it in a way that is not seen: build a new tensor instead"
                raise self.refusal(parameter, func, fix)
        names = tuple(self.names.get(id(m), "expression") for m in managed)
        if torch.is_autocast_enabled(rows.device.type):
            paired = _under_autocast(paired, rows.device.type)
        build = self._unchanged(build, [*reads, *managed], managed[0], func)
        call = RecordedCall(func, names, managed, paired, build, tuple(rows.shape), self.sink, self.context)
        self.calls.append(call)
        return call.watch(out, self.token)

    def _unchanged(self, build: Build, reads: Sequence[Tensor], parameter: Tensor, func: Any) -> Build:
        """Autograd's own check does not see what only the recorded calls have kept."""
        kept = [(t if t.grad_fn is None else t.detach(), t._version) for t in reads]  # it shares the count of writes

        def checked(grad: Tensor, rows: UserRows) -> Any:
            if any(t._version != version for t, version in kept):
                raise self.refusal(parameter, func, CHANGED)
            return build(grad, rows)

        return checked if kept else build


def _under_autocast(paired: Paired, device: str) -> Paired:
    """The proof calls the function again, perhaps outside the autocast that the model ran under."""
    dtype = torch.get_autocast_dtype(device)

    def within(*args: Tensor) -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return paired(*args)

    return within


def version_of(t: Tensor) -> int:
    """The count of its writes."""
    return -1 if t.is_inference() else t._version


def storage_of(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout == torch.strided else id(t)


def label(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__qualname__", str(func))
