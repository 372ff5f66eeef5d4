"""`clipping.users`: inside, one user exists.

The data of B users enter a level of torch's vmap (vmap_level.py), every torch function passes the interception
(interception.py), and what cannot be batched is computed one user at a time (fallback.py). A loss that cannot be
computed in a `with` block, which runs once, can in `clipping.accumulate`, which has a function to call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.clipping.bounded import Addition, add_bounded
from dpformer.clipping.checkpointing import passed_over
from dpformer.clipping.clip_functions import ClipFunction
from dpformer.clipping.errors import CannotBatch, UnsupportedUse
from dpformer.clipping.fallback import Fallback
from dpformer.clipping.interception import Interception
from dpformer.clipping.nested import marks_are_kept
from dpformer.clipping.recorder import version_of
from dpformer.clipping.registered import Registered
from dpformer.clipping.state import State
from dpformer.clipping.torch_names import is_batchedtensor, maybe_current_level
from dpformer.clipping.trees import map_trees, tensors_of
from dpformer.clipping.user_rules import USER_RULES
from dpformer.clipping.vmap_level import VmapLevel, physical
from dpformer.sampling.batch import Part

if TYPE_CHECKING:
    from dpformer.clipping.engine import PhantomClipping

_SAVED = (
    "hooks on saved tensors (activation checkpointing other than torch.utils.checkpoint.checkpoint, offloading) are "
    "not supported: switch them off and make the micro-batches smaller instead"
)
_FORM = (
    "in a `with` block it cannot be computed one user at a time unless it is inside a module: use "
    "`clipping.accumulate(loss_of, data, clip, part)`, which can"
)


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
                with torch._C.DisableTorchFunction():
                    mine = map_trees(self._enter, data)
                with self.fallback.watching(), self.gate:
                    yield one_of(mine)
                self.gate.raise_refusal()
                if self.gate.failed is not None:
                    raise CannotBatch(f"the loss goes on after an error ({_short(self.gate.failed)})")
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
    def _watched(self) -> Iterator[None]:
        """Inside, the model must not change, and nothing may compute it again later."""
        found = self._walk()
        if found is not self._found:
            refuse_distributed(self.model)
            self._found = found
        self.gate.survey(found)
        before, state = len(self.gate.calls), State(found)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(_SAVED))
                stack.enter_context(passed_over())
                stack.enter_context(marks_are_kept(self.gate))
                stack.enter_context(_masks_of_transformers())
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
            raise CannotBatch(f"torch cannot compute this for all users together ({_short(error)}); {_FORM}") from error

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
        whole = physical(losses).reshape(users) if is_batchedtensor(losses) else losses.reshape(1).expand(users)
        return whole, known

    # -- one user at a time --------------------------------------------------------------------------------------------

    def accumulate(
        self,
        clipping: PhantomClipping,
        loss_of: Callable[[Any], Tensor],
        data: Any,
        clip: ClipFunction,
        part: Part | None,
    ) -> Tensor:
        if not rows_of(data):
            clipping.losses = torch.zeros(0)
            return clipping.losses
        before = _versions(data)
        try:
            with clipping.users(data, part) as user:
                loss = loss_of(user)
        except CannotBatch as error:
            if not self.fallback.allowed:
                raise
            why = str(error).removesuffix(f"; {_FORM}")
        except UnsupportedUse:
            raise
        except Exception as error:
            if not self.fallback.allowed or not isinstance(error, (RuntimeError, NotImplementedError, TypeError)):
                raise
            why = _short(error)
        else:
            return clipping.backward(loss, clip)
        if _versions(data) != before:
            raise UnsupportedUse(
                f"the loss writes into the users' data, and cannot be computed for all users together ({why}): let it "
                f"work on a clone of them"
            )
        norms = self._one_at_a_time(clipping, loss_of, data, clip, part)
        self.fallback.note("the whole loss", why, whole=True)
        return norms

    def _one_at_a_time(
        self,
        clipping: PhantomClipping,
        loss_of: Callable[[Any], Tensor],
        data: Any,
        clip: ClipFunction,
        part: Part | None,
    ) -> Tensor:
        data, one_of = tree_of(data)
        users, device = count_of(data), next(self.model.parameters()).device
        with clipping._surroundings(), self._watched():
            parameters = list(self.gate.trainable)
            totals = [torch.zeros(p.shape, dtype=_wide(p), device=p.device) for p in parameters]
            norms, factors, losses = [], [], []
            for user in range(users):
                gradients, loss = self._alone(user, lambda mine: loss_of(one_of(mine)), data, parameters)
                norm = torch.stack([g.abs().double().square().sum().to(device) for g in gradients]).sum().sqrt()
                norms.append(norm)
                losses.append(loss.reshape(()))
                if not bool(torch.isfinite(norm)) or not bool(torch.isfinite(loss)):
                    clipping.skipped_users += 1
                    factors.append(torch.zeros((), dtype=norm.dtype, device=device))
                    continue
                (factor,), _ = clipping._factors(norm.isfinite(), norm[None], norm[None] * (1 + 1e-9), clip)
                factors.append(factor)
                for total, g in zip(totals, gradients, strict=True):
                    total += g.to(total.dtype) * factor.to(total.device)
        dtype = torch.promote_types(loss.dtype, torch.float32)
        additions = [
            Addition(p, t, torch.promote_types(p.dtype, torch.float32)) for p, t in zip(parameters, totals, strict=True)
        ]
        for addition in additions:
            assert isinstance(addition.total, Tensor)
            addition.total = addition.total.to(addition.dtype)
        add_bounded(additions, torch.stack(factors).to(dtype), clip.clip_norm, frozenset(self.gate.names), part=part)
        clipping.losses = torch.stack(losses)
        return torch.stack(norms).to(dtype)

    def _alone(
        self, user: int, loss_of: Callable[[Any], Tensor], data: Any, parameters: list[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """The gradients and the loss of one user, by plain autograd."""
        gate = self.gate
        gate.open(None)
        try:
            with self.fallback.alone(user):
                with torch._C.DisableTorchFunction():
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
        if not loss.requires_grad:
            return [torch.zeros_like(p) for p in parameters], loss.detach()
        found = torch.autograd.grad(loss.reshape(()), parameters, allow_unused=True)
        dense = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        return [g.to_dense() if g.layout != torch.strided else g for g in dense], loss.detach()


def tree_of(data: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Users' data as a tree of tensors, and what makes one user's data of that user's tree.

    An object that keeps them otherwise (dpformer.integrations.batches.Part) has methods for both.
    """
    if hasattr(data, "by_user"):
        return data.by_user(), data.of_user
    return data, lambda mine: mine


def count_of(data: Any) -> int:
    """How many users the data are of.

    Raises:
        ValueError: if there are none.
    """
    if not (count := rows_of(data)):
        raise ValueError("there are no users: skip this part, an empty batch needs no forward pass")
    return count


def rows_of(data: Any) -> int:
    """The rows of all tensors.

    Raises:
        ValueError: if they disagree.
    """
    counts: list[int] = []

    def look(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            raise ValueError(f"users' data have an array of shape {leaf.shape}: give tensors (torch.from_numpy)")
        if isinstance(leaf, Tensor):
            if leaf.ndim == 0:
                raise ValueError("users' data have a tensor without dimensions: the first one must count the users")
            counts.append(len(leaf))
        return leaf

    tree = tree_of(data)[0]
    map_trees(look, tree)
    if not counts:
        raise ValueError(
            f"users' data hold no tensor, got {type(data).__name__}: give tensors with a row for each user"
        )
    if len(set(counts)) > 1:
        raise ValueError(f"users' data have tensors of {sorted(set(counts))} rows: each needs one row for each user")
    _refuse_lists(tree, counts[0])
    return counts[0]


def _refuse_lists(tree: Any, users: int) -> None:
    """A list of as many numbers or words as users seems to have one for each, but every user would get all of them."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            _refuse_lists(value, users)
    elif isinstance(tree, (tuple, list)):
        if isinstance(tree, list) and len(tree) == users and all(isinstance(v, (int, float, str)) for v in tree):
            raise ValueError(
                f"users' data have a list of {users} Python values, as many as users, of which every user would get "
                "all: give a tensor with a row for each user, or leave out what the model does not need"
            )
        for value in tree:
            _refuse_lists(value, users)


def _versions(data: Any) -> list[int]:
    return [version_of(t) for t in tensors_of(tree_of(data)[0])]


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float64)


@contextmanager
def _masks_of_transformers() -> Iterator[None]:
    """transformers looks into padding to leave masks out, except while a model is traced; so it does inside."""
    masks = sys.modules.get("transformers.masking_utils")
    if masks is None or not hasattr(masks, "is_tracing"):
        yield
        return
    before = masks.is_tracing

    def is_tracing(tensor: Any = None) -> bool:
        return True if isinstance(tensor, Tensor) and is_batchedtensor(tensor) else bool(before(tensor))

    with patch.object(masks, "is_tracing", is_tracing):
        yield


_SIGNS = ("vmap", "functorch", "atching rule", "transformed by", "storage", "stack expects each tensor")


def _is_of_vmap(error: Exception) -> bool:
    return any(sign in str(error) for sign in _SIGNS)


def _short(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


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
