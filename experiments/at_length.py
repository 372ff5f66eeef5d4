"""Where attention goes after 60 epochs, and what each kind of attention does *at inference alone*.

    DPFORMER_DATA=FOLDER python -m experiments.at_length

Looks at the released models of MovieLens-1M at ε = 5 (kept under .experiments/): the attention that items of each
popularity draw, how much of it is held back, and the accuracy of each model with another kind of attention than it was
trained with. A vanilla run releases no frequencies, so its weights borrow the errors of the literal run of the same
seed, which did: together that would cost more than either. Writes docs/results/at-length.json.
"""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from experiments.ablation import changed
from experiments.cells import SEEDS, Cell, data_file
from experiments.literal import long_run
from experiments.store import ROOT, WORK, load, metrics

from dpformer.data import Dataset, prepare
from dpformer.evaluation.evaluate import scorer
from dpformer.models import Batch, Transformer
from dpformer.reattention.error import EffectiveError
from dpformer.runs import load_release

STORE = ROOT / "docs" / "results" / "at-length.json"
BUCKETS, READERS = 5, 256
TRAINED = ("vanilla", "reattention", "literal")
KINDS: dict[str, bool | str] = {"plain": False, "renormalised": "renormalised", "literal": "literal", "gate": "literal"}


def main() -> None:
    dataset = prepare(data_file("ml-1m"), max_length=200)
    found = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    for cell, model, error in models():
        build = (load(cell.name) or {}).get("build")
        if found.get(cell.name, {}).get("build") == build is not None:
            continue
        found[cell.name] = {"build": build, **look(model, error, dataset)}
        STORE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(cell.name, json.dumps(found[cell.name], indent=1), flush=True)


def models() -> Iterator[tuple[Cell, Transformer, EffectiveError]]:
    """The released models that are there, and how noisy their parameters are taken to be."""
    for seed in SEEDS:
        cells = [long_run("ml-1m", name, 5, seed) for name in TRAINED]
        paths = [WORK / cell.name / "model.safetensors" for cell in cells]
        if not paths[-1].exists():
            continue
        literal = load_release(paths[-1]).model
        for cell, path in zip(cells, paths, strict=True):
            if path.exists():
                model = load_release(path).model
                of = model if model.reattention else literal
                yield cell, model, EffectiveError(of.item_error, of.weight_error)


def look(model: Transformer, error: EffectiveError, dataset: Dataset) -> dict[str, Any]:
    p = frequencies(dataset)
    told: dict[str, Any] = {"accuracy": {}, "attention by popularity": {}, "row sums": {}}
    for kind in KINDS:
        with changed(kind) if kind == "gate" else nullcontext():
            other = with_attention(model, error, kind)
            told["accuracy"][kind] = metrics(scorer(other), dataset)["masked"]
            told["attention by popularity"][kind], told["row sums"][kind] = drawn(other, dataset, p)
    return {**told, "deviation of item rows by popularity": rows(model, p)}


def with_attention(model: Transformer, error: EffectiveError, kind: str) -> Transformer:
    """The same weights with another kind of attention."""
    other = Transformer(**{**model.arguments, "reattention": KINDS[kind]})
    other.load_state_dict(model.state_dict(), strict=False)
    other.set_error(error)
    return other.eval()


def frequencies(dataset: Dataset) -> torch.Tensor:
    """(M,) share of users who have met an item."""
    items, offsets = dataset.packed_train()
    users = np.repeat(np.arange(dataset.num_users), np.diff(offsets))
    pairs = np.unique(users * dataset.num_items + items)
    return torch.from_numpy(np.bincount(pairs % dataset.num_items, minlength=dataset.num_items) / dataset.num_users)


def buckets(p: torch.Tensor) -> torch.Tensor:
    """(M,) items in buckets of equal use, the rarest first."""
    order = p.argsort()
    share = p[order].cumsum(0) / p.sum()
    bucket = torch.empty(len(p), dtype=torch.int64)
    bucket[order] = (share * BUCKETS).ceil().long().clamp(1, BUCKETS) - 1
    return bucket


@torch.no_grad()
def drawn(model: Transformer, dataset: Dataset, p: torch.Tensor) -> tuple[list[list[float]], list[float]]:
    """Of each block, the mean attention on items of a bucket, where 1 is what looking evenly at all would give; and the
    mean sum of a row."""
    chosen = np.linspace(0, dataset.num_users - 1, READERS).astype(int)
    batch, bucket = Batch.for_scores(dataset.histories(chosen), model.max_length), buckets(p)
    length = batch.items.shape[1]
    place = torch.arange(length)
    query = (place < batch.lengths[:, None]) & (place >= 10)  # early queries have no choice
    pairs = query[:, :, None] & torch.ones(length, length, dtype=torch.bool).tril()
    of_key = bucket[batch.items][:, None, :].expand_as(pairs)
    found, sums = [], []
    for weights in model.attention_maps(batch):
        relative = weights.mean(1) * (place + 1)[:, None]
        found.append([round(relative[pairs & (of_key == b)].mean().item(), 4) for b in range(BUCKETS)])
        sums.append(round(weights.sum(-1).mean(1)[query].mean().item(), 4))
    return found, sums


def rows(model: Transformer, p: torch.Tensor) -> list[float]:
    """Root mean square of the item rows of a bucket, signal and noise."""
    bucket, weight = buckets(p), model.items.weight.detach()
    return [round(weight[bucket == b].square().mean().sqrt().item(), 5) for b in range(BUCKETS)]


if __name__ == "__main__":
    main()
