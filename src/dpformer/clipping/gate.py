"""The gate: every torch function that is called inside the context passes here.

Tensors fall into two sorts. *Public* tensors are the same for every user: parameters, buffers, constants made inside
the forward pass (`torch.arange`), and whatever is computed from public tensors alone. All others may hold users' data
and have rows that belong to users. A function of public tensors runs untouched: if parameters are among them, its
result is an *expression* of parameters (`weight.T`, `positions[:T]`, `scale.exp()`), itself public. Only where a
parameter, or an expression of parameters, meets users' data does a user's gradient arise: that is a **use**, and it
needs a rule (rules/). Anything without a rule is refused by name, so nothing can pass unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode, resolve_name

from dpformer.clipping import picked
from dpformer.clipping.affine import is_plain, record_affine
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.moves import MOVES, SHAPES, may_move
from dpformer.clipping.ordinary import marked_computed, tensors_of_users
from dpformer.clipping.recorded_call import CHANGED, Build, Paired, RecordedCall, own
from dpformer.clipping.registered import Registered
from dpformer.clipping.trees import tensors_of
from dpformer.clipping.turned import TRANSPOSES, follow_batch, is_turned, mark_turned
from dpformer.clipping.user_rows import Packed, UserRows
from dpformer.kernels import native


def _named(names: str, *homes: Any) -> set[Any]:
    return {getattr(home, name) for home in homes for name in names.split() if hasattr(home, name)}


# Made from sizes alone. torch.tensor and its kin are not here: they may carry users' data out of Python lists.
_CONSTANTS = _named("arange zeros ones full eye linspace empty tril_indices triu_indices", torch)
# A look at a parameter that takes no value from it, or takes it out of the graph on purpose.
_READS = _named(
    "detach size dim ndimension numel nelement stride is_contiguous element_size data_ptr is_floating_point is_complex "
    "is_signed get_device storage_offset untyped_storage is_pinned is_shared is_inference is_same_size __len__",
    Tensor,
) | _named("is_floating_point is_complex numel is_tensor", torch)
# Of these, and of attributes, what depends on no number in any tensor.
_SIZES = _named("size dim ndimension numel nelement stride is_contiguous __len__", Tensor) | {
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")
}
# The other tensor lends its dtype, device or shape.
_LIKE = _named("to type_as view_as reshape_as expand_as new_tensor", Tensor)
FREEZE_BATCH_NORM = (
    "it takes statistics over the batch, which mixes users: call .eval() on the batch normalisation layers (after "
    "model.train()), so that their statistics are constants, or use GroupNorm, LayerNorm or RMSNorm instead"
)
_BATCH_NORMS = _named("batch_norm _batch_norm_impl_index native_batch_norm", torch) | {F.batch_norm}

_COMPILED = (
    "torch.compile hides from the engine where parameters are used: give PhantomClipping the model itself and run it "
    "without torch.compile (what is compiled and not trained, such as a teacher, can run before `with clipping:`)"
)
_REGISTERED = ("_parameters", "_buffers", "_modules")  # of every nn.Module

Rule = Callable[["Gate", Any, tuple[Any, ...], dict[str, Any]], Any]


class Gate(TorchFunctionMode):
    """Runs each torch function by its rule and records the calls of one forward pass that use parameters."""

    def __init__(self, rules: dict[Any, Rule], otherwise: Rule) -> None:
        super().__init__()
        self.rules, self.otherwise = rules, otherwise  # the rule of a function without a rule of its own
        self.trainable: list[Tensor] = []
        self.names: dict[int, str] = {}  # of the trainable parameters, by identity
        self.buffers: set[int] = set()
        self.own: set[int] = set()  # parameters, frozen ones too, and buffers
        self.constants: dict[int, tuple[Tensor, int]] = {}  # with their count of writes
        self.calls: list[RecordedCall] = []
        self.context = 0  # counts the contexts that were entered
        self.hooked = False  # whether the model has put a hook on a tensor, which expects a gradient
        self.doubts: set[int] = set()  # contexts in which rows may have changed places unseen: they are to be proven
        self.written: dict[int, Tensor] = {}  # by storage: made of constants, and users' data was written into it
        self.sink: list[Callable[[RecordedCall, Tensor], None]] = []
        self.packed: Packed | None = None
        self.token = torch.zeros((), requires_grad=True)

    def survey(self, found: Registered) -> None:
        """Takes the model's parameters and buffers anew: they may have been frozen or replaced since."""
        self.trainable = [p for p in found.parameters.values() if p.requires_grad]
        self.names = {id(p): name for name, p in found.parameters.items() if p.requires_grad}
        self.buffers = {id(b) for b in found.buffers.values()}
        self.own = {id(t) for t in found.all().values()}

    def remember_constants(self, model: nn.Module) -> None:
        """Tensors in attributes of the model before it has seen any user, as peft's prompt tokens; while unchanged."""
        for module in model.modules():
            for t in tensors_of(*(v for name, v in vars(module).items() if name not in _REGISTERED)):
                self.constants[id(t)] = (t, t._version)

    # -- what sort of tensor ------------------------------------------------------------------------------------------

    def is_public(self, t: Tensor) -> bool:
        if id(t) in self.own:
            return True
        if not getattr(t, "_phantom_public", False):
            return id(t) in self.constants and self.constants[id(t)][1] == t._version
        return not self.written or _storage(t) not in self.written  # views of it share what was written

    def _is_of_model(self, t: Tensor) -> bool:
        return id(t) in self.own

    def is_managed(self, t: Any) -> TypeGuard[Tensor]:
        """A trainable parameter or an expression of some."""
        return isinstance(t, Tensor) and t.requires_grad and self.is_public(t)

    def name(self, t: Tensor) -> str:
        if id(t) in self.names:
            return f"parameter '{self.names[id(t)]}'"
        return "an expression of " + ", ".join(f"'{self.names.get(id(p), '?')}'" for p in leaves(t))

    # -- the gate itself ----------------------------------------------------------------------------------------------

    def in_python(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What every torch function does here; compiled code takes the short ways, and leaves the others to this."""
        if get_eval_frame_callback() is not None:  # inside torch.compile, which would compile the gate too
            raise UnsupportedUse(_COMPILED)
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            self.hooked = True
        if func in _SIZES and type(args[0]) in (Tensor, nn.Parameter):
            return func(*args, **kwargs)
        vmapped = peek_interpreter_stack() is not None
        if not vmapped and "out" not in kwargs and (_is_ordinary(func) or _is_harmless(func, args)):
            given = tensors_of_users(args, kwargs, self.own, self.constants)
            if given is not None:
                self.look(func, args, kwargs)
                return marked_computed(func(*args, **kwargs), given)
        tensors = tensors_of(*args, *kwargs.values())
        if vmapped and any(t.is_floating_point() for t in tensors):  # there are no marks then
            self.doubt()
        sorts = [self.is_public(t) for t in tensors]
        public = all(sorts)
        managed = [t for t, is_public in zip(tensors, sorts, strict=True) if is_public and t.requires_grad]
        if not managed:  # only the sort of the result matters
            self._refuse_strangers(func, tensors)
            return self._without_parameters(func, args, kwargs, tensors, public)
        if self._is_read(func):
            return self._marked(func(*args, **kwargs)) if public else func(*args, **kwargs)
        if not torch.is_grad_enabled() and not public:
            raise UnsupportedUse(
                f"{self.name(managed[0])} is used by {label(func)} under no_grad, so its gradient would be lost; "
                f"leave no_grad, freeze the parameter, or use parameter.detach() if that is meant"
            )
        if public or (func in _LIKE and managed[0] is args[0]):
            return self._express(func, args, kwargs)
        return self._use(func, args, kwargs, tensors)

    # A method of its class, as this one.
    __torch_function__ = in_python if native.objects is None else native.objects.passage

    def affine(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, trains_weight: bool, trains_bias: bool
    ) -> Tensor | None:
        """A linear layer that compiled code has found to be plain (affine.py); None if it is not, for other reasons."""
        if self.packed is not None or not is_plain(func, x, weight, bias):
            return None
        return record_affine(self, func, x, weight, bias, trains_weight, trains_bias)

    @staticmethod
    def classify(func: Any) -> int:
        """Which short way a function may take, for compiled code."""
        return _classify(func)

    def look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Where rows may change places unseen, this batch is to be proven."""
        if func in MOVES and self.context not in self.doubts:
            user_of_row = None if self.packed is None else self.packed.user
            if may_move(func, args, kwargs, self._is_computed_of_users, user_of_row):
                self.doubt()

    def doubt(self) -> None:
        """Only the proof of this very batch can tell whose its rows are."""
        self.doubts.add(self.context)

    def _is_computed_of_users(self, t: Tensor) -> bool:
        return picked.is_computed(t) and not self.is_public(t)

    def _express(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An expression of parameters: plain autograd, and the result is public again."""
        if (writes_in_place(func) and self._is_of_model(args[0])) or kwargs.get("out") is not None:
            raise self.refusal(args[0], func, "build a new tensor instead of writing into one")
        out = self._marked(func(*args, **kwargs))
        if func in TRANSPOSES and id(args[0]) in self.names and _is_transpose(out, args[0]):
            out._phantom_transpose_of = args[0]
        return out

    def _marked(self, out: Any) -> Any:
        """What is made of public tensors alone is public."""
        for t in tensors_of(out):
            if not self._is_of_model(t):
                t._phantom_public = True  # type: ignore[attr-defined]
        return out

    def _use(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        self.look(func, args, kwargs)
        turned, sources = False, []
        for t in tensors:  # every use passes here: no generators
            turned |= is_turned(t)
            if picked.picked(t) is not None and not self.is_public(t):
                sources.append(t)
        if sources and (
            turned or func in _LOSE_PICKS or picked.disagree(sources[0], tensors, self._is_computed_of_users)
        ):
            self.doubt()
        out = self._run(func, args, kwargs, turned)
        for t in (out,) if isinstance(out, Tensor) else tensors_of(out):
            picked.mark_computed(t)
        if sources:
            picked.follow(func, args, kwargs, sources, out, self.packed, lambda _: True)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, turned: bool) -> Any:
        rule = self.rules.get(func)
        if rule is not None and turned and func not in KNOW_THEIR_BATCH:
            return self._use_turned(rule, func, args, kwargs)
        if rule is not None:
            return rule(self, func, args, kwargs)
        if func in _LIKE and not self.is_managed(args[0]):
            return func(*(self.cut(a) for a in args), **kwargs)
        return self.otherwise(self, func, args, kwargs)

    def _use_turned(self, rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        """The model has turned its data time first: turn it back, use the parameter, turn the result again."""

        data = next(t for t in tensors_of(args, kwargs) if is_turned(t))

        def back(value: Any) -> Any:
            if isinstance(value, Tensor) and is_turned(value):
                return picked.mark_computed(value.transpose(0, 1))
            if self.is_managed(value) and value.ndim == data.ndim and func in ELEMENTWISE:  # positions (T, 1, D)
                with self:
                    return value.transpose(0, 1)
            return value

        if writes_in_place(func) or any(t.ndim != data.ndim for t in tensors_of(args, kwargs) if is_turned(t)):
            raise self.refusal(next(t for t in tensors_of(args, kwargs) if self.is_managed(t)), func, _BATCH_FIRST)
        given, named = tuple(map(back, args)), {name: back(value) for name, value in kwargs.items()}
        try:
            out = rule(self, func, given, named)
        except RuntimeError as error:  # raw data came time first, and what was turned is batch first
            if isinstance(error, UnsupportedUse):
                raise
            raise self.refusal(
                next(t for t in tensors_of(args, kwargs) if self.is_managed(t)), func, _BATCH_FIRST
            ) from error
        if not isinstance(out, Tensor) or out.shape[:2] != data.shape[:2][::-1]:
            raise self.refusal(next(t for t in tensors_of(args, kwargs) if self.is_managed(t)), func, _BATCH_FIRST)
        out = out.transpose(0, 1).contiguous()  # as the model would have it, which may view it in another shape
        mark_turned(out)
        return out

    def _without_parameters(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], public: bool) -> Any:
        if func in _BATCH_NORMS and _uses_batch_statistics(args, kwargs):
            raise UnsupportedUse(f"{label(func)} cannot be used here: {FREEZE_BATCH_NORM}")
        if public and (tensors or func in _CONSTANTS or _is_scalar(func, args)):
            return self._marked(func(*args, **kwargs))
        self.look(func, args, kwargs)
        in_place = writes_in_place(func)
        if in_place or "out" in kwargs:
            self._no_longer_public(func, args, kwargs)
        out = func(*args, **kwargs)
        picked.follow_raw(func, tensors, [out] if isinstance(out, Tensor) else tensors_of(out))
        lost = follow_batch(func, args, kwargs, tensors, out) and any(map(self._is_computed_of_users, tensors))
        lost |= isinstance(func, (OpOverload, OpOverloadPacket))  # torch.ops: no names that are known here
        if in_place or "out" in kwargs:
            lost |= func in picked.PICKS or picked.written_among(
                func, args, kwargs, tensors, self._is_computed_of_users
            )
        else:
            lost |= picked.follow(func, args, kwargs, tensors, out, self.packed, self.is_public)
        if lost:
            self.doubt()
        if func is torch.stack and self.context not in self.doubts:  # of steps, not of single users' rows
            self._stacked(args, kwargs, out)
        return out

    def _stacked(self, args: Any, kwargs: Any, out: Tensor) -> None:
        """Steps of time (or layers) one behind the other: the batch is the second dimension."""
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        parts = [t for t in (args[0] if args else kwargs["tensors"]) if not self.is_public(t)]
        plain = all(picked.is_computed(t) and picked.picked(t) is None and not is_turned(t) for t in parts)
        if dim in (0, -out.ndim) and out.ndim > 1 and parts and plain:
            mark_turned(out)

    def _no_longer_public(self, func: Any, args: Any, kwargs: Any) -> None:
        """A tensor that users' data is written into holds users' data from then on."""
        written = tensors_of(kwargs.get("out"))
        if writes_in_place(func):
            written += [a for a in args[:1] if isinstance(a, Tensor)]
        for t in written:
            if id(t) in self.buffers:
                raise UnsupportedUse(
                    f"{label(func)} writes users' data into a buffer of the model, which would stay there outside "
                    f"the guarantee; keep no running statistics of users"
                )
            if self.is_public(t):  # made for it inside the context
                picked.mark_computed(t)
                self.written[_storage(t)] = t
            t._phantom_public = False  # type: ignore[attr-defined]

    def _refuse_strangers(self, func: Any, tensors: Iterable[Tensor]) -> None:
        if not any(type(t) is not Tensor for t in tensors) or not any(t.requires_grad for t in tensors):
            return
        for t in tensors:
            if isinstance(t, FakeTensor):
                raise UnsupportedUse(_COMPILED)
            if isinstance(t, nn.Parameter) and t.requires_grad:
                raise UnsupportedUse(
                    f"a trainable parameter of shape {tuple(t.shape)} that is not part of the model is used by "
                    f"{label(func)}; register it in the module given to PhantomClipping, or freeze it"
                )

    def _is_read(self, func: Any) -> bool:
        if getattr(func, "__name__", "") == "__get__":  # an attribute; the transposes are expressions
            return func not in TRANSPOSES
        return func in _READS

    # -- for the rules ------------------------------------------------------------------------------------------------

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
        if rows.grad_fn is not None and not picked.is_computed(rows):  # computed outside, where nobody follows rows
            self.doubt()
        for parameter in managed:
            if not parameter.numel():
                raise self.refusal(parameter, func, "it has no numbers, so nothing can be trained: leave its layer out")
            if parameter.grad_fn is not None and any(id(leaf) not in self.names for leaf in leaves(parameter)):
                fix = "users' data was written into it in a way that is not seen: build a new tensor instead"
                raise self.refusal(parameter, func, fix)
        how = picked.picked(rows)
        if how is not None:
            if how.index is None:
                fix = "name the user of each row with `with clipping.packed(user_of_row):`"
                raise self.refusal(managed[0], func, f"its rows were picked out of users' rows and then mixed: {fix}")
            build = picked.by_user(build, how)
        names = tuple(self.names.get(id(m), "expression") for m in managed)
        if torch.is_autocast_enabled(rows.device.type):
            paired = _under_autocast(paired, rows.device.type)
        build = self._unchanged(build, [*reads, *managed], managed[0], func)
        call = RecordedCall(
            func, names, managed, paired, build, tuple(rows.shape), self.packed, self.sink, self.context,
            assumed=self.packed is None and how is None, raw=not picked.is_computed(rows),
        )  # fmt: skip
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


# torch itself, or the rule, says which dimension of their input is the batch.
KNOW_THEIR_BATCH = {
    F.multi_head_attention_forward, torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu, torch.einsum
}  # fmt: skip
# Their rules work on states that are not picked.
_LOSE_PICKS = (KNOW_THEIR_BATCH - {torch.einsum}) | {
    torch.gru_cell, torch.lstm_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell, Tensor.__getitem__
}  # fmt: skip
ELEMENTWISE: set[Any] = set()  # functions that never let two places meet (rules/broadcast.py)
_BATCH_FIRST = "give the model its data batch first, or turn it batch first before this call"


_COPIES = _named("to contiguous clone", Tensor)  # raw samples stay raw by them
_SPECIAL = _BATCH_NORMS | TRANSPOSES | picked.PICKS | {torch.stack}


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout == torch.strided else id(t)


@lru_cache(maxsize=1 << 12)
def _is_ordinary(func: Any) -> bool:
    """Whether a function of users' rows in order gives such rows, and nothing else is to be remembered of it."""
    return func not in _SPECIAL and not writes_in_place(func) and not isinstance(func, (OpOverload, OpOverloadPacket))


def _is_harmless(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether one of the other functions leaves users' rows in order as well: heads are turned in every layer."""
    if func is Tensor.transpose and len(args) == 3:
        data, one, other = args
        whole = isinstance(one, int) and isinstance(other, int) and data.ndim > 1
        return whole and one % data.ndim > 0 and other % data.ndim > 0
    return func in _COPIES and picked.is_computed(args[0])


def _classify(func: Any) -> int:
    """The numbers of _objects.c."""
    if func in _SIZES:
        return 1
    if func is F.linear or func is torch.addmm:
        return 7 if func is F.linear else 8
    if func is Tensor.transpose or func in _COPIES:
        return 5 if func is Tensor.transpose else 6
    if func is Tensor.register_hook or not _is_ordinary(func):
        return 0
    if func in SHAPES:
        return 4
    return 3 if func in MOVES else 2


if native.objects is not None:
    native.objects.tell({}, get_eval_frame_callback, peek_interpreter_stack, nn.Parameter)


def label(func: Any) -> str:
    return resolve_name(func) or getattr(func, "__qualname__", str(func))


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


def _is_transpose(out: Tensor, of: Tensor) -> bool:
    return of.ndim == 2 and out.shape == of.shape[::-1] and out.stride() == of.stride()[::-1]


def writes_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _is_scalar(func: Any, args: Any) -> bool:
    """torch.tensor(0.5): a number, not users' data."""
    return func in (torch.tensor, torch.as_tensor) and bool(args) and isinstance(args[0], (bool, int, float))


def _uses_batch_statistics(args: Any, kwargs: Any) -> bool:
    """F.batch_norm(input, running_mean, running_var, weight, bias, training, …); only eval mode is per user."""
    training = kwargs.get("training", args[5] if len(args) > 5 else True)
    return bool(training)
