"""Which models are exact: every case of experiments/model_cases.py against one user at a time, in float64.

    python -m experiments.models_table                # writes docs/results/models.md
    python -m experiments.models_table --only llama   # prints, writes nothing

Each case is run in eval mode (dropout would draw other numbers for a user alone). `exact` gives the largest relative
error, of norms and of the clipped sum, over all cases' users; `refused` gives the message.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from experiments.model_adapters import adapters
from experiments.model_cases import Case, families
from experiments.model_layers import layers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import dpformer as dp

EXACT = 1e-9
# Of the sum: factors are a little smaller where rounding could have hidden a part of a norm. For hiera they are all
# 2.7e-8 smaller, and the sum is that of these factors to 1e-15.
ROUNDED = 1e-7
EXACT_IN_SINGLE = 1e-4
PAGE = Path(__file__).parents[1] / "docs/results/models.md"


@dataclass(frozen=True)
class Outcome:
    group: str
    name: str
    verdict: str  # exact, refused, wrong, not run
    error: float = 0.0
    words: str = ""


def alone(model: nn.Module, batch: tuple[Tensor, ...]) -> list[list[Tensor]]:
    """Gradients of each user by itself, by plain autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    out = []
    for user in range(len(batch[0])):
        loss = model(*(t[user : user + 1] for t in batch))
        grads = torch.autograd.grad(loss[0], parameters, allow_unused=True)
        out.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)])
    return out


def largest_error(
    model: nn.Module, batch: tuple[Tensor, ...], truth: list[list[Tensor]]
) -> tuple[float, dict[str, int]]:
    """Of the engine's norms and clipped sum against the users alone, relative; what was computed one at a time."""
    clip = dp.clip(0.7 * float(_norms(truth).median()))
    clipping = dp.PhantomClipping(model)
    with clipping.users(batch) as user:
        loss = model(*user)
    norms = clipping.backward(loss, clip)
    right = _norms(truth)
    worst = float(((norms - right).abs() / right).max())
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected = [sum(c * g for c, g in zip(clip(right), each, strict=True)) for each in zip(*truth, strict=True)]
    apart = sum(
        float(((0 if p.grad is None else p.grad) - e).abs().square().sum())
        for p, e in zip(parameters, expected, strict=True)
    )
    short = (apart / sum(float(e.abs().square().sum()) for e in expected)) ** 0.5
    return max(worst, 0.0 if short < ROUNDED else short), clipping.fallbacks


def _norms(gradients: list[list[Tensor]]) -> Tensor:
    return torch.stack([sum(g.abs().square().sum() for g in user).sqrt() for user in gradients])


def outcome(case: Case) -> Outcome:
    """Runs one case."""
    try:
        model, batch, truth = prepared(case)
    except Exception as failure:
        try:
            model, batch, truth = prepared(case, torch.float32)
        except Exception:
            return Outcome(case.group, case.name, "not run", words=f"{type(failure).__name__}: {failure}")
    try:
        error, alone_too = largest_error(model, batch, truth)
    except dp.UnsupportedUse as refusal:
        return Outcome(case.group, case.name, "refused", words=str(refusal))
    except Exception as crash:
        return Outcome(case.group, case.name, "crash", words=f"{type(crash).__name__}: {crash}")
    if error < EXACT and alone_too:
        return Outcome(case.group, case.name, "exact, one at a time", error, ", ".join(alone_too))
    if error < EXACT:
        return Outcome(case.group, case.name, "exact", error)
    if error < EXACT_IN_SINGLE and (single := in_single(model, batch)):
        return Outcome(case.group, case.name, "exact in float32", error, single)
    return Outcome(case.group, case.name, "wrong", error)


def prepared(
    case: Case, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, tuple[Tensor, ...], list[list[Tensor]]]:
    """The model, a batch, and the gradients of each user alone."""
    torch.manual_seed(0)
    model, batch = case.make().eval(), case.batch()
    lively(model)
    model = model.to(dtype)
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    truth = alone(model, batch)
    if not bool(_norms(truth).isfinite().all()):
        raise ValueError("its own gradients are not finite at this size")
    return model, batch, truth


def in_single(model: nn.Module, batch: tuple[Tensor, ...]) -> str:
    """Why only float32 can be asked for; nothing if there is no reason."""
    if next(model.parameters()).dtype == torch.float32:
        return "the model itself has no finite gradients in float64, or does not run in it"
    return "the model itself computes in float32 in places" if computes_in_single(model, batch) else ""


def computes_in_single(model: nn.Module, batch: tuple[Tensor, ...]) -> bool:
    """Whether a float64 model casts to float32 on the way."""
    seen: set[torch.dtype] = set()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.requires_grad:
                seen.add(out.dtype)
            return out

    with Watch():
        model(*batch)
    return torch.float32 in seen


def lively(model: nn.Module) -> None:
    """Adapters begin at zero, which would leave half of their parameters without a gradient."""
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and not bool(p.any()):
                p.normal_(std=0.3)


def page(outcomes: list[Outcome]) -> str:
    counts = Counter(o.verdict for o in outcomes)
    lines = [
        "# Which models are exact",
        "",
        "Small models of many kinds, with random weights, in float64: the clipped sum and the norms that the engine",
        "gives for a batch, against plain autograd on one user at a time. **exact** gives the largest relative error,",
        "**one at a time** the modules that torch cannot batch, **refused** the message; *exact in float32* are models",
        "that compute in float32 in places or throughout, whatever their parameters are. *not run* are cases where the",
        "model itself did not run at this size.",
        f"Written by `python -m experiments.models_table` (torch {torch.__version__.split('+')[0]}, {_versions()},",
        "eval mode, seed 0):",
        ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()) + ".",
        "",
    ]
    for group in dict.fromkeys(o.group for o in outcomes):
        lines += [
            f"## {group[0].upper()}{group[1:]}",
            "",
            "| model | verdict | largest relative error, or why |",
            "| --- | --- | --- |",
        ]
        for o in (o for o in outcomes if o.group == group):
            said = (
                f"{o.error:.1e}" if o.verdict in ("exact", "wrong") else " ".join(o.words.split()).replace("|", "\\|")
            )
            lines.append(f"| {o.name} | {o.verdict} | {said} |")
        lines.append("")
    return "\n".join(lines)


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", help="names of cases; prints instead of writing the page")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    cases = [c for c in [*families(), *adapters(), *layers()] if not only or c.name in only]
    outcomes = []
    for case in cases:
        outcomes.append(outcome(case))
        o = outcomes[-1]
        print(f"{o.verdict:8} {o.group}: {o.name} {o.error:.1e} {o.words[:400]}", flush=True)
    if not only:
        PAGE.write_text(page(outcomes))


if __name__ == "__main__":
    main()
