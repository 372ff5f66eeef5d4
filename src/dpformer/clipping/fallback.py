"""One user at a time: what torch cannot compute for all users together is computed for each of them alone.

Mixtures of experts that look for their rows, `.item()`, `if` on data, autograd functions without a batching rule: the
innermost module (or autograd function) that raises is run again, user after user, on that user's tensors and on that
user's copies of the parameters, and its results are put together. Norms and sums are the same; it takes as long as
batches of one, and memory for a copy of the module's parameters for each user.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dpformer import compat
from dpformer.clipping.interception import Interception, _marks
from dpformer.clipping.isolation import EqualChances
from dpformer.clipping.model_state import PythonState
from dpformer.clipping.patches import replaced
from dpformer.clipping.recording import storage_of
from dpformer.clipping.trees import map_tensors, map_trees, tensors_of
from dpformer.compat import Outside, physical
from dpformer.errors import CannotBatch, UnsupportedUse, first_line

_GUARDED = "_phantom_guarded"  # of an autograd function that was guarded
_SEVERAL = "its results have another form for each user"


class Fallback:
    """Runs modules and autograd functions one user at a time where they cannot be batched.

    Args:
        gate: the interception of the model.
        model: the model.
        allowed: if not, `CannotBatch` is raised instead.
    """

    def __init__(self, gate: Interception, model: nn.Module, allowed: bool) -> None:
        self.gate, self.model, self.allowed = gate, model, allowed
        self.counts: Counter[str] = Counter()  # how often, by name
        self._alone: set[int] = set()  # identities of modules that cannot be batched
        self._is_quiet = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, modules and autograd functions that cannot be batched are computed one user at a time."""

        def module(call: Callable[..., Any], this: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return self._module(partial(call, this), this, args, kwargs)

        def function(apply: Callable[..., Any], cls: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self._function(partial(apply, cls), cls, args, kwargs)

        def within(call: Callable[..., Any], cls: Any, /, *args: Any, **kwargs: Any) -> Any:
            """`apply`, taken before the context began, leads here alone."""
            again = partial(call, cls)
            if _GUARDED in vars(cls) or not issubclass(cls, torch.autograd.Function):
                return again(*args, **kwargs)
            return self._function(again, cls, args, kwargs)

        scripts = (compat.ScriptFunction, compat.ScriptMethod)
        with replaced(
            [
                (nn.Module, "__call__", module),
                (torch.autograd.Function, "apply", function),
                *((home, name, within) for home, name in compat.APPLIES),
                *((kind, "__call__", self._of_script(kind)) for kind in scripts),
            ]
        ):
            yield

    def _of_script(self, kind: type) -> Callable[..., Any]:
        """In the place of kind.__call__: code of torch.jit.script is out of sight."""
        holds_parameters = kind is compat.ScriptMethod

        def script(call: Callable[..., Any], this: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.gate.mark and _has_constants(this):
                raise UnsupportedUse(
                    f"{this.name} was compiled by torch.jit with a tensor inside, which may hold other users' data: "
                    f"make that tensor an argument"
                )
            return self._opaque(partial(call, this), str(this.name), args, kwargs, holds_parameters)

        return script

    def _opaque(self, call: Callable[..., Any], name: str, args: Any, kwargs: Any, holds_parameters: bool) -> Any:
        gate = self.gate
        if threading.get_ident() != gate.thread or not gate.mark or (gate.alone is None and not gate._in_level()):
            return call(*args, **kwargs)
        tensors = tensors_of(*args, *kwargs.values())
        of_user, args, kwargs = self._given(name, args, kwargs, tensors)
        if of_user and gate.alone is None:
            again = partial(self._opaque, call, name, holds_parameters=holds_parameters)
            why = "it is compiled by torch.jit.script"
            return self.one_at_a_time(name, why, lambda *a, **k: again(args=a, kwargs=k), args, kwargs)
        if holds_parameters and gate.level is not None:
            raise CannotBatch(f"{name} is a module compiled by torch.jit.script")
        return gate._marked_as(call(*args, **kwargs), of_user, bool(tensors) and all(map(gate.is_public, tensors)))

    def _given(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[bool, Any, Any]:
        """Whether there are users' tensors; the arguments, with copies of parameters where one is alone."""
        gate = self.gate
        whose = [gate.is_users(t) for t in tensors]
        of_user = any(whose)
        managed = [t for t in tensors if gate.is_managed(t)]
        for t in tensors:
            if (of_user or managed) and not gate.is_users(t) and not gate.is_public(t) and t.numel():
                gate._refuse_stranger(name, t)
        if of_user and gate.alone is not None:
            swap = {id(t): gate.copy(name, t) for t in managed}
            args, kwargs = (map_tensors(lambda t: swap.get(id(t), t), given) for given in (args, kwargs))
        return of_user, args, kwargs

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside, nothing is said, counted or remembered: for checks."""
        known, self._is_quiet = set(self._alone), True
        try:
            yield
        finally:
            self._alone, self._is_quiet = known, False

    def note(self, name: str, why: str, whole: bool = False) -> None:
        """Says it once."""
        if self._is_quiet:
            return
        if not self.counts[name]:
            cost = "as slow as batches of one" if whole else (
                "as slow as batches of one, with a copy of its parameters for each user"
            )  # fmt: skip
            warnings.warn(f"{name} is computed one user at a time, {cost}: {why}", stacklevel=3)
        self.counts[name] += 1

    def _is_batching(self) -> bool:
        gate = self.gate
        return threading.get_ident() == gate.thread and gate.alone is None and gate._in_level()

    def _module(self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        gate = self.gate
        if threading.get_ident() != gate.thread or not gate.mark:
            return call(*args, **kwargs)
        if module._backward_hooks or module._backward_pre_hooks or compat.has_global_backward_hooks():
            raise UnsupportedUse(
                f"{type(module).__name__} has backward hooks, which would see the gradients of all users together: "
                f"remove them"
            )
        if not self._is_batching():
            return call(*args, **kwargs)
        before, failed, why = len(gate.calls), gate.failed, "it could not be batched before"
        if id(module) not in self._alone:
            try:
                out = call(*args, **kwargs)
                if gate.failed is failed:
                    return out
                gate.raise_refusal()
                why = f"it goes on after an error: {first_line(gate.failed)}"
            except CannotBatch as error:
                why = str(error)
            except UnsupportedUse:
                raise
            except Exception as error:
                if getattr(error, "_phantom_alone", False):
                    raise
                why = first_line(error)
            del gate.calls[before:]
            gate.forget_copies()
        name = type(module).__name__
        out = self.one_at_a_time(name, why, call, args, kwargs)
        gate.raise_refusal()
        self._alone.add(id(module))
        gate.failed = failed
        return out

    def _function(self, apply: partial[Any], cls: Any, args: Any, kwargs: Any) -> Any:
        gate = self.gate
        if threading.get_ident() != gate.thread or not gate.mark or (gate.alone is None and not gate._in_level()):
            return apply(*args, **kwargs)
        tensors = tensors_of(*args, *kwargs.values())
        of_user, args, kwargs = self._given(cls.__name__, args, kwargs, tensors)
        if not of_user:
            return gate._marked_as(apply(*args, **kwargs), False, bool(tensors) and all(map(gate.is_public, tensors)))
        if gate.alone is None:
            why = "an autograd.Function, whose code could bring users together"
            return self.one_at_a_time(cls.__name__, why, cls.apply, args, kwargs)
        if gate not in compat.function_modes():  # inside a function of torch, or one of our own
            return apply(*args, **kwargs)
        before, gate.inside_function = gate.inside_function, True
        try:
            out = apply.func(_guarded(cls, gate), *args, **kwargs)
            with compat.unseen():
                given = {storage_of(t) for t in tensors_of(*args) if gate.is_users(t) or gate.is_public(t)}
                for t in tensors_of(out):
                    if storage_of(t) in given:  # an argument, as it came
                        gate.mine(t)
                gate.refuse_strangers(cls.__name__, out)
            return gate._marked_as(out, True, False)
        finally:
            gate.inside_function = before

    # -- user after user -----------------------------------------------------------------------------------------------

    def one_at_a_time(self, name: str, why: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `run` gives for each user alone, put together."""
        try:
            return self._one_at_a_time(name, why, run, args, kwargs)
        except Exception as error:
            self.gate.failed = error
            raise

    def _one_at_a_time(self, name: str, why: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        gate = self.gate
        if not self.allowed:
            raise CannotBatch(f"{name} cannot be computed for all users together: {why}")
        if not gate._in_level():
            raise CannotBatch(f"{name} cannot be computed for all users together inside a torch.func transform: {why}")
        assert gate.level is not None
        slices: dict[int, tuple[Tensor, ...]] = {}
        results, marks = [], []
        begin = [mode.one_after_the_other() for mode in compat.modes_below() if isinstance(mode, EqualChances)]
        with Outside():
            state = PythonState(self.model)
            for user in range(gate.level.users):
                given: list[Tensor] = []
                for same in begin:
                    same()
                with self.alone(user, state):
                    own_args, own_kwargs = (
                        map_tensors(partial(self._own, user, slices, given), tree) for tree in (args, kwargs)
                    )
                    form = _form(own_args, own_kwargs)
                    results.append(self._run(name, run, own_args, own_kwargs))
                    if _form(own_args, own_kwargs) != form:
                        raise CannotBatch(f"{name} writes into a list or a dictionary that it was given")
                    marks.append(gate.mark)
                with compat.unseen():
                    if any(t._version for t in given):
                        raise CannotBatch(f"{name} writes into what it was given")
            try:
                with compat.unseen():
                    out = map_trees(partial(self._join, marks), *results)
            except ValueError:
                raise CannotBatch(f"{name}: {_SEVERAL}") from None
        self.note(name, why)
        return out

    def _own(self, user: int, slices: dict[int, tuple[Tensor, ...]], given: list[Tensor], t: Tensor) -> Tensor:
        """The user's part of a tensor of all users."""
        if getattr(t, "_phantom_user", 0) != self.gate.together:
            return t
        with compat.unseen():
            if id(t) not in slices:
                slices[id(t)] = physical(t).unbind(0)
            part = slices[id(t)][user]
            part = part.clone() if part.requires_grad else part.detach().clone()
        given.append(self.gate.mine(part))
        part._phantom_part_of = t  # type: ignore[attr-defined]
        return part

    @staticmethod
    def _run(name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except UnsupportedUse:
            raise
        except Exception as error:
            error._phantom_alone = True  # type: ignore[attr-defined]  # the model's own: no other module can help
            raise

    @contextmanager
    def alone(self, user: int, state: PythonState) -> Iterator[None]:
        """Inside, the user is the only one, and leaves the state of the model as it was."""
        gate, mark = self.gate, self.gate.mark
        gate.alone, gate.mark = user, next(_marks)
        try:
            yield
            state.compare(gate.is_public)
        finally:
            gate.alone, gate.mark = None, mark

    def _join(self, marks: list[int], *values: Any) -> Any:
        gate, first = self.gate, values[0]
        assert gate.level is not None
        if not isinstance(first, Tensor):
            if all(value is first or (_is_plain(value) and value == first) for value in values):
                return first
            raise CannotBatch("it returns a Python value that differs between users")
        if not all(isinstance(value, Tensor) for value in values):
            raise CannotBatch(_SEVERAL)
        whole = getattr(first, "_phantom_part_of", None)  # an argument, as it came
        if whole is not None and all(getattr(value, "_phantom_part_of", None) is whole for value in values):
            return whole
        if all(value is first for value in values) and gate.is_public(first):
            return first
        for value, mark in zip(values, marks, strict=True):
            if (of := getattr(value, "_phantom_user", 0)) not in (0, mark, gate.together):
                gate._refuse_stale(of)
            if not of and not gate.is_public(value) and (value.numel() or value.requires_grad):
                gate._refuse_stranger("a module that is computed one user at a time", value)
        if any(value.shape != first.shape or value.dtype != first.dtype for value in values):
            raise CannotBatch("its results have another shape for each user")
        if any(compat.is_batchedtensor(value) for value in values):
            raise CannotBatch("a tensor of all users is used where one user is computed alone")
        return gate.mine(gate.level.wrap(torch.stack(values)))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size))


def _has_constants(compiled: Any) -> bool:
    nodes = compiled.graph.findAllNodes("prim::Constant")
    values = [n.t("value") for n in nodes if n.hasAttribute("value") and n.kindOf("value") == "t"]
    return any(value.ndim for value in values)


class _Context:
    """The ctx of an autograd function in its backward pass; what it has saved is the user's."""

    def __init__(self, ctx: Any, gate: Interception) -> None:
        vars(self).update(_ctx=ctx, _gate=gate)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ctx, name)
        if name in ("saved_tensors", "saved_variables"):
            with compat.unseen():
                for t in tensors_of(value):
                    if not self._gate.is_public(t):
                        self._gate.mine(t)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)


def _guarded(cls: Any, gate: Interception) -> Any:
    """The same autograd function; its backward pass sees nothing but the user it is applied for."""
    function = torch.autograd.Function
    has_setup = cls.setup_context is not function.setup_context
    begin = "setup_context" if has_setup else "forward"
    end = "vjp" if cls.vjp is not function.vjp else "backward"
    first, last = getattr(cls, begin), gate.guarded(getattr(cls, end))

    def beginning(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        out = first(ctx, *args, **kwargs)
        with compat.unseen():
            gate.refuse_strangers(cls.__name__, getattr(ctx, "to_save", ()))
        return out

    def ending(ctx: Any, *grads: Any) -> Any:
        return last(_Context(ctx, gate), *grads)

    own = {begin: staticmethod(beginning), end: staticmethod(ending), _GUARDED: True}
    return type(cls)(cls.__name__, (cls,), own)


def _form(*trees: Any) -> list[Any]:
    """What containers hold, by identity."""
    leaves: list[Any] = []
    for tree in trees:
        if isinstance(tree, (tuple, list)):
            leaves += ["(", *_form(*tree), ")"]
        elif isinstance(tree, dict):
            leaves += ["{", *tree, *_form(*tree.values()), "}"]
        else:
            leaves.append(id(tree))
    return leaves
