"""Counts and a Transformer under one budget: DPFORMER_DATA=FOLDER python -m experiments.join [--share 0.8 ...]

A share s of the budget goes to transition counts (one Gaussian release, σ₁/√s), the rest to DP-SGD; both are composed
by the accountant, so that the whole is (ε, 1/users)-DP. Two ways to join them:

- *ensemble*: the Transformer is trained as ever, with the released popularity as its bias; a ranking adds λ times its
  logits to the scores of the counts. Post-processing: nothing changes in training.
- *residual*: softmax(h·Eᵀ + prior(history)), the prior being ln P of the counts: the Transformer learns what they lack.

These are measured on *validation* items, with the test items left out of everything, beside counts alone with the whole
budget. Histories are cut short and runs are few epochs: this asks whether joining helps at all.

- *free*: an upper bound on any ensemble. Counts and a finished Transformer of the store, *each with the whole budget*,
  so together they spend more than ε, and the best λ is chosen on the test items themselves.

Each run is kept in docs/results/join.json and never computed twice. Seeded: not private.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from experiments.cells import data_file, paper
from experiments.store import WORK
from torch import Tensor

import dpformer as dp
from dpformer.accounting.events import Gaussian
from dpformer.data import Dataset, prepare, synthetic
from dpformer.evaluation import evaluate, hit, ndcg
from dpformer.models import Batch, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.models.history import LATEST
from dpformer.runs import load_release
from dpformer.training.schedule import warmup_then_decay

TRUST = 0.8  # λ: of the probability that counts claim
ROWS, USERS = 32, 6040  # users at once, users to evaluate on
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)  # λ
STORE = Path(__file__).parents[1] / "docs" / "results" / "join.json"


class Residual(Transformer):
    """A Transformer whose logits are added to those of a prior."""

    def losses(self, batch: Batch, prior: Tensor | None) -> Tensor:
        """(B,): mean cross-entropy of each user's positions."""
        if prior is None:
            return self(batch)
        logits = F.linear(self.hidden(batch), self.items.weight) + prior  # (B, L, M)
        each = F.cross_entropy(logits.mT, batch.targets.clamp(min=0), reduction="none")
        inside = batch.targets >= 0
        return (each * inside).sum(1) / inside.sum(1).clamp(min=1)


def budget(epsilon: float, delta: float, share: float) -> Gaussian:
    """The release of counts with its share of the whole."""
    whole = dp.calibrate(epsilon=epsilon, delta=delta, sample_rate=1.0, steps=1)
    return Gaussian(whole / share**0.5, label="transition counts", private=False)


def fit_counts(dataset: Dataset, sigma: float, seed: int) -> TransitionCounts:
    items, offsets = dataset.packed_train()
    return TransitionCounts.fit(items, dataset.num_items, sigma, offsets=offsets, ledger=dp.Ledger(), seed=seed)


def train(
    dataset: Dataset, counts: TransitionCounts, event: Gaussian, how: str, settings: dict[str, Any]
) -> tuple[Residual, float]:
    """DP-SGD with the rest of the budget; returns the model and its noise multiplier."""
    users, batch_size, length = dataset.num_users, settings["batch_size"], settings["length"]
    rate, steps = batch_size / users, -(-settings["epochs"] * users // batch_size)
    sigma = dp.calibrate(epsilon=settings["epsilon"], delta=1 / users, sample_rate=rate, steps=steps, others=[event])
    torch.manual_seed(settings["seed"])
    model = Residual(dataset.num_items, length, dim=settings["dim"], blocks=settings["blocks"], dropout=0.2)
    if how == "ensemble":
        model.set_frequencies(counts.popularity)
    clipping = dp.PhantomClipping(model)
    adam = torch.optim.Adam(model.parameters(), lr=settings["learning_rate"], weight_decay=1e-5)
    private = dp.PrivateOptimizer(
        adam, noise_multiplier=sigma, clip_norm=1.0, expected_batch_size=batch_size, seed=settings["seed"]
    )
    batches = dp.PoissonBatches(users, sample_rate=rate, steps=steps, seed=settings["seed"])
    for step, chosen in enumerate(batches):
        for group in private.param_groups:
            group["lr"] = settings["learning_rate"] * warmup_then_decay(step, steps, 0.2)
        order = chosen.users[np.argsort(dataset.train_lengths[chosen.users])]
        total, seen = 0.0, 0
        for part in chosen.part(order).split(ROWS):
            batch = Batch.from_histories([h[-length:] for h in dataset.histories(part.users.tolist())], length)
            prior = prior_logits(counts, batch.items, batch.lengths) if how == "residual" else None
            with clipping.users((batch, prior), part) as user:
                loss = model.losses(*user)
            clipping.backward(loss, dp.normalize(1.0))
            total, seen = total + clipping.losses.sum().item(), seen + len(part)
        private.step(chosen)
        private.zero_grad()
        if step % 10 == 9 or step == steps - 1:
            print(f"  step {step + 1} of {steps}: loss {total / max(seen, 1):.4f}", flush=True)
    return model.eval(), sigma


def prior_logits(counts: TransitionCounts, items: Tensor, lengths: Tensor) -> Tensor:
    """(B, L, M): at each position ln P of the next item, after the items up to it; see docs/results/counts.md.

    P(b) = λ·c_b + (1 − λ·Σ_b c_b)·q_b with λ = 0.8: what the counts do not claim goes to popularity.

    Args:
        items: (B, L) int64, right-padded with 0.
        lengths: (B,) int64; positions beyond are meaningless.
    """
    inside = torch.arange(items.shape[1], device=items.device) < lengths[:, None]
    items = torch.where(inside, items, -1)
    logits = counts.popularity.new_empty(*items.shape, counts.num_items)
    for t in range(items.shape[1]):
        latest = items[:, max(0, t + 1 - LATEST) : t + 1].flip(1)
        claims = counts._claims(F.pad(latest, (0, LATEST - latest.shape[1]), value=-1))
        claims *= TRUST / claims.sum(1, keepdim=True).clamp(min=1)
        rest = 1 - claims.sum(1, keepdim=True)
        logits[:, t] = claims.addcmul_(rest, counts.popularity).log_()
    return logits


def metrics(score: Any, dataset: Dataset) -> list[float]:
    """NDCG@10 and HIT@10 in %, seen items masked; validation items, if there are any, else test items."""
    everyone = dataset.held_out("validation" if dataset.validation else "test")[0]
    users = np.random.default_rng(0).permutation(everyone)[:USERS]
    found = evaluate(score, dataset, split="validation" if dataset.validation else "test", users=users)
    return [round(100 * float(function(found.masked, 10).mean()), 3) for function in (ndcg, hit)]


def ensemble(model: Transformer, counts: TransitionCounts, dataset: Dataset) -> dict[str, list[float]]:
    """For each λ the metrics of two ways to add up.

    "λ": the counts' scores plus λ times the Transformer's logits, without the bias, which is popularity.
    "mixture λ": chances instead of logarithms, c + 0.01·q + λ·softmax(logits).
    """
    known: dict[bytes, tuple[Tensor, Tensor]] = {}

    def both(histories: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        key = histories[0].tobytes() + len(histories).to_bytes(8, "little")
        if key not in known:
            rows = range(0, len(histories), 256)
            logits = torch.cat([model.scores(histories[at : at + 256]) for at in rows]) - model.bias
            known[key] = counts.scores(histories), logits
        return known[key]

    found = {"transformer": metrics(lambda histories: both(histories)[1] + model.bias, dataset)}
    for weight in WEIGHTS:

        def score(histories: list[np.ndarray], weight: float = weight) -> Tensor:
            claims, logits = both(histories)
            return claims + weight * logits

        def mixture(histories: list[np.ndarray], weight: float = weight) -> Tensor:
            claims, logits = both(histories)
            return claims.exp() + weight * (logits + model.bias).softmax(1)

        found[f"{weight:g}"] = metrics(score, dataset)
        found[f"mixture {weight:g}"] = metrics(mixture, dataset)
    return found


def run(data: str, dataset: Dataset, how: str, settings: dict[str, Any]) -> dict[str, Any]:
    delta, began = 1 / dataset.num_users, time.perf_counter()
    event = budget(settings["epsilon"], delta, settings["share"])
    counts = fit_counts(dataset, event.noise_multiplier, settings["seed"])
    found: dict[str, Any] = {"how": how, **settings, "counts sigma": round(event.noise_multiplier, 4)}
    found["counts"] = metrics(counts.scores, dataset)
    if how == "free":
        cell = paper(data, "vanilla", settings["epsilon"])
        found["joined"] = ensemble(load_release(WORK / cell.name / "model.safetensors").model, counts, dataset)
        return found
    if how != "counts":
        model, sigma = train(dataset, counts, event, how, settings)
        found["training sigma"] = sigma
        found["joined"] = ensemble(model, counts, dataset)
    return {**found, "seconds": round(time.perf_counter() - began)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="ml-1m")
    parser.add_argument("--how", choices=("counts", "ensemble", "residual", "free"), default="ensemble")
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--epsilon", type=float, default=5.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--length", type=int, default=50)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    settings = vars(parser.parse_args())
    torch.set_num_threads(1)
    runs = json.loads(STORE.read_text()) if STORE.exists() else {}
    key = " ".join(f"{name}={value}" for name, value in settings.items())
    data, how = settings.pop("data"), settings.pop("how")
    if key not in runs:
        validation = how != "free"
        dataset = (
            synthetic(max_length=None, validation=validation)
            if data == "synthetic"
            else prepare(data_file(data), max_length=None, validation=validation)
        )
        result = run(data, dataset, how, settings)
        runs = json.loads(STORE.read_text()) if STORE.exists() else {}  # another process may have added to it
        STORE.write_text(json.dumps({**runs, key: {"data": data, **result}}, indent=1) + "\n")
        runs[key] = result
    print(json.dumps(runs[key]))


if __name__ == "__main__":
    main()
