"""Every torch function that is called on one user's data passes here.

Inside `clipping.users` one user exists (compat.py): torch batches what is done with its tensors, so no function can
bring two users together. What is left to decide is where a tensor comes from:

- a *user's* tensor carries the mark of the context that it was made in;
- a *public* tensor is the same for every user: parameters, buffers, constants of the model, what is made inside from
  sizes and numbers, and whatever is computed from public tensors alone;
- any other tensor came in past `clipping.users`: through a closure, a global variable, a Python list. It may hold other
  users' data, and is refused where it meets a user's tensor or a parameter. So is a user's tensor of another context,
  which a model may have kept in an attribute.

Where a parameter meets a user's tensor a gradient of that user arises: rules/ knows the gradients of the common
functions (rules/one_user.py calls them). In any other function each user gets a copy of the parameter, a view, whose
gradient is that user's: exact for every function, but written out for each user.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from itertools import count
from typing import Any, NoReturn

import torch
from torch import Tensor

from dpformer import compat
from dpformer.clipping.functions import (
    BACKWARD,
    BATCH_NORMS,
    COMPILED,
    FROM_PYTHON,
    HOOKS,
    LEND,
    OF_TORCH,
    OF_WRAPPERS,
    ON_ALL_USERS,
    READS,
    REQUIRES_GRAD,
    SIZES,
    SPARSE,
    TELLS,
    TRANSPOSES,
    foreign,
    is_transpose,
    looks_whether_differentiable,
    overrides_functions,
    overrides_operators,
    uses_batch_statistics,
    without_overrides,
    writes_in_place,
)  # fmt: skip
from dpformer.clipping.recording import FREEZE_BATCH_NORM, Recorder, label, paired, storage_of, version_of
from dpformer.clipping.trees import map_tensors, tensors_of
from dpformer.clipping.uses import Dense
from dpformer.compat import Outside, VmapLevel, physical
from dpformer.errors import CannotBatch, UnsupportedUse

_marks = count(1)


class Interception(Recorder):
    """Runs each torch function, and records the calls in which parameters meet users' data."""

    def __init__(self, user_rules: dict[Any, Any]) -> None:
        super().__init__()
        self.user_rules = user_rules
        self.level: VmapLevel | None = None
        self.mark = 0  # of the users' tensors of this context, or of one user where one is computed alone
        self.together = 0  # the mark of this context
        self.alone: int | None = None  # the user that is computed alone
        self.inside_function = False  # in the forward of an autograd.Function
        self.failed: Exception | None = None  # the last error inside the level: the model must not go on after it
        self.thread = 0
        self.copies: dict[int, tuple[Tensor, Tensor]] = {}  # of a parameter: itself, (B, *shape)
        self.copies_alone: dict[int, tuple[Tensor, ...]] = {}  # the same, one for each user

    def open(self, level: VmapLevel | None) -> None:
        """A context begins; without a level, one user is computed alone, by plain autograd."""
        self.level, self.mark = level, next(_marks)
        self.together, self.thread = self.mark, threading.get_ident()
        self.context += 1
        self.failed = None
        self.written.clear()
        self.rewritten.clear()

    def close(self) -> None:
        self.level, self.mark, self.together, self.alone = None, 0, 0, None
        for t in self.written.values():  # no longer public, wherever it is kept
            t._phantom_public = False  # type: ignore[attr-defined]
        if self.written:
            kept = self.constants.items()
            self.constants = {at: of for at, of in kept if storage_of(of[0]) not in self.written}
        self.written.clear()
        self.rewritten.clear()
        self.forget_copies()

    def forget_copies(self) -> None:
        self.copies.clear()
        self.copies_alone.clear()

    # -- whose a tensor is ---------------------------------------------------------------------------------------------

    def is_users(self, t: Tensor) -> bool:
        """Whether it is of the user whose data is computed; one of other users is refused."""
        mark = getattr(t, "_phantom_user", 0)
        if mark == self.mark and mark:
            return True
        if mark:
            self._refuse_stale(mark)
        if compat.is_functorch_wrapped_tensor(t) and not self.is_public(t):
            raise UnsupportedUse(
                "a tensor was computed where the engine cannot see it (torch._C.DisableTorchFunction, a function that "
                "was compiled, a transform of torch.func that was begun outside): leave that out"
            )
        return False

    def _refuse_stale(self, mark: int) -> NoReturn:
        if self.alone is not None and mark == self.together:
            raise CannotBatch("a tensor of all users is used where one user is computed alone")
        raise UnsupportedUse(
            "a tensor of users of another batch, or of another user, was kept in an attribute, a buffer or a list, and "
            "is used again: keep nothing of users between calls of the model"
        )

    def mine(self, t: Tensor) -> Tensor:
        """Marks a tensor as the user's."""
        t._phantom_user = self.mark  # type: ignore[attr-defined]
        return t

    def _marked_as(self, out: Any, of_user: bool, public: bool) -> Any:
        for t in (out,) if isinstance(out, Tensor) else tensors_of(out):
            if id(t) in self.own:
                continue
            if of_user or (self.alone is None and compat.is_batchedtensor(t) and self._in_level()):  # random numbers
                t._phantom_user = self.mark  # type: ignore[attr-defined]
                t._phantom_public = False  # type: ignore[attr-defined]
            elif public:
                t._phantom_public = version_of(t)  # type: ignore[attr-defined]
        return out

    # -- the functions -------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SIZES or threading.get_ident() != self.thread:
            return func(*args, **kwargs)
        try:
            if any(map(overrides_functions, types)) and compat.classes_are_asked():
                return self._overridden(func, types, args, kwargs)
            return self._call(func, args, kwargs)
        except (RuntimeError, ValueError, IndexError) as error:  # a TypeError is the same for one user and for many
            if (self.level is not None and self.alone is None) or _is_refusal(error):
                self.failed = error
            raise

    def _overridden(self, func: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        """Code that a class has of its own for functions of torch, run in sight."""
        with self:
            for kind in kinds:
                if (out := kind.__torch_function__(func, kinds, args, kwargs)) is not NotImplemented:
                    return out
        raise TypeError(f"no class among {[kind.__name__ for kind in kinds]} implements {label(func)}")

    def raise_refusal(self) -> None:
        """A refusal that the model has caught is still one."""
        if self.failed is not None and _is_refusal(self.failed):
            raise self.failed

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if compat.get_eval_frame_callback() is not None:
            raise UnsupportedUse(COMPILED)
        managed: list[Tensor] = []
        of_user, stranger = False, None
        tensors, public = tensors_of(*args, *kwargs.values()), []
        for t in tensors:
            if self.is_users(t):
                of_user = True
            elif not self.is_public(t):
                if t.numel() or t.requires_grad:
                    stranger = t
            else:
                public.append(t)
                if t.requires_grad:
                    managed.append(t)
        if func is Tensor.untyped_storage and public and id(public[0]) not in self.own:
            self._was_written(func, public[0], False, True)  # what is written through it is not seen
        before = [version_of(t) for t in public]
        out = self._checked(func, args, kwargs, tensors, managed, of_user, stranger)
        for t, version in zip(public, before, strict=True):
            if version_of(t) != version:
                self._was_written(func, t, of_user, of_user or stranger is not None)
        return out

    def _checked(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        managed: list[Tensor],
        of_user: bool,
        stranger: Tensor | None,
    ) -> Any:
        if of_user:
            if func is Tensor.__repr__ and self.alone is None:  # torch would print those of all users
                return f"one user's tensor of shape {tuple(args[0].shape)}, {args[0].dtype}"
            self._refuse_special(func, args, kwargs)
            self._refuse_out_of_sight(func, tensors)
            self.hooked |= func in HOOKS
            if func is Tensor.register_hook:
                args = (args[0], self.guarded(args[1] if len(args) > 1 else kwargs["hook"]))
                kwargs = {}
            if self.alone is None and self._in_level():
                if func in REQUIRES_GRAD:  # nothing before it is trained, and gradients flow through it anyway
                    return args[0] if func is Tensor.requires_grad_ else None
                if func in OF_WRAPPERS:  # a wrapper is never differentiable
                    return func(compat.get_unwrapped(args[0]))
                if func is Tensor.__contains__ and isinstance(args[1], (bool, int, float)):
                    with self:  # as transformers looks for padding
                        return bool((args[0] == args[1]).any())
                if func is Tensor.__bool__:
                    return self._agreed(args[0])
        if stranger is not None and (of_user or managed or func in TELLS) and not self._is_read(func):
            self._refuse_stranger(func, stranger)
        if func in BATCH_NORMS and uses_batch_statistics(args, kwargs):
            raise UnsupportedUse(f"{label(func)} cannot be used here: {FREEZE_BATCH_NORM}")
        if writes_in_place(func) or getattr(func, "__name__", "") == "__set__" or kwargs.get("out") is not None:
            self._writes(func, args, kwargs, of_user, stranger is not None)
        if of_user and func in ON_ALL_USERS and self.alone is None:
            return self._on_all_users(func, args, kwargs)
        if managed and not self._is_read(func):
            if of_user:
                return self._marked_as(self._meet(func, args, kwargs, managed), True, False)
            return self._express(func, args, kwargs)
        if of_user and self.alone is None:
            if looks_whether_differentiable(func):
                return self._opened(func, args, kwargs)
            rule = self.user_rules.get(func)
            if rule is not None and rule.without_parameters and self._in_level():
                out = rule(self, func, args, kwargs)
                if out is not NotImplemented:
                    return self._marked_as(out, True, False)
        public = not of_user and stranger is None and func != compat.GRAD and not self._is_from_python(func, args)
        return self._marked_as(func(*args, **kwargs), of_user, public)

    def _on_all_users(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One of our own functions: one user's (1, …) are (B, …) to it."""
        if not self._in_level():
            raise CannotBatch(f"{label(func)} is used inside a torch.func transform")
        level, batched = self.level, compat.is_batchedtensor
        assert level is not None
        with Outside():

            def enter(t: Tensor) -> Tensor:
                if self.is_managed(t):
                    raise self.refusal(t, func, "detach it")
                return physical(t).flatten(0, 1) if batched(t) else t

            out = func(*map_tensors(enter, args), **map_tensors(enter, kwargs))
            return map_tensors(lambda t: self.mine(level.wrap(t.unflatten(0, (level.users, -1)))), out)

    def _in_level(self) -> bool:
        return self.level is not None and self.level.is_current()

    def _is_from_python(self, func: Any, args: Any) -> bool:
        """A number that the model computes with is not asked where it is from; lists and arrays are."""
        if func in FROM_PYTHON:
            source = args[0] if args else None
        elif func in LEND:
            source = args[1] if len(args) > 1 else None
        elif func in SPARSE:
            return not all(isinstance(a, Tensor) for a in args[: 2 if func is torch.sparse_coo_tensor else 3])
        else:
            return False
        if isinstance(source, (bool, int, float, complex, Tensor)):
            return False
        return not (id(source) in self.lists and self.lists[id(source)][1] == repr(source))

    def _refuse_special(self, func: Any, args: Any, kwargs: Any) -> None:
        if func in BACKWARD:
            raise UnsupportedUse(
                "backward() is called inside the forward pass: the engine runs the one backward pass itself"
            )
        if self.alone is None and func in HOOKS:
            raise CannotBatch("a hook is put on a user's tensor")
        if self._in_level() and func is torch.autograd.grad:
            raise CannotBatch("torch.autograd.grad is called on a user's tensor")

    def _refuse_out_of_sight(self, func: Any, tensors: list[Tensor]) -> None:
        """Code of others that runs below this interception would not be seen, or would see all users."""
        known = func in self.user_rules or func in ON_ALL_USERS
        if isinstance(func, types.FunctionType) and not known and func.__module__.split(".")[0] != "torch":
            raise UnsupportedUse(
                f"{label(func)} is a function that can be overridden (torch.overrides) and is not torch's own, so "
                f"what it does is not seen: call what it is made of"
            )
        if self.alone is not None:
            return
        if compat.dispatch_modes() and foreign(compat.modes_below()):
            raise CannotBatch("a TorchDispatchMode is active, which would see all users together")
        if isinstance(func, (compat.OpOverload, compat.OpOverloadPacket)) and compat.namespace(func) not in OF_TORCH:
            raise CannotBatch(f"{label(func)} is an operator that is not torch's own")
        if kinds := [type(t).__name__ for t in tensors if overrides_operators(type(t))]:
            raise CannotBatch(f"{kinds[0]} has operators of its own (__torch_dispatch__), which would see all users")

    def guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook or a backward function of one user alone: in the backward pass it sees that user only."""
        mark, alone = self.mark, self.alone

        def see(*args: Any) -> Any:
            names = ("level", "mark", "together", "alone", "inside_function", "thread")
            before = {name: getattr(self, name) for name in names}
            self.level, self.mark, self.together, self.alone = None, mark, mark, alone
            self.inside_function, self.thread = True, threading.get_ident()
            try:
                with compat.unseen():
                    for t in tensors_of(*args):
                        if not self.is_public(t):
                            self.mine(t)
                with self:
                    out = hook(*args)
                self.refuse_strangers(getattr(hook, "__qualname__", "a hook"), out)
                return out
            finally:
                for name, value in before.items():
                    setattr(self, name, value)

        return see

    def refuse_strangers(self, name: str, out: Any) -> None:
        """Refuses results that are neither the user's nor public."""
        for t in tensors_of(out):
            if not self.is_users(t) and not self.is_public(t) and (t.numel() or t.requires_grad):
                self._refuse_stranger(name, t)

    def _refuse_stranger(self, func: Any, t: Tensor) -> NoReturn:
        name = func if isinstance(func, str) else label(func)
        if t.requires_grad:
            raise UnsupportedUse(
                f"{name} uses a differentiable tensor of shape {tuple(t.shape)} that is neither the model's nor "
                f"the user's: register it in the module given to PhantomClipping, or detach it"
            )
        raise UnsupportedUse(
            f"{name} uses a tensor of shape {tuple(t.shape)} that came in past `clipping.users`, so it may hold "
            f"other users' data: give users' data to `clipping.users`, and what is the same for all users to "
            f"`clipping.public(...)` or to a buffer of the model; build tensors from sizes and numbers, not from lists"
        )

    def _agreed(self, t: Tensor) -> bool:
        """The answer, if it is the same for every user: then each user alone goes the same way."""
        with Outside():
            found = physical(t).detach().flatten()
            if not self._answers(found):
                raise CannotBatch("an `if` goes one way for one user and the other way for another")
            return bool(found[0])

    @staticmethod
    def _answers(found: Tensor) -> bool:
        truth = found != 0
        return bool((truth == truth[0]).all())

    def _writes(self, func: Any, args: Any, kwargs: Any, of_user: bool, strange: bool) -> None:
        """A tensor that users' data is written into is the user's from then on, or of unknown origin."""
        for t in tensors_of(kwargs.get("out"), *args[:1]):
            if id(t) in self.own or ((of_user or strange) and self.is_public(t) and self._is_of_model(t)):
                if of_user or strange:
                    self._was_written(func, t, of_user, True)
                continue
            if not (of_user or strange) or not self.is_public(t):
                continue
            if of_user and self.alone is None:
                raise CannotBatch(f"{label(func)} writes a user's data into a tensor that is the same for all users")
            self._was_written(func, t, of_user, True)

    def _was_written(self, func: Any, t: Tensor, of_user: bool, strange: bool) -> None:
        """A public tensor has other numbers now: of public origin, or not."""
        if not strange:
            if id(t) not in self.own:
                self.rewritten[storage_of(t)] = version_of(t)
                for whole in (t, t._base):
                    if whole is not None and getattr(whole, "_phantom_public", False) is not False:
                        whole._phantom_public = version_of(whole)  # type: ignore[attr-defined]
            return
        if id(t) in self.own or self._is_of_model(t):
            raise UnsupportedUse(
                f"{label(func)} writes users' data into a parameter or buffer of the model, which would stay "
                f"there outside the guarantee; keep no running statistics of users"
            )
        self.written[storage_of(t)] = t
        for whole in (t, t._base):
            if whole is not None:
                self.constants.pop(id(whole), None)
                whole._phantom_public = False  # type: ignore[attr-defined]
                if of_user:
                    self.mine(whole)

    def _is_of_model(self, t: Tensor) -> bool:
        """Whether it shares the memory of a parameter or buffer (`.data`)."""
        return t.numel() > 0 and storage_of(t) in {storage_of(mine) for mine in self.found.all().values()}

    def _meet(self, func: Any, args: Any, kwargs: Any, managed: list[Tensor]) -> Any:
        """A parameter, or an expression of parameters, meets a user's tensor."""
        if not torch.is_grad_enabled():
            if self.inside_function:  # it is differentiated by its own backward, by what it was given
                return func(*args, **kwargs)
            raise UnsupportedUse(
                f"{self.name(managed[0])} is used by {label(func)} under no_grad, so its gradient would be lost; "
                f"leave no_grad, freeze the parameter, or use parameter.detach() if that is meant"
            )
        if writes_in_place(func) and any(args[0] is t for t in managed):
            raise self.refusal(managed[0], func, "build a new tensor instead of writing into one")
        if self.alone is None:
            if not self._in_level():
                raise CannotBatch("a parameter is used inside another torch.func transform")
            rule = self.user_rules.get(func)
            if rule is not None:
                out = rule(self, func, args, kwargs)
                if out is not NotImplemented:
                    return out
            opened = without_overrides(func)
            if opened is not None:  # what it is made of
                with self:
                    return opened(*args, **kwargs)
        swap = {id(t): self.copy(func, t) for t in managed}

        def change(t: Tensor) -> Tensor:
            return swap.get(id(t), t)

        args, kwargs = map_tensors(change, args), map_tensors(change, kwargs)
        rule = self.user_rules.get(func)
        if self.alone is None and rule is not None and rule.without_parameters:
            out = rule(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)

    def copy(self, func: Any, p: Tensor) -> Tensor:
        """The user's own copy of a parameter, a view; its gradient is the user's gradient."""
        if self.level is None:  # the whole loss is computed one user at a time, by plain autograd
            return p
        if id(p) not in self.copies:
            with Outside():
                self.copies[id(p)] = (p, self._spread(func, p))
        spread = self.copies[id(p)][1]
        if self.alone is None:
            return self.mine(self.level.wrap(spread))
        if id(p) not in self.copies_alone:
            with Outside():
                self.copies_alone[id(p)] = spread.unbind(0)
        return self.mine(self.copies_alone[id(p)][self.alone])

    def _spread(self, func: Any, p: Tensor) -> Tensor:
        """(B, *shape), recorded."""
        assert self.level is not None
        spread = p.detach().unsqueeze(0).expand(self.level.users, *p.shape)

        def build(grad: Tensor, rows: Any) -> list[tuple[Tensor, Any]]:
            return [(p, Dense(grad))]

        def copies(q: Tensor) -> Tensor:
            return q.expand(spread.shape)

        return self.record(func, [p], paired(copies), build, spread, rows=spread, inside=True)

    def _opened(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a function of torch is made of, in sight."""
        if (opened := without_overrides(func)) is None:
            raise CannotBatch(f"{label(func)} looks whether its arguments are differentiable")
        with self:
            return opened(*args, **kwargs)

    def _express(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An expression of parameters: plain autograd, and the result is public again."""
        if (writes_in_place(func) and id(args[0]) in self.own) or kwargs.get("out") is not None:
            raise self.refusal(args[0], func, "build a new tensor instead of writing into one")
        out = self._marked_as(func(*args, **kwargs), False, True)
        if func in TRANSPOSES and id(args[0]) in self.names and is_transpose(out, args[0]):
            out._phantom_transpose_of = args[0]
        return out

    def _is_read(self, func: Any) -> bool:
        if getattr(func, "__name__", "") == "__get__":  # an attribute; the transposes are expressions
            return func not in TRANSPOSES
        return func in READS


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, UnsupportedUse) and not isinstance(error, CannotBatch)
