"""A network on attributes: DPFORMER_DATA=FOLDER python -m experiments.attribute_network beauty --epsilon 10 --epochs 5

An item's vector is the sum of its attributes' vectors, e_i = Σ_g A_ig v_g / √deg_i (+ ρ times a row of its own), at the
input and, tied, at the output: logits = (h Vᵀ) Aᵀ (+ ρ h Eᵀ) + bias. A is public and constant, V is used by one product
on the way in and one on the way out, so Phantom Clipping is exact as it is. The bias is released popularity (5% of the
budget) or, with `--prior SHARE`, ln P of transition counts that cost this share: then the network learns the rest.

`--attributes none` is the same network with a vector for every item, to compare. One JSON line: NDCG@10, HIT@10 in %,
test items (`--validation`: the ones before), seen items left out, δ = 1/users. Seeded: not private.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from experiments.attributes import SETS
from experiments.join import prior_logits
from scipy.sparse import csr_array
from torch import Tensor, nn

import dpformer as dp
from dpformer.accounting.events import Gaussian
from dpformer.data import Attributes, Dataset, synthetic
from dpformer.data.synthetic_data import GENRES
from dpformer.evaluation import evaluate, hit, ndcg
from dpformer.models import Batch, Transformer
from dpformer.models.backoff import matrix
from dpformer.models.counts import TransitionCounts
from dpformer.training.schedule import warmup_then_decay

ROWS = 64  # users at once
POPULARITY = 0.05  # share of the budget


def made_up() -> tuple[Dataset, Attributes]:
    """The synthetic default, each item with its genre."""
    dataset = synthetic(max_length=None)
    return dataset, Attributes.of_items([[("genre", str(item % GENRES))] for item in range(dataset.num_items)])


class AttributeTransformer(Transformer):
    """See above. Without attributes it is the plain Transformer, with the same loss."""

    def __init__(self, num_items: int, length: int, table: csr_array | None, residual: float, **choices: Any) -> None:
        super().__init__(num_items, length, **choices)
        self.residual = 1.0 if table is None else residual
        self.table: Tensor | None = None
        if table is not None:
            self.table = torch.sparse_csr_tensor(
                torch.from_numpy(table.indptr.astype(np.int64)),
                torch.from_numpy(table.indices.astype(np.int64)),
                torch.from_numpy(table.data.astype(np.float32)),
                size=table.shape,
            )
            self.rows = torch.from_numpy(table.toarray().astype(np.float32))
            self.facts = nn.Parameter(torch.randn(table.shape[1], self.dim) * 0.02)
            if not residual:
                self.items.requires_grad_(False)

    def embed(self, items: Tensor) -> Tensor:
        own = self.residual * self.items(items) if self.residual else 0.0
        shared = 0.0 if self.table is None else torch.matmul(self.rows[items], self.facts)
        return (own + shared) * self.dim**0.5

    def output_weight(self) -> Tensor:
        """(M, d), for ranking."""
        weight = self.residual * self.items.weight
        return weight if self.table is None else weight + self.rows @ self.facts

    def losses(self, batch: Batch, prior: Tensor | None) -> Tensor:
        """(B,): mean cross-entropy of each user's positions."""
        h = self.hidden(batch)  # (B, L, d)
        logits = self.bias if prior is None else prior
        if self.residual:
            logits = logits + self.residual * F.linear(h, self.items.weight)
        if self.table is not None:
            wanted = F.linear(h, self.facts)  # (B, L, G)
            logits = logits + torch.sparse.mm(self.table, wanted.flatten(0, 1).T).T.unflatten(0, wanted.shape[:2])
        each = F.cross_entropy(logits.mT, batch.targets.clamp(min=0), reduction="none")
        inside = batch.targets >= 0
        return (each * inside).sum(1) / inside.sum(1).clamp(min=1)


def released(dataset: Dataset, attributes: Attributes | None, settings: dict[str, Any]) -> tuple[Any, Gaussian]:
    """Popularity, or with a share for them counts; and what that costs."""
    items, offsets = dataset.packed_train()
    whole = dp.calibrate(epsilon=settings["epsilon"], delta=1 / dataset.num_users, sample_rate=1.0, steps=1)
    noise = whole / (settings["prior"] or POPULARITY) ** 0.5
    if settings["prior"]:
        found = TransitionCounts.fit(
            items, dataset.num_items, noise, offsets=offsets, attributes=attributes, ledger=dp.Ledger(), seed=0
        )
        return found, Gaussian(noise, label="transition counts", private=False)
    popular = dp.release_frequencies(items, dataset.num_items, noise, offsets=offsets, seed=settings["seed"])
    return popular, Gaussian(noise, label="frequencies", private=False)


def train(dataset: Dataset, table: csr_array | None, known: Any, event: Gaussian, settings: dict[str, Any]) -> Any:
    """DP-SGD with the rest of the budget."""
    users, batch_size, length = dataset.num_users, settings["batch_size"], settings["length"]
    rate, steps = batch_size / users, -(-settings["epochs"] * users // batch_size)
    sigma = dp.calibrate(epsilon=settings["epsilon"], delta=1 / users, sample_rate=rate, steps=steps, others=[event])
    torch.manual_seed(settings["seed"])
    model = AttributeTransformer(dataset.num_items, length, table, settings["residual"], dropout=0.1)
    counts = known if isinstance(known, TransitionCounts) else None
    if counts is None:
        model.set_frequencies(torch.from_numpy(known.p))
    clipping = dp.PhantomClipping(model)
    adam = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=settings["learning_rate"])
    private = dp.PrivateOptimizer(
        adam, noise_multiplier=sigma, clip_norm=1.0, expected_batch_size=batch_size, seed=settings["seed"]
    )
    for step, chosen in enumerate(dp.PoissonBatches(users, sample_rate=rate, steps=steps, seed=settings["seed"])):
        for group in private.param_groups:
            group["lr"] = settings["learning_rate"] * warmup_then_decay(step, steps, 0.2)
        order = chosen.users[np.argsort(dataset.train_lengths[chosen.users])]
        total = 0.0
        for part in chosen.part(order).split(ROWS):
            batch = Batch.from_histories([h[-length - 1 :] for h in dataset.histories(part.users.tolist())], length)
            prior = None if counts is None else prior_logits(counts, batch.items, batch.lengths)
            with clipping.users((batch, prior), part) as user:
                loss = model.losses(*user)
            clipping.backward(loss, dp.normalize(1.0))
            total += clipping.losses.sum().item()
        private.step(chosen)
        private.zero_grad()
        if step % 5 == 4 or step == steps - 1:
            print(f"  step {step + 1} of {steps}: loss {total / max(len(order), 1):.4f}", flush=True)
    return model.eval()


def metrics(model: Any, known: Any, dataset: Dataset, split: str) -> list[float]:
    def score(histories: list[np.ndarray]) -> Tensor:
        logits = model.scores(histories)
        if isinstance(known, TransitionCounts):
            logits = logits - model.bias + known.scores(histories)
        return logits

    with torch.no_grad():
        found = evaluate(score, dataset, split=split).served
    return [round(100 * float(function(found, 10)), 3) for function in (ndcg, hit)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=[*SETS, "synthetic"])
    parser.add_argument("--attributes", choices=("all", "none"), default="all")
    parser.add_argument("--prior", type=float, default=0.0)
    parser.add_argument("--residual", type=float, default=0.0)
    parser.add_argument("--epsilon", type=float, default=10.0)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", action="store_true")
    settings = vars(parser.parse_args())
    torch.set_num_threads(1)
    began, split = time.process_time(), "validation" if settings["validation"] else "test"
    dataset, attributes = made_up() if settings["data"] == "synthetic" else SETS[settings["data"]]()
    dataset = Dataset(dataset.items, dataset.offsets, dataset.user_ids, dataset.vocabulary, None, split != "test")
    table = None
    if settings["attributes"] == "all":
        assert attributes is not None
        exact = matrix(attributes)
        table = csr_array(exact.multiply(1 / np.sqrt(np.maximum(exact.sum(1), 1))))
    known, event = released(dataset, attributes, settings)
    model = train(dataset, table, known, event, settings)
    found = dict(zip(("ndcg@10", "hit@10"), metrics(model, known, dataset, split), strict=True))
    print(json.dumps({**settings, **found, "cpu_seconds": round(time.process_time() - began)}))


if __name__ == "__main__":
    main()
