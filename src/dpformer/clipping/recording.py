"""Calls that used parameters, recorded: where, and the gradient that reached the output in the one backward pass.

The parameter itself is cut out of the graph (the function runs on `parameter.detach()`), so autograd never computes
its summed gradient: what each user contributes is computed from the recorded call instead, once, by the engine.

Public tensors are the same for every user. Those that depend on parameters are *managed*: a parameter itself, or an
expression of parameters (`weight.T`, `positions[:T]`, `scale.exp()`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from dpformer.clipping.model_state import Registered
from dpformer.clipping.trees import tensors_of
from dpformer.clipping.uses import Use
from dpformer.compat import unsafe_view
from dpformer.errors import UnsupportedUse


@dataclass(frozen=True)
class UserRows:
    """The rows of one use, of `users` users."""

    users: int

    def spread(self, t: Tensor) -> Tensor:
        """(rows, …) → (B, rows of a user, …)"""
        return t.reshape(self.users, len(t) // self.users, *t.shape[1:])

    def total(self, t: Tensor) -> Tensor:
        """(rows, …) → (B, …), summed over each user's rows."""
        return t if len(t) == self.users else self.spread(t).sum(1)

    def user_of_row(self, rows: int, device: torch.device) -> Tensor:
        """(rows,) the user of each row."""
        return torch.arange(self.users, device=device).repeat_interleave(rows // self.users)


def leaves(t: Tensor) -> list[Tensor]:
    """The parameters that an expression is made of."""
    if t.grad_fn is None:
        return [t]
    seen: set[Any] = set()
    found: dict[int, Tensor] = {}
    stack = [t.grad_fn]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found[id(node.variable)] = node.variable
        stack.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    return list(found.values())


# -- a recorded call ---------------------------------------------------------------------------------------------------


class Source(Protocol):
    """What a recorded call tells of one parameter: the use itself, or what writes a use out for a few users."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def part(self, a: int, b: int) -> Use: ...
    def add_sum(self, c: Tensor, out: Tensor) -> None: ...
    def keep(self, users: Tensor) -> None: ...


Paired = Callable[..., Tensor]  # (gradient of the output, *parameters) → number
Build = Callable[[Tensor, UserRows], Sequence[tuple[Tensor, Source]]]

CHANGED = "a tensor that it read was changed in place afterwards: build a new tensor instead"


def paired(function: Callable[..., Tensor]) -> Paired:
    """⟨function(parameters), gradient⟩: its derivative by a parameter is what the gradient contributes to it."""

    def product(grad: Tensor, *parameters: Tensor) -> Tensor:
        value = function(*parameters)
        return (value * grad.conj()).real.sum() if value.is_complex() else (value * grad).sum()

    return product


def own(out: Tensor) -> Tensor:
    """A view (einsum permutes a product) is copied: were the model to write into it, autograd would lead its gradient
    past the hook, to what it is a view of, and neither the engine nor the self-check would know."""
    return out.clone() if out._is_view() else out


def fresh(out: Tensor) -> Tensor:
    """The same without a copy, for a result that is a view of what nobody else holds: F.linear of three dimensions."""
    if not out._is_view() or not out.is_contiguous() or out._base is None or out._base.numel() != out.numel():
        return own(out)
    whole: Tensor = unsafe_view(out, out.shape)
    return whole


@dataclass
class RecordedCall:
    """One call of a function with parameters among its arguments."""

    func: Any
    names: tuple[str, ...]  # of the parameters
    managed: list[Tensor]  # the parameters (or expressions of parameters) used here
    paired: Paired  # ⟨the function of `managed`, a gradient⟩: what plain autograd differentiates in the self-check
    build: Build  # gradient of the output → uses, once the number of users is known
    shape: tuple[int, ...]  # of the tensor whose first dimension counts the rows
    sink: list[Callable[[RecordedCall, Tensor], None]]  # shared with the engine: the last one takes the gradients
    context: int  # which `clipping.users` it was recorded in, counted up
    grad: Tensor | None = field(default=None)

    @property
    def numbers(self) -> int:
        """That its uses hold, at most."""
        return prod(self.shape) + (0 if self.grad is None else self.grad.numel())

    def uses(self, users: int) -> Sequence[tuple[Tensor, Source]]:
        """What each parameter got here, resolved to users, in at least float32."""
        assert self.grad is not None
        dtype = torch.promote_types(self.grad.dtype, torch.float32)
        for managed in self.managed:  # a float64 parameter in a layer that computes in float32, say
            dtype = torch.promote_types(dtype, managed.real.dtype if managed.is_complex() else managed.dtype)
        grad = self.grad.to(dtype)
        return self.build(grad, UserRows(users))

    @property
    def where(self) -> str:
        """For messages."""
        return f"parameter '{self.names[0]}' in {getattr(self.func, '__name__', self.func)}"

    def _received(self, place: int, grads: Sequence[Tensor | None]) -> None:
        if (grad := grads[place]) is not None:
            self.receive(grad)

    def receive(self, grad: Tensor) -> None:
        if torch.is_grad_enabled():  # so it is inside a backward pass with create_graph=True only
            raise UnsupportedUse(
                f"{self.where} is differentiated with create_graph=True (a gradient penalty, a second derivative): the "
                f"parameter is cut out of the graph here, so its part in that gradient would be lost; leave "
                f"create_graph away, or compute the penalty without it"
            )
        if self.sink:
            self.sink[-1](self, grad)

    def forget(self) -> None:
        """Lets go of activations and gradients once the norms are known."""
        self.grad = None
        self.build = self.paired = _forgotten

    def watch(self, out: Tensor, token: Tensor) -> Tensor:
        """Returns `out`, whose gradient will be brought here; it must not be a view (`own`)."""
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(partial(self._received, out.output_nr))  # after hooks of the user's own
            return out
        return _Begin.apply(token, self, [out])


def _forgotten(*_: Any) -> Any:
    raise AssertionError("the norms of this call have been computed")


class _Begin(torch.autograd.Function):
    """Starts the graph at an output that nothing before it made differentiable (an embedding, the first layer)."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: RecordedCall, out: list[Tensor]) -> Tensor:
        ctx.call = call
        return out.pop()  # in a list, for a tensor argument returned as it came could not be changed in place later

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.call.receive(grads[0])
        return None, None, None


def is_begin(node: Any) -> bool:
    """Whether a node of the graph is such a start."""
    return getattr(type(node), "_forward_cls", None) is _Begin


# -- the recorder, which the rules ask ---------------------------------------------------------------------------------


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
        """Tensors in attributes of the model before it has seen any user, as peft's prompt tokens; while unchanged.

        Quantised weights keep theirs (scales, codes) in attributes of the parameter, or in an object there.
        """
        for module in model.modules():
            for t in tensors_of(*(v for name, v in vars(module).items() if name not in _REGISTERED)):
                self.constants[id(t)] = (t, t._version)
            for parameter in module._parameters.values():
                if parameter is not None and not parameter.requires_grad:
                    for t in _kept_by(list(vars(parameter).values())):
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
        """The arguments with their managed ones replaced, in order, by fresh tensors (for the self-check)."""
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
    """The self-check calls the function again, perhaps outside the autocast that the model ran under."""
    dtype = torch.get_autocast_dtype(device)

    def within(*args: Tensor) -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return paired(*args)

    return within


def _kept_by(values: list[Any], depth: int = 2) -> Iterator[Tensor]:
    """The tensors among attributes of a parameter, and in plain objects there."""
    yield from tensors_of(*values)
    for value in values:
        if depth and hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module, type)):
            yield from _kept_by(list(vars(value).values()), depth - 1)


def version_of(t: Tensor) -> int:
    """The count of its writes."""
    return -1 if t.is_inference() else t._version


def storage_of(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout == torch.strided else id(t)


def label(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__qualname__", str(func))


# -- rules -------------------------------------------------------------------------------------------------------------
#
# `@rule(F.linear)` stands above a function whose parameters are named and ordered as torch's. A call then binds as
# Python binds it, by position or by name, so `torch.matmul(other=w, input=x)` is x @ w. An argument that the rule does
# not know is refused, never guessed.

Rule = Callable[[Recorder, Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
SIGNATURES: dict[Any, inspect.Signature] = {}  # of the rules, without gate and function; the tests hold them to torch's

Run = TypeVar("Run", bound=Callable[..., Any])


def rule(*functions: Any) -> Callable[[Run], Run]:
    """Registers `run(gate, func, …)` as the rule of some torch functions, for real numbers."""

    def register(run: Run) -> Run:
        whole = inspect.signature(run)
        signature = whole.replace(parameters=list(whole.parameters.values())[2:])

        def bound(gate: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                return run(gate, func, *args, **kwargs)
            except TypeError:
                _check_binding(gate, func, signature, args, kwargs)
                raise

        for function in functions:
            RULES[function], SIGNATURES[function] = bound, signature
        return run

    return register


def _check_binding(
    gate: Recorder, func: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameter = next(t for t in tensors_of(args, kwargs) if gate.is_managed(t))
        raise gate.refusal(parameter, func, f"call it as {signature} ({error})") from None
