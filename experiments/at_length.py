"""Re-Attention after 354 steps: where attention goes, and what the correction does.

    DPFORMER_DATA=FOLDER python -m experiments.at_length

Looks at the released models of the decisive pairs (kept under .experiments/): attention that items of each popularity
draw, the variance of attention scores that Re-Attention assumes, and the accuracy of each model with the correction
switched on or off *at inference alone*. A vanilla run releases no frequencies, so switching it on takes exact ones: an
upper bound, not a private result. Writes docs/results/at-length.json.
"""

import copy
import json
from typing import Any

import numpy as np
import torch
from experiments.cells import SEEDS, data_file, decisive
from experiments.store import ROOT, WORK, metrics

from dpformer.data import Dataset, prepare
from dpformer.evaluation.evaluate import scorer
from dpformer.models import Batch, Transformer
from dpformer.runs import load_release

STORE = ROOT / "docs" / "results" / "at-length.json"
BUCKETS, READERS = 5, 256
SCALES = (0.3, 1.0, 3.0)


def main() -> None:
    dataset = prepare(data_file("ml-1m"), max_length=200)
    p = frequencies(dataset)
    found = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    for seed in SEEDS:
        for cell in decisive(seed):
            path = WORK / cell.name / "model.safetensors"
            if cell.name in found or not path.exists():
                continue
            model = load_release(path).model.eval()
            statement = json.loads((path.parent / "privacy.json").read_text(encoding="utf-8"))
            found[cell.name] = look(model, dataset, p, statement)
            STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(cell.name, json.dumps(found[cell.name], indent=1), flush=True)


def frequencies(dataset: Dataset) -> torch.Tensor:
    """(M,) share of users who have met an item."""
    items, offsets = dataset.packed_train()
    users = np.repeat(np.arange(dataset.num_users), np.diff(offsets))
    pairs = np.unique(users * dataset.num_items + items)
    return torch.from_numpy(np.bincount(pairs % dataset.num_items, minlength=dataset.num_items) / dataset.num_users)


def look(model: Transformer, dataset: Dataset, p: torch.Tensor, statement: dict[str, Any]) -> dict[str, Any]:
    batch_size = statement["sample_rate"] * dataset.num_users
    variants = {"as trained": model, **switched(model, p.float(), statement["noise_multiplier"], batch_size)}
    return {
        "accuracy": {name: metrics(scorer(variant), dataset)["masked"] for name, variant in variants.items()},
        "attention by popularity": {name: drawn(variant, dataset, p) for name, variant in variants.items()},
        "deviation of item rows by popularity": rows(model, p),
    }


def switched(model: Transformer, p: torch.Tensor, sigma: float, batch_size: float) -> dict[str, Transformer]:
    """The same weights with the correction off, or on with several scales of the effective error."""
    made = {}
    for scale in SCALES if not model.reattention else ():
        other = Transformer(**{**model.arguments, "reattention": True})
        other.load_state_dict(model.state_dict(), strict=False)
        other.set_privacy(sigma, batch_size, p.clamp(min=1 / 6040), scale)
        made[f"corrected at inference, scale {scale:g}"] = other.eval()
    if model.reattention:
        plain = copy.deepcopy(model)
        plain.reattention = False
        made["not corrected at inference"] = plain
    return made


def buckets(p: torch.Tensor) -> torch.Tensor:
    """(M,) items in buckets of equal use, the rarest first."""
    order = p.argsort()
    share = p[order].cumsum(0) / p.sum()
    bucket = torch.empty(len(p), dtype=torch.int64)
    bucket[order] = (share * BUCKETS).ceil().long().clamp(1, BUCKETS) - 1
    return bucket


@torch.no_grad()
def drawn(model: Transformer, dataset: Dataset, p: torch.Tensor) -> list[list[float]]:
    """(blocks, BUCKETS): mean attention on items of a bucket; 1 is what looking evenly at all would give."""
    chosen = np.linspace(0, dataset.num_users - 1, READERS).astype(int)
    batch, bucket = Batch.for_scores(dataset.histories(chosen), model.max_length), buckets(p)
    length = batch.items.shape[1]
    place = torch.arange(length)
    query = (place < batch.lengths[:, None]) & (place >= 10)  # early queries have no choice
    pairs = query[:, :, None] & torch.ones(length, length, dtype=torch.bool).tril()
    of_key = bucket[batch.items][:, None, :].expand_as(pairs)
    found = []
    for weights in model.attention_maps(batch):
        relative = weights.mean(1) * (place + 1)[:, None]
        found.append([round(relative[pairs & (of_key == b)].mean().item(), 4) for b in range(BUCKETS)])
    return found


def rows(model: Transformer, p: torch.Tensor) -> list[float]:
    """Root mean square of the item rows of a bucket, signal and noise."""
    bucket, weight = buckets(p), model.items.weight.detach()
    return [round(weight[bucket == b].square().mean().sqrt().item(), 5) for b in range(BUCKETS)]


if __name__ == "__main__":
    main()
