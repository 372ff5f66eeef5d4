"""`clipping.users`: inside, one user exists.

The data of B users enter a level of torch's vmap (compat.py), every torch function passes the interception
(interception.py), and what cannot be batched is computed one user at a time (fallback.py). A loss that cannot be
computed in a `with` block, which runs once, can in `clipping.accumulate`, which has a function to call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpformer import compat
from dpformer.clipping.fallback import Fallback
from dpformer.clipping.functions import foreign
from dpformer.clipping.interception import Interception
from dpformer.clipping.model_state import PythonState, Registered, State
from dpformer.clipping.patches import of_contexts, replaced
from dpformer.clipping.rules.one_user import USER_RULES
from dpformer.clipping.trees import count_of, map_trees, tree_of
from dpformer.compat import VmapLevel, is_batchedtensor, maybe_current_level, physical
from dpformer.errors import CannotBatch, UnsupportedUse, first_line, out_of_memory
from dpformer.sampling.batch import Part

_SAVED = (
    "hooks on saved tensors (activation checkpointing other than torch.utils.checkpoint.checkpoint, offloading) are "
    "not supported: switch them off and make the micro-batches smaller instead"
)
_FORM = (
    "in a `with` block it cannot be computed one user at a time unless it is inside a module: use "
    "`clipping.accumulate(loss_of, data, clip, part)`, which can"
)


class _Lock:
    """Of a model, in all its engines."""

    def __init__(self) -> None:
        self.of_thread = threading.RLock()


_locks: weakref.WeakValueDictionary[int, _Lock] = weakref.WeakValueDictionary()  # by identity of the model


class OneUserExists:
    """The contexts of an engine, and whose losses they gave.

    Args:
        model: the model.
        walk: gives its parameters and buffers.
        allowed: whether one user may be computed at a time.
    """

    def __init__(self, model: nn.Module, walk: Callable[[], Registered], allowed: bool) -> None:
        self.model, self._walk = model, walk
        self.gate = Interception(USER_RULES)
        self._found = walk()
        self.gate.survey(self._found)
        self.gate.remember_constants(model)
        self.gate.remember_lists(model)
        self.fallback = Fallback(self.gate, model, allowed)
        self._parts: dict[int, tuple[Part | None, int]] = {}  # by mark: the users, and how many
        self._lock = _locks.setdefault(id(model), _Lock())

    def declare(self, *things: Tensor | nn.Module) -> None:
        """Tensors that are the same for every user."""
        for thing in things:
            tensors = [thing] if isinstance(thing, Tensor) else [*thing.parameters(), *thing.buffers()]
            for t in tensors:
                if t.requires_grad:
                    raise ValueError(
                        f"a tensor of shape {tuple(t.shape)} that is the same for all users must not require a "
                        f"gradient: freeze it with requires_grad_(False), or register it in the model"
                    )
                self.gate.constants[id(t)] = (t, t._version)

    @contextmanager
    def of(self, data: Any, part: Part | None) -> Iterator[Any]:
        """One user's data; inside, only that user exists."""
        data, one_of = tree_of(data)
        users = count_of(data)
        if part is not None and len(part) != users:
            raise ValueError(f"the part has {len(part)} users, but the data have {users}: give the data of its users")
        if maybe_current_level() is not None:
            raise UnsupportedUse("`clipping.users` is used inside a transform of torch.func or inside itself")
        with self._watched():
            level = VmapLevel(users)
            try:
                self.gate.open(level)
                self._parts[self.gate.mark] = part, users
                with compat.unseen():
                    mine = map_trees(self._enter, data)
                with self.fallback.watching(), self.gate:
                    yield one_of(mine)
                self.gate.raise_refusal()
                if self.gate.failed is not None:
                    raise CannotBatch(f"the loss goes on after an error ({first_line(self.gate.failed)})")
            except Exception as error:
                self._explain(error)
                raise
            finally:
                self.gate.close()
                level.leave()

    def _enter(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        assert self.gate.level is not None
        return self.gate.mine(self.gate.level.wrap(leaf.unsqueeze(1)))

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """Inside, no other thread may use an engine of this model, and no mode of others is active."""
        if seeing := foreign(compat.function_modes()):
            raise UnsupportedUse(
                f"{seeing} is active, which is called in the place of torch's functions, out of the engine's sight: "
                f"leave it before `clipping.users`"
            )
        if not self._lock.of_thread.acquire(blocking=False):
            raise UnsupportedUse(
                "another thread is using an engine of this model: give each thread a copy of the model and an engine "
                "of its own, or let one thread compute all parts"
            )
        try:
            yield
        finally:
            self._lock.of_thread.release()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Inside, the model must not change, and nothing may compute it again later."""
        with self.of_this_thread():
            yield from self._watching()

    def _watching(self) -> Iterator[None]:
        found = self._walk()
        if found is not self._found:
            refuse_distributed(self.model)
            self._found = found
        self.gate.survey(found)
        before, state = len(self.gate.calls), State(found)
        try:
            with torch.autograd.graph.disable_saved_tensors_hooks(_SAVED), replaced(of_contexts(self.gate)):
                yield
            state.compare(self._walk(), self.gate.is_public)
        except BaseException:
            del self.gate.calls[before:]
            raise

    @staticmethod
    def _explain(error: Exception) -> None:
        """Errors of torch that say that something cannot be batched become a sentence."""
        if isinstance(error, CannotBatch):
            raise CannotBatch(f"{error}; {_FORM}") from error
        if isinstance(error, RuntimeError) and _SAVED in str(error):
            raise UnsupportedUse(_SAVED) from error
        if isinstance(error, UnsupportedUse) or getattr(error, "_phantom_alone", False):
            return
        if isinstance(error, (RuntimeError, NotImplementedError)) and _is_of_vmap(error):
            raise CannotBatch(
                f"torch cannot compute this for all users together ({first_line(error)}); {_FORM}"
            ) from error

    # -- losses --------------------------------------------------------------------------------------------------------

    def losses(self, losses: Tensor) -> tuple[Tensor, Part | None]:
        """(B,) losses of all users that were computed in a context, and the users."""
        mark = getattr(losses, "_phantom_user", 0)
        if mark not in self._parts:
            raise UnsupportedUse(
                "the loss was not computed inside `with clipping.users(...)` of this engine, or `backward` was called "
                "for it before"
            )
        if losses.numel() != 1:
            raise ValueError(
                f"one user's loss must be one number, got shape {tuple(losses.shape)}: take the sum or the mean over "
                f"that user's own positions"
            )
        known, users = self._parts.pop(mark)
        for earlier in [m for m in self._parts if m < mark]:
            del self._parts[earlier]
        with compat.unseen():  # its class may have functions of its own
            whole = physical(losses).reshape(users) if is_batchedtensor(losses) else losses.reshape(1).expand(users)
        return whole.as_subclass(Tensor), known

    # -- one user at a time --------------------------------------------------------------------------------------------

    def why_not_together(self, error: Exception) -> str | None:
        """Why a loss that has raised is to be computed one user at a time; None if it is refused, or the error is its
        own."""
        if not self.fallback.allowed or out_of_memory(error):
            return None
        if isinstance(error, CannotBatch):
            return str(error).removesuffix(f"; {_FORM}")
        if isinstance(error, UnsupportedUse) or not isinstance(error, (RuntimeError, NotImplementedError, TypeError)):
            return None
        return first_line(error)

    def one_by_one(self, loss_of: Callable[[Any], Tensor], data: Any) -> Iterator[tuple[list[Tensor], Tensor]]:
        """The gradients by all trainable parameters, and the loss, of each user."""
        data, one_of = tree_of(data)
        with self._watched():
            state = PythonState(self.model)
            for user in range(count_of(data)):
                yield self._alone(user, lambda mine: loss_of(one_of(mine)), data, list(self.gate.trainable), state)

    def _alone(
        self,
        user: int,
        loss_of: Callable[[Any], Tensor],
        data: Any,
        parameters: list[Tensor],
        state: PythonState,
    ) -> tuple[list[Tensor], Tensor]:
        """The gradients and the loss of one user, by plain autograd."""
        gate = self.gate
        gate.open(None)
        try:
            with self.fallback.alone(user, state):
                with compat.unseen():
                    mine = map_trees(
                        lambda leaf: gate.mine(leaf[user : user + 1].clone()) if isinstance(leaf, Tensor) else leaf,
                        data,
                    )
                with self.fallback.watching(), gate:
                    loss = loss_of(mine)
                gate.raise_refusal()
        finally:
            gate.close()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"one user's loss must be one number, got {got}")
        if not (getattr(loss, "_phantom_user", 0) or gate.is_public(loss)):
            raise UnsupportedUse(
                "the loss was computed where the engine cannot see it (torch._C.DisableTorchFunction), or not from the "
                "user's data: leave that out"
            )
        loss = loss.as_subclass(Tensor)  # its class may have functions of its own
        return gradients_of(loss.reshape(()), parameters), loss.detach()


def gradients_of(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """By plain autograd; zero where the loss does not depend on a parameter."""
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    dense = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
    return [g.to_dense() if g.layout != torch.strided else g for g in dense]


_SIGNS = ("vmap", "functorch", "atching rule", "transformed by", "storage", "stack expects each tensor")


def _is_of_vmap(error: Exception) -> bool:
    return any(sign in str(error) for sign in _SIGNS)


def refuse_distributed(model: nn.Module) -> None:
    """Wrappers that move parameters or gradients between processes in the backward pass, which is not theirs here."""
    fix = "use DistributedClipping and DistributedOptimizer of dpformer.integrations.distributed"
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise UnsupportedUse(f"DistributedDataParallel would never see the clipped sums, so never add them up; {fix}")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and getattr(parameter, "placements", None) is not None:  # a DTensor
            raise UnsupportedUse(
                f"parameter '{name}' is sharded over processes (fully_shard), but a user's norm is over "
                f"all of it; {fix}"
            )
