"""dpformer, private and not."""

import numpy as np
import torch

import dpformer as dp
from benchmarks.register import Step, contender
from benchmarks.workloads import Workload
from dpformer.models import Batch, Transformer
from dpformer.training.allocator import keep_freed_memory
from dpformer.training.microbatches import by_length, cut, positions_at_once


def ours(w: Workload, sequences: list[np.ndarray], reattention: bool) -> tuple[Transformer, list[Batch]]:
    keep_freed_memory()
    model = Transformer(
        w.items, w.max_length, dim=w.dim, heads=w.heads, blocks=w.blocks, dropout=w.dropout, reattention=reattention
    )
    if reattention:
        model.set_privacy(1.0, w.batch, torch.full((w.items,), 0.01))
    lengths = np.array([len(s) - 1 for s in sequences])
    order = by_length(np.arange(len(sequences)), lengths)
    encoder = sum(p.numel() for p in model.parameters() if p.shape[:1] != (w.items,))
    parts = cut(lengths[order], positions_at_once(w.tokens, w.items, encoder, w.max_length))
    return model, [Batch.from_histories([sequences[i] for i in order[part]], w.max_length) for part in parts]


def private_step(w: Workload, sequences: list[np.ndarray], reattention: bool) -> Step:
    model, batches = ours(w, sequences, reattention)
    clipping = dp.PhantomClipping(model)
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = dp.PrivateOptimizer(inner, noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=len(sequences))

    def pass_of(batch: Batch) -> None:
        with clipping.users(batch) as user:
            loss = model(user)
        clipping.backward(loss, dp.normalize(1.0))

    def step() -> None:
        for batch in batches:
            pass_of(batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


@contender("phantom")
def phantom(w: Workload, sequences: list[np.ndarray]) -> Step:
    return private_step(w, sequences, reattention=False)


@contender("phantom-reattention")
def phantom_reattention(w: Workload, sequences: list[np.ndarray]) -> Step:
    return private_step(w, sequences, reattention=True)


@contender("own-nonprivate")
def own(w: Workload, sequences: list[np.ndarray]) -> Step:
    model, batches = ours(w, sequences, reattention=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        for batch in batches:
            (model(batch).sum() / len(sequences)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
