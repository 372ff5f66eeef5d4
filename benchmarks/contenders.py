"""One way to train each: a function that sets up a model and returns what does one logical step.

python -m benchmarks.contenders phantom ml-1m          # one contender alone; prints JSON
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import dpformer as dp
from benchmarks.plain import PlainTransformer, padded, per_user_loss
from benchmarks.workloads import WORKLOADS, Workload
from dpformer.models import Batch, Transformer
from dpformer.training.allocator import keep_freed_memory
from dpformer.training.microbatches import by_length, cut

Step = Callable[[], None]
CONTENDERS: dict[str, Callable[[Workload, list[np.ndarray]], Step]] = {}


def contender(name: str) -> Callable[..., Callable[..., Step]]:
    def register(make: Callable[[Workload, list[np.ndarray]], Step]) -> Callable[..., Step]:
        CONTENDERS[name] = make
        return make

    return register


# -- ours -------------------------------------------------------------------------------------------------------------


def ours(w: Workload, sequences: list[np.ndarray], reattention: bool) -> tuple[Transformer, list[Batch]]:
    keep_freed_memory()
    model = Transformer(
        w.items, w.max_length, dim=w.dim, heads=w.heads, blocks=w.blocks, dropout=w.dropout, reattention=reattention
    )
    if reattention:
        model.set_privacy(1.0, w.batch, torch.full((w.items,), 0.01))
    lengths = np.array([len(s) - 1 for s in sequences])
    order = by_length(np.arange(len(sequences)), lengths)
    parts = cut(lengths[order], w.tokens)
    return model, [Batch.from_histories([sequences[i] for i in order[part]], w.max_length) for part in parts]


def private_step(w: Workload, sequences: list[np.ndarray], reattention: bool) -> Step:
    model, batches = ours(w, sequences, reattention)
    clipping = dp.PhantomClipping(model)
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = dp.PrivateOptimizer(inner, noise_multiplier=1.0, clip_norm=1.0, expected_batch_size=len(sequences))

    def step() -> None:
        for batch in batches:
            with clipping:
                losses = model(batch)
            clipping.backward(losses, dp.normalize(1.0))
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


# -- what others do ---------------------------------------------------------------------------------------------------


def plain_model(w: Workload, tie: str | None, half: bool = False) -> PlainTransformer:
    heads = max(1, w.heads // 2) if half else w.heads
    return PlainTransformer(w.items, w.max_length, w.dim // 2 if half else w.dim, heads, w.blocks, w.dropout, tie)


def physical_batches(w: Workload, sequences: list[np.ndarray]) -> list[tuple[Tensor, Tensor]]:
    return [padded(sequences[i : i + w.physical], w.max_length) for i in range(0, len(sequences), w.physical)]


@contender("plain")
def plain(w: Workload, sequences: list[np.ndarray]) -> Step:
    """Non-private PyTorch: padded batches, a tied F.linear head, F.cross_entropy, autograd, Adam."""
    model, batches = plain_model(w, "function"), physical_batches(w, sequences)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        for items, targets in batches:
            loss = F.cross_entropy(model(items).flatten(0, 1), targets.flatten(), ignore_index=-1)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contender("ghost-unshared")
def ghost(w: Workload, sequences: list[np.ndarray]) -> Step:
    """Ghost Clipping as the paper compares with: not shared, half the dimension, Gram norms, two backward passes."""
    import dpformer.clipping.norms as norms

    norms.dense_cost = lambda uses: float("inf")  # type: ignore[assignment]  # always Gram
    model, batches = plain_model(w, None, half=True), physical_batches(w, sequences)
    clipping = dp.PhantomClipping(model, proof_users=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        held = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for items, targets in batches:
            state = torch.get_rng_state()
            with clipping:
                losses = per_user_loss(model(items), targets)
            factors = dp.normalize(1.0)(clipping.backward(losses, dp.normalize(1.0)))
            for p, before in zip(model.parameters(), held, strict=True):
                p.grad = before  # only the norms were wanted: the sum comes from the second pass
            torch.set_rng_state(state)
            (per_user_loss(model(items), targets) * factors).sum().backward()
            held = [p.grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()

    return step


@contender("vmap")
def vmap(w: Workload, sequences: list[np.ndarray]) -> Step:
    """Naive per-user gradients: torch.func.vmap over users, exact on the tied model."""
    model, batches = plain_model(w, "function"), physical_batches(w, sequences)
    names = [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())

    def loss(params: dict[str, Tensor], items: Tensor, targets: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, params, (items[None],))
        each = F.cross_entropy(logits[0], targets.clamp(min=0), reduction="none") * (targets >= 0)
        return each.sum() / (targets >= 0).sum().clamp(min=1)

    per_user = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        for items, targets in batches:
            detached = {name: p.detach() for name, p in parameters.items()}
            grads = per_user(detached, items, targets)
            norms = torch.stack([grads[n].flatten(1).square().sum(1) for n in names]).sum(0).sqrt()
            factors = dp.normalize(1.0)(norms)
            for n in names:
                total = torch.einsum("b,b...->...", factors, grads[n])
                parameters[n].grad = total if parameters[n].grad is None else parameters[n].grad + total
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus_step(w: Workload, sequences: list[np.ndarray], mode: str, tie: str | None) -> Step:
    from opacus import GradSampleModule
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping

    model, batches = plain_model(w, tie), physical_batches(w, sequences)
    if mode == "hooks":
        wrapped = GradSampleModule(model)
    else:
        wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def hooks() -> None:
        for items, targets in batches:
            per_user_loss(wrapped(items), targets).sum().backward()
            every = list(model.parameters())
            norms = torch.stack([p.grad_sample.flatten(1).square().sum(1) for p in every]).sum(0).sqrt()
            factors = dp.normalize(1.0)(norms)
            for p in every:
                total = torch.einsum("b,b...->...", factors, p.grad_sample)
                p.summed = total if getattr(p, "summed", None) is None else p.summed + total
                p.grad_sample = p.grad = None
        finish()

    def ghost_mode() -> None:
        for items, targets in batches:
            losses = per_user_loss(wrapped(items), targets)
            losses.sum().backward(retain_graph=True)
            factors = dp.normalize(1.0)(wrapped.get_norm_sample()).detach()
            for p in model.parameters():
                p.grad = getattr(p, "summed", None)
            wrapped.disable_hooks()
            (losses * factors).sum().backward()
            wrapped.enable_hooks()
            for p in model.parameters():
                p.summed, p.grad = p.grad, None
        finish()

    def finish() -> None:
        for p in model.parameters():
            p.grad, p.summed = p.summed, None
        optimizer.step()
        optimizer.zero_grad()

    return hooks if mode == "hooks" else ghost_mode


@contender("opacus-hooks")
def opacus_hooks(w: Workload, sequences: list[np.ndarray]) -> Step:
    """Opacus, per-sample gradients, tied by module (its functional tie is silently wrong)."""
    return opacus_step(w, sequences, "hooks", "module")


@contender("opacus-ghost-unshared")
def opacus_ghost(w: Workload, sequences: list[np.ndarray]) -> Step:
    """Opacus, ghost clipping, not shared: it refuses a module tie and is wrong on a functional one."""
    return opacus_step(w, sequences, "ghost", None)


# -- one contender in this process ------------------------------------------------------------------------------------


def measure(name: str, workload: Workload, seconds: float, threads: int) -> dict[str, float | str]:
    """Users a second (the best of several steps: the machine is noisy) and the peak memory of this process."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    sequences = workload.sequences()
    step = CONTENDERS[name](workload, sequences)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step()
    times, start = [], time.perf_counter()
    while len(times) < 3 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
        if time.perf_counter() - start > 6 * seconds:
            break
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "users_per_second": len(sequences) / min(times),
        "median_users_per_second": len(sequences) / float(np.median(times)),
        "peak_mib": peak / 1024,
        "step_mib": (peak - before) / 1024,  # what training adds to a process that has loaded everything
        "steps": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    facts = measure(arguments.contender, WORKLOADS[arguments.workload], arguments.seconds, arguments.threads)
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    main()
