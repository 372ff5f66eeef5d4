"""Several processes in a custom training loop: `DistributedDataParallel`, `fully_shard` (FSDP2) or a plain model.

    clipping = DistributedClipping(model)               # the wrapped model
    optimizer = DistributedOptimizer(clipping, torch.optim.Adam(model.parameters()), noise_multiplier=…, …)
    for batch in dp.PoissonBatches(n, sample_rate=q, steps=T, key=shared_key()):    # the same users in all processes
        for part in share(batch).split(16):             # the users of this process, possibly none
            with clipping.users(histories[part.users], part) as user:
                loss = model(user)
            clipping.backward(loss, dp.clip(1.0))
        optimizer.step(batch)                           # every process, in every step
        optimizer.zero_grad()

Clipped gradients are added as *sums*, never averaged. Noise is a function of a key shared by all processes and of the
sum to which it is added, so all processes add the same noise: every copy of a parameter gets the same, every shard its
part of it. Sums equal those of a single process, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping
from dpformer.clipping.bounded_sum import check_users, sum_of
from dpformer.errors import DpformerError
from dpformer.integrations.sharding import Gathering, is_sharded
from dpformer.noise.noisy_sums import SecureRandom, in_turn, release_sums
from dpformer.sampling.batch import Batch, Part
from dpformer.training.distributed import add_up_gradients, bound_everywhere, shared_key
from dpformer.training.optimizer import PrivateOptimizer, not_finite, real, refuse_other

__all__ = ["DistributedClipping", "DistributedOptimizer", "share", "shared_key"]

Items = TypeVar("Items", bound=Any)


@overload
def share(items: Batch) -> Part: ...
@overload
def share(items: Items) -> Items: ...
def share(items: Any) -> Any:
    """The part of a batch, an array or a list that this process works on; all parts together are the whole."""
    return items[dist.get_rank() :: dist.get_world_size()]


class DistributedClipping(PhantomClipping):
    """`PhantomClipping` for a model that is wrapped in `DistributedDataParallel`, sharded by `fully_shard`, or plain.

    The wrappers' own exchange of gradients is switched off: they would average what autograd leaves, which here is
    nothing. A sharded model is gathered at the first forward pass of a step and kept whole until the step.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        if not dist.is_initialized():
            raise DpformerError("the processes have not been joined: call torch.distributed.init_process_group first")
        self.wrapper = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        plain: nn.Module = model if self.wrapper is None else self.wrapper.module
        self.gathering = Gathering(plain) if is_sharded(plain) else None
        if self.gathering is not None:
            self.gathering.gather()
        super().__init__(plain, **options)
        if self.gathering is not None:
            self.gathering.let_go()

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        if self.gathering is not None:
            self.gathering.gather()
        self._quiet(True)
        try:
            yield
        finally:
            self._quiet(False)

    def _quiet(self, quiet: bool) -> None:
        """DDP must neither wait for gradients nor broadcast buffers, since numbers of passes differ."""
        if self.wrapper is not None:
            self.wrapper.require_backward_grad_sync = not quiet
            self.wrapper.require_forward_param_sync = not quiet


class DistributedOptimizer(PrivateOptimizer):
    """`PrivateOptimizer` for several processes: a step sums the clipped sums of all, and adds noise once.

    All processes must call `step` in every step, including those without users. A gradient that one of them refuses is
    refused by all. The noise of a sharded parameter is generated where the shard is, only its part.

    Args:
        clipping: the clipping engine, which knows how the model is distributed.
        inner: the optimizer to step, with the parameters of the wrapped or sharded model.
        key: 32 secret bytes, the same in all processes; by default created by the first one.
        options: those of `PrivateOptimizer`.
    """

    def __init__(
        self,
        clipping: DistributedClipping,
        inner: torch.optim.Optimizer,
        *,
        key: bytes | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(inner, key=shared_key() if key is None and seed is None else key, seed=seed, **options)
        self._gathering = clipping.gathering
        if self._gathering is not None and self.noise.correlated:
            raise ValueError(f"{self.noise.choice}, but correlated noise is not supported for sharded models: omit it")

    @torch.no_grad()
    def step(self, batch: Batch | None = None) -> None:  # type: ignore[override]
        """Sum over all processes, add the noise, divide, step the inner optimizer, count.

        Args:
            batch: the same batch in all processes, whose parts cover all of its users; None: no claim.
        """
        if self._gathering is None:
            self._same_everywhere(self._parameters(), batch)
            add_up_gradients(self._parameters())  # with the largest bound of all processes, and all users
            super().step(batch)
        else:
            self._step_of_shards(self._gathering, batch)

    def _step_of_shards(self, gathering: Gathering, batch: Batch | None) -> None:
        if any(p.is_complex() for p in self._parameters()):
            raise ValueError("complex parameters are not supported for sharded models: use one process")
        known = {id(parameter.shard): parameter for parameter in gathering.gather()}
        parameters = [known[id(p)] for p in self._parameters()]
        wholes = [parameter.whole for parameter in parameters]
        self._same_everywhere(wholes, batch)
        clip_norm, held = bound_everywhere(wholes)
        self._refuse_bound(clip_norm)
        if self._asks_for_bounds:
            check_users(held, batch)
        sums = [p.summed(sum_of(p.whole), torch.promote_types(p.shard.dtype, torch.float32)) for p in parameters]
        self._finite_everywhere(sums)
        if self.noise_multiplier:
            address = self._address(sums)
            self._taken.bind(batch, address.identity)
            every = in_turn(address, self.steps, [whole.numel() for whole in wholes])
            noise = [
                replace(numbers, count=local.numel(), start=numbers.start + parameter.start)
                for numbers, parameter, local in zip(every, parameters, sums, strict=True)
            ]
            flat = [local.view(-1) for local in sums]
            release_sums(zip(flat, noise, strict=True), self.noise_std, self.expected_batch_size)
        for parameter, local in zip(parameters, sums, strict=True):
            parameter.put(local if self.noise_multiplier else local.div_(self.expected_batch_size))
        gathering.let_go()
        self._finish(batch, held)

    def _address(self, sums: list[Tensor], finite: Tensor | None = None) -> SecureRandom:
        """The same in all processes: of the whole sum, of which each has a copy, or the rows of its shards."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self._fingerprint.read(map(real, sums), finite))
        if not all(is_finite for _, is_finite in found):  # what one refuses, all refuse
            raise not_finite(self._parameters())
        found = [fingerprint for fingerprint, _ in found]
        if self._gathering is not None:
            return self._random.within(" ".join(found))
        if len(set(found)) > 1:
            raise DpformerError("the processes have added up different sums: noise on each would not be one noise")
        return self._random.within(found[0])

    def _refuse_bound(self, clip_norm: float) -> None:
        if clip_norm > self.clip_norm and not self.assume_clipped:
            raise ValueError(
                f"gradients were clipped to {clip_norm}, but the noise is for clip_norm={self.clip_norm}: use the same "
                "value"
            )

    def _same_everywhere(self, parameters: list[Tensor], batch: Batch | None) -> None:
        """Refuse processes that have diverged: their gradients belong to different models."""
        refused = ""
        try:
            refuse_other(batch)
            self._check_due(batch)
        except ValueError as error:  # an error in one is raised in all, so that none waits in vain
            refused = str(error)
        drawn = None if batch is None or refused else (batch.origin.identity, batch.step)
        mine = (self._fingerprint(map(real, parameters)), self.steps, drawn, refused)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        if reasons := [other[-1] for other in found if other[-1]]:
            raise ValueError(reasons[0])
        for rank, other in enumerate(found):
            if other != found[0]:
                raise DpformerError(
                    f"process {rank} has other weights, another key, another batch or another number of steps than "
                    "process 0: start all with the same weights, and take every step in every process"
                )

    @staticmethod
    def _finite_everywhere(sums: list[Tensor]) -> None:
        finite = torch.tensor(all(bool(torch.isfinite(s).all()) for s in sums), dtype=torch.int32)
        if sums:
            finite = finite.to(sums[0].device)
        dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not bool(finite):
            raise ValueError(
                "a gradient is not finite; a user who is not finite must be left out of the sum (PhantomClipping does "
                "so)"
            )
