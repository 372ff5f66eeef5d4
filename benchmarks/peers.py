"""How others train the same model: plain PyTorch, Ghost Clipping, vmap, Opacus, jax-privacy."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import dpformer as dp
from benchmarks.plain import PlainTransformer, padded, per_user_loss
from benchmarks.register import Step, contender
from benchmarks.workloads import Workload


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
    import dpformer.clipping.parameter_norms as norms

    norms.reach = lambda uses: float("inf")  # type: ignore[assignment]  # always Gram
    model, batches = plain_model(w, None, half=True), physical_batches(w, sequences)
    clipping = dp.PhantomClipping(model, self_check=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        held = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for items, targets in batches:
            state = torch.get_rng_state()
            with clipping.users((items, targets)) as (own_items, own_targets):
                loss = per_user_loss(model(own_items), own_targets)
            factors = dp.normalize(1.0)(clipping.backward(loss, dp.normalize(1.0)))
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


@contender("jax-privacy")
def jax_privacy(w: Workload, sequences: list[np.ndarray]) -> Step:
    """jax-privacy, per-user gradients by vmap, compiled; without noise, which is in its favour."""
    from benchmarks.jax_peer import make_step

    return make_step(w, [(items.numpy(), targets.numpy()) for items, targets in physical_batches(w, sequences)])
