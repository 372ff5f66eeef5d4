"""Training loops of several processes for tests: each also trains alone, on a copy, and compares."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import dpformer as dp
from dpformer.errors import DpformerError
from dpformer.integrations.distributed import DistributedClipping, DistributedOptimizer, share
from dpformer.noise import Banded
from dpformer.sampling import Batch
from dpformer.training.rendezvous import join_processes

USERS, STEPS, CLIP = 30, 6, 0.7


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 7), nn.Linear(7, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Network(nn.Module):
    """Next items of short sequences: a tied embedding, a frozen layer, rows that no number of processes divides."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.scale = nn.Embedding(11, 6), nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList([Block(6), Block(6)])
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.full((6,), 0.1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids[:, :-1]) * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        logits = self.frozen(x) @ self.items.weight.T
        return nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none").sum(1)


class FewUsers(dp.PoissonBatches):
    """Two of the batches are empty, and one has a single user."""

    def draw(self, step: int) -> np.ndarray:
        return np.array([3] if step == 2 else [], np.int64) if step in (1, 2, 4) else super().draw(step)


def wrapped(model: nn.Module, kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    return model


def values(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters() if p.requires_grad]


def train(
    model: nn.Module,
    clipping: dp.PhantomClipping,
    optimizer: dp.PrivateOptimizer,
    own: Callable[[Batch], Any],
    autocast: bool = False,
) -> list[float]:
    """Six steps; two of the batches are empty, and one has a single user. Returns the norms that were seen."""
    data = torch.randint(0, 11, (USERS, 5), generator=torch.Generator().manual_seed(1))
    norms: list[float] = []
    for batch in FewUsers(USERS, sample_rate=0.3, steps=STEPS, seed=2):
        mine = own(batch)
        for part in mine.split(max(1, -(-len(mine) // 2))):
            half = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
            with clipping.users(data[part.users], part) as user, half:
                loss = model(user)
            norms += clipping.backward(loss, dp.clip(CLIP)).tolist()
        optimizer.step(batch)
        optimizer.zero_grad()
    return norms


def noise_of_the_step_alone() -> None:
    """The same noise for sums that round otherwise, of which it is a function."""
    for kind in (dp.PrivateOptimizer, DistributedOptimizer):
        kind._address = lambda self, *_: self._random  # type: ignore[method-assign]


def both(kind: str, dtype: torch.dtype, noise: float, autocast: bool = False) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of several processes, and of one alone."""
    torch.manual_seed(0)
    alone = Network().to(dtype)
    model = wrapped(copy.deepcopy(alone), kind)
    options: dict[str, Any] = {"noise_multiplier": noise, "clip_norm": CLIP, "expected_batch_size": 9.0, "seed": 5}
    clipping = DistributedClipping(model)
    optimizer = DistributedOptimizer(clipping, torch.optim.Adam(model.parameters(), lr=0.05), **options)
    norms = train(model, clipping, optimizer, share, autocast)
    single = dp.PrivateOptimizer(torch.optim.Adam(alone.parameters(), lr=0.05), **options)
    expected = train(alone, dp.PhantomClipping(alone), single, lambda batch: batch, autocast)
    assert optimizer.steps == single.steps == STEPS
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, norms)
    np.testing.assert_allclose(
        sorted(norm for seen in everywhere for norm in seen), sorted(expected), rtol=2e-2 if autocast else 1e-4
    )
    return values(model), values(alone)


def same_model(quickly: bool = False) -> None:
    """In float64 rounding to the public grid makes released sums the same to the last bit."""
    join_processes("gloo")
    noise_of_the_step_alone()
    cases = ((1.0, torch.float64, False, 1e-12), (0.0, torch.float32, False, 1e-3), (0.0, torch.float32, True, 0.1))
    for kind in ("ddp", "fsdp") if quickly else ("plain", "ddp", "fsdp"):
        for noise, dtype, autocast, tolerance in cases[:1] if quickly else cases:
            for one, other in zip(*both(kind, dtype, noise, autocast), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    dist.destroy_process_group()


def one_step(dtype: torch.dtype, kind: str, **options: Any) -> tuple[nn.Module, DistributedClipping, Any]:
    torch.manual_seed(0)
    model = wrapped(Network().to(dtype), kind)
    clipping = DistributedClipping(model)
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": CLIP, "expected_batch_size": 9.0, **options}
    return model, clipping, DistributedOptimizer(clipping, torch.optim.SGD(model.parameters(), lr=1.0), **settings)


def one_noise() -> None:
    """Steps without a single user: the noise is that of one process, number by number, with a key nobody was given."""
    join_processes("gloo")
    for kind in ("ddp", "fsdp"):
        model, _, optimizer = one_step(torch.float32, kind)
        before, steps = [value.clone() for value in values(model)], 15
        for _ in range(steps):
            optimizer.step()
            optimizer.zero_grad()
        moved = torch.cat([(now - then).flatten() for now, then in zip(values(model), before, strict=True)])
        deviation = CLIP / 9.0 * steps**0.5  # once, whatever the number of processes
        assert abs(float(moved.std()) / deviation - 1) < 6 / (2 * len(moved)) ** 0.5
        assert optimizer.private and optimizer.steps == steps
        keys: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(keys, optimizer.state_dict()["random"]["key"])
        assert len(set(keys)) == 1
    dist.destroy_process_group()


def refusals() -> None:
    """What one process has to refuse, all refuse: none waits forever."""
    join_processes("gloo")
    for kind in ("ddp", "fsdp"):
        model, clipping, optimizer = one_step(torch.float32, kind)
        before = [value.clone() for value in values(model)]
        with clipping.users(torch.randint(0, 11, (4, 5))) as user:
            loss = model(user)
        clipping.backward(loss, dp.clip(2 * CLIP if dist.get_rank() else CLIP))
        with pytest.raises(ValueError, match=f"clipped to {2 * CLIP}, but the noise is for clip_norm={CLIP}"):
            optimizer.step()
        model, clipping, optimizer = one_step(torch.float32, kind)
        with clipping.users(torch.randint(0, 11, (4, 5))) as user:
            loss = model(user)
        clipping.backward(loss, dp.clip(CLIP))
        if dist.get_rank():
            clipping.model.items.weight.grad *= 100  # type: ignore[union-attr,operator]
        with pytest.raises(ValueError, match="in process 1, the gradient of a parameter of shape"):
            optimizer.step()
        assert optimizer.steps == 0 and all(map(torch.equal, values(model), before))
    model, _, optimizer = one_step(torch.float32, "plain")
    with torch.no_grad():
        model.scale += dist.get_rank()  # type: ignore[operator]
    with pytest.raises(DpformerError, match="process 1 has other weights"):
        optimizer.step()
    refused_models()
    dist.destroy_process_group()


def refused_models() -> None:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(dp.UnsupportedUse, match=r"use torch\.autocast in the loop instead"):
        DistributedClipping(fully_shard(nn.Linear(4, 2), mp_policy=half))
    columns = fully_shard(nn.Linear(4, 2, bias=False), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(dp.UnsupportedUse, match="parameter 'weight' is placed as"):
        DistributedClipping(columns)
    inside = nn.Sequential(nn.Linear(4, 2), fully_shard(nn.Linear(2, 2)))
    with pytest.raises(dp.UnsupportedUse, match=r"parameter '0\.weight' is not sharded, while others are"):
        DistributedClipping(inside)
    pair = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    fully_shard([pair[0], pair[1]])
    with pytest.raises(dp.UnsupportedUse, match="shard each with a separate call"):
        DistributedClipping(fully_shard(pair))
    clipping = DistributedClipping(fully_shard(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="correlated noise is not supported for sharded models"):
        inner = torch.optim.SGD(clipping.model.parameters(), lr=1.0)
        DistributedOptimizer(clipping, inner, noise_multiplier=1, clip_norm=1, expected_batch_size=1, noise=Banded(2))


def guide(page: str) -> None:
    """The blocks of the guide, one after the other, as they stand."""
    names: dict[str, object] = {"__name__": "guide"}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "several-machines.md", "exec"), names)
    dist.destroy_process_group()


def worked_example(page: str) -> None:
    """The GPT-2 of the guide on two processes: the ledger and, with the same noise, the model of one process."""
    from dpformer.integrations import distributed
    from dpformer.integrations.batches import Part
    from dpformer.integrations.losses import user_losses
    from dpformer.integrations.users import Users

    noise_of_the_step_alone()
    key, names = bytes(range(32)), {"__name__": "guide"}
    distributed.shared_key = lambda: key
    blocks = re.findall(r'```python(?: title="sharded.py")?\n(.*?)```', page, re.DOTALL)
    exec(compile(blocks[0], "trainers.md", "exec"), names)
    there: dict[str, Any] = names  # type: ignore[assignment]
    with_dropout = there["base_model"]
    there["base_model"] = base = lambda: _without_dropout(with_dropout()).double()
    exec(compile(blocks[-1], "sharded.py", "exec"), names)
    alone, users, batches = base(), Users(there["texts"], "author"), there["batches"]
    again = dp.PoissonBatches(there["AUTHORS"], batches.sample_rate, there["STEPS"], key=key)
    inner = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    clipping, bound = dp.PhantomClipping(alone), {"clip_norm": 1.0, "expected_batch_size": there["BATCH"]}
    optimizer = dp.PrivateOptimizer(inner, noise_multiplier=there["sigma"], key=key, **bound)
    for batch in again:
        if len(batch):
            part = Part.of([there["collate"](users[user]) for user in batch.users.tolist()])
            with clipping.users(part, batch[:]) as user:
                loss = user_losses(alone, user)
            clipping.backward(loss, dp.normalize(1.0))
        optimizer.step(batch)
        optimizer.zero_grad()
    assert there["ledger"] == dp.Ledger(optimizer.events())
    for one, other in zip(values(there["model"]), values(alone), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    dist.destroy_process_group()


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
