"""FSDP2 (`fully_shard`): whole parameters while users are computed, shards of everything else.

Parameters, optimizer state and released gradients of a sharded model live in shards, rows of each parameter on each
process. A user's gradient covers whole parameters, and so does its norm. So for each step they are gathered (one
all-gather), every process computes the clipped sum of its own users on them, and sums are returned to the shards by one
reduce-scatter: a *sum*, where FSDP would average what autograd left. Its hooks are disabled meanwhile. A process
needs the same two collectives per step whether it has many micro-batches or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Shard

from dpformer.errors import UnsupportedUse


@dataclass(frozen=True)
class Sharded:
    """A trainable parameter as the optimizer knows it, and as the model uses it while gathered."""

    shard: DTensor
    whole: Tensor

    @property
    def start(self) -> int:
        """The index of the shard's first number in the whole parameter: rows are split as by `torch.chunk`."""
        mesh, (rows, *rest) = self.shard.device_mesh, self.shard.shape
        each = -(-rows // mesh.size())
        return min(mesh.get_local_rank() * each, rows) * torch.Size(rest).numel()

    def summed(self, own: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The rows of this process of Σ over processes of `own`; None counts as zero. All processes must call it."""
        total = torch.zeros_like(self.whole, dtype=dtype) if own is None else own.detach().to(dtype).contiguous()
        parts = DTensor.from_local(total, self.shard.device_mesh, [Partial("sum")], run_check=False)
        return parts.redistribute(placements=[Shard(0)]).to_local().contiguous()

    def put(self, local: Tensor) -> None:
        """The shard's gradient ← these rows."""
        p = self.shard
        gradient = DTensor.from_local(
            local.to(p.dtype), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )
        p.grad = gradient


class Gathering:
    """Gathers the parameters of a sharded model, once per step, and frees them again."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._gathered: list[Sharded] | None = None
        self._resting: list[tuple[dict[int, Any], int, Any]] = []  # hooks of FSDP, and their positions
        refuse_other_shards(model)
        for module in self._modules():
            refuse_other_policies(module)

    def gather(self) -> list[Sharded]:
        """Every trainable parameter, whole. The first call in a step is a collective that all processes must make."""
        if self._gathered is None:
            shards = dict(self.model.named_parameters())
            for module in self._modules():
                module.unshard()
                self._rest(module)
            wholes = dict(self.model.named_parameters())
            self._gathered = [
                Sharded(shard, wholes[name])  # type: ignore[arg-type]
                for name, shard in shards.items()
                if shard.requires_grad
            ]
        return self._gathered

    def let_go(self) -> None:
        """Free the whole parameters and their gradients, and restore FSDP."""
        for parameter in self._gathered or []:
            parameter.whole.grad = None
        self._gathered = None
        for hooks, number, hook in self._resting:
            hooks[number] = hook
        self._resting.clear()
        for module in self._modules():
            module.reshard()

    def _rest(self, module: FSDPModule) -> None:
        """Disable FSDP's hooks, which would gather, cast and reduce in each pass, while parameters are gathered."""
        for hooks in _hooks(module):
            for number, hook in hooks.items():
                if _is_of_fsdp(hook, module):
                    self._resting.append((hooks, number, hook))
                    hooks[number] = _nothing

    def _modules(self) -> Iterator[FSDPModule]:
        return (module for module in self.model.modules() if isinstance(module, FSDPModule))


def _hooks(module: FSDPModule) -> list[dict[int, Any]]:
    return [cast(nn.Module, module)._forward_pre_hooks, cast(nn.Module, module)._forward_hooks]


def _is_of_fsdp(hook: Any, module: FSDPModule) -> bool:
    return getattr(hook, "__self__", None) is module._get_fsdp_state()


def _nothing(*_: Any) -> None:
    return None


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def refuse_other_shards(model: nn.Module) -> None:
    """Refuse layouts other than shards of rows over all processes."""
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            if parameter.requires_grad:
                raise UnsupportedUse(
                    f"parameter '{name}' is not sharded, while others are: call fully_shard on the whole model last"
                )
        elif tuple(parameter.placements) != (Shard(0),) or parameter.device_mesh.size() != dist.get_world_size():
            raise UnsupportedUse(
                f"parameter '{name}' is placed as {tuple(parameter.placements)} on {parameter.device_mesh}; only rows "
                f"over one mesh of all {dist.get_world_size()} processes are supported: fully_shard(model) without mesh"
            )


def refuse_other_policies(module: FSDPModule) -> None:
    """Refuse policies that FSDP's hooks apply besides gathering."""
    policy = module._get_fsdp_state()._mp_policy
    if policy.param_dtype is not None or policy.output_dtype is not None:
        raise UnsupportedUse(
            f"fully_shard was given {policy}, which casts parameters or outputs; use torch.autocast in the loop instead"
        )
    if not all(any(_is_of_fsdp(hook, module) for hook in hooks.values()) for hooks in _hooks(module)):
        raise UnsupportedUse("modules were sharded as a list, fully_shard([a, b]): shard each with a separate call")
