"""Attention distraction and its cure, in about a minute: python experiments/distraction.py [--out FOLDER]

Three looks, each nearer to real training, from the theory's own setting to a model trained with DP-SGD:

1. *Keys.* A few of 64 keys get Gaussian noise. How much more attention do they draw, on average over noise?
   Theory (paper, Eq. 14): exp(Var[score]/2) times as much.
2. *Network.* A small Transformer, trained without noise on long-tailed data, gets noise on every parameter with the
   deviations of the effective error, σ/(B·p_i) for item rows. How much attention do rare items draw?
3. *Training.* The same Transformer trained with DP-SGD (Phantom Clipping, Adam), with and without Re-Attention, on the
   same batches with different noise: attention drawn by rare items; and how noisy the rows of E really are (also by
   plain SGD, where the noise of T steps is known: rate·σ·C·√T/B in every coordinate).

Writes distraction-keys.svg, distraction-items.svg and distraction.json. No privacy is claimed here: the data is
synthetic, frequencies are exact and the noise is seeded.
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

import dpformer as dp
from dpformer.data import synthetic
from dpformer.models import Batch, Transformer
from dpformer.reattention import attention_weights

USERS, ITEMS, LENGTH, DIM = 2000, 300, 20, 32
BATCH, STEPS, NOISE = 128, 80, 1.0
RATES = {"Adam": 8e-3, "SGD": 1.0}
BUCKETS = 5
RARE, FREQUENT = "#b5452c", "#2b6777"


# 1. Keys


def keys(variances: list[float], draws: int = 1000) -> dict[str, list[float]]:
    """Mean attention to 2 noisy keys of 64, over noise draws and 16 queries, relative to that without noise."""
    random = torch.Generator().manual_seed(0)
    length, dim, queries = 64, 64, 16
    k = 0.5 * torch.randn(1, 1, length, dim, generator=random)
    q = torch.randn(1, 1, queries, dim, generator=random)
    q = q / q.square().mean(-1, keepdim=True).sqrt()  # Σ q² = d, so that Var[score] = Var[key]
    clean = _to_noisy(attention_weights(q, k, causal=False))
    found: dict[str, list[float]] = {"variance": variances, "theory": [math.exp(v / 2) for v in variances]}
    for name in ("plain", "renormalised", "literal"):
        found[name] = []
    for v in variances:
        var = torch.zeros(1, 1, length, dim)
        var[:, :, :2] = v
        noisy = k + var.sqrt() * torch.randn(draws, 1, length, dim, generator=random)
        many = q.expand(draws, 1, queries, dim)
        found["plain"].append((_to_noisy(attention_weights(many, noisy, causal=False)) / clean).item())
        for variant in ("renormalised", "literal"):
            weights = attention_weights(many, noisy, key_var=var.expand_as(noisy), variant=variant, causal=False)
            found[variant].append((_to_noisy(weights) / clean).item())
    return found


def _to_noisy(weights: Tensor) -> Tensor:
    return weights[..., :2].sum(-1).mean()


# 2. and 3. A small Transformer on long-tailed data


class Data:
    """Synthetic users, document frequencies p, and items in five buckets of equal use, the rarest first."""

    def __init__(self) -> None:
        dataset = synthetic(seed=0, users=USERS, items=ITEMS, max_length=LENGTH)
        self.histories = dataset.histories(range(USERS))
        self.p = torch.zeros(ITEMS)
        for history in self.histories:
            self.p[np.unique(history)] += 1 / USERS
        order = self.p.argsort()
        self.bucket = torch.empty(ITEMS, dtype=torch.int64)
        self.bucket[order] = (self.p[order].cumsum(0) / self.p.sum() * BUCKETS).ceil().long().clamp(1, BUCKETS) - 1
        self.held = Batch.from_histories(self.histories[:64], LENGTH)

    def users(self) -> list[list[np.ndarray]]:
        """The same Poisson batches for every model."""
        random = np.random.default_rng(1)
        return [[self.histories[u] for u in np.flatnonzero(random.random(USERS) < BATCH / USERS)] for _ in range(STEPS)]

    def bucket_p(self) -> list[float]:
        return [self.p[self.bucket == b].mean().item() for b in range(BUCKETS)]


def drawn(model: Transformer, data: Data) -> Tensor:
    """(blocks, BUCKETS): mean attention on items of a bucket, 1 = what looking evenly at all would give."""
    length = data.held.items.shape[1]
    place = torch.arange(length)
    query = (place < data.held.lengths[:, None]) & (place >= 4)  # later queries: the early ones have no choice
    pairs = query[:, :, None] & torch.ones(length, length, dtype=torch.bool).tril()
    bucket = data.bucket[data.held.items][:, None, :].expand_as(pairs)
    found = []
    for weights in model.attention_maps(data.held):
        relative = weights.mean(1) * (place + 1)[:, None]
        found.append(torch.stack([relative[pairs & (bucket == b)].mean() for b in range(BUCKETS)]))
    return torch.stack(found)


def train(data: Data, noise: float, reattention: bool, seed: int, optimizer: str = "Adam") -> Transformer:
    torch.manual_seed(0)  # the same start for all
    model = Transformer(ITEMS, LENGTH, dim=DIM, reattention=reattention, dropout=0.0)
    model.set_frequencies(data.p)
    model.set_privacy(noise, BATCH, data.p)
    clipping = dp.PhantomClipping(model, self_check=False)
    inner = getattr(torch.optim, optimizer)(model.parameters(), lr=RATES[optimizer])
    private = dp.PrivateOptimizer(inner, noise_multiplier=noise, clip_norm=1.0, expected_batch_size=BATCH, seed=seed)
    for histories in data.users():
        with clipping.users(Batch.from_histories(histories, LENGTH)) as user:
            loss = model(user)
        clipping.backward(loss, dp.normalize(1.0))
        private.step()
        private.zero_grad()
    return model.eval()


def network(clean: Transformer, data: Data, scales: list[float], draws: int = 25) -> dict[str, list]:
    """Noise of the effective error on a trained network: attention by bucket relative to that without noise."""
    reference = drawn(clean, data)
    corrected = Transformer(ITEMS, LENGTH, dim=DIM, reattention=True).eval()
    found: dict[str, list] = {"scales": scales, "plain": [], "re-attention": []}
    torch.manual_seed(2)
    for scale in scales:
        corrected.set_privacy(NOISE, BATCH, data.p, scale=scale)
        sums = torch.zeros(2, *reference.shape)
        for _ in range(draws):
            noisy = copy.deepcopy(clean)
            with torch.no_grad():
                for name, parameter in noisy.named_parameters():
                    item = name == "items.weight"
                    deviation = corrected.item_error[:, None] if item else corrected.weight_error
                    parameter += deviation * torch.randn_like(parameter)
            corrected.load_state_dict(noisy.state_dict(), strict=False)
            sums += torch.stack([drawn(noisy, data), drawn(corrected, data)]) / draws
        for name, mean in zip(("plain", "re-attention"), sums, strict=True):
            found[name].append((mean / reference).tolist())
    return found


def training(clean: Transformer, data: Data, runs: int = 3) -> dict[str, list]:
    """DP-SGD with different noise: attention by bucket relative to training without noise."""
    reference = drawn(clean, data)
    found: dict[str, list] = {"noise_free": reference.tolist()}
    for name, reattention in (("plain", False), ("re-attention", True)):
        models = [train(data, NOISE, reattention, seed) for seed in range(runs)]
        each = torch.stack([drawn(model, data) for model in models]) / reference
        found[name] = each.mean(0).tolist()
        found[f"{name}, standard error"] = (each.std(0) / math.sqrt(runs)).tolist()
        if not reattention:
            found["rows"] = [row_noise(models, data, "Adam")]
    found["rows"].append(row_noise([train(data, NOISE, False, seed, "SGD") for seed in range(runs)], data, "SGD"))
    return found


def row_noise(models: list[Transformer], data: Data, optimizer: str) -> dict[str, object]:
    """How far rows of E are from each other in runs that differ by noise alone, beside the effective error."""
    rows = torch.stack([model.items.weight.detach() for model in models])
    deviation = rows.var(0).mean(1).sqrt()  # (M,)
    effective = NOISE / (BATCH * data.p)
    return {
        "optimizer": optimizer,
        "deviation": [deviation[data.bucket == b].mean().item() for b in range(BUCKETS)],
        "size": rows.square().mean().sqrt().item(),
        "effective_error": [effective[data.bucket == b].mean().item() for b in range(BUCKETS)],
        # deviation ~ p^exponent: −1 if it were the effective error, 0 if all rows are equally noisy
        "exponent": float(np.polyfit(data.p.log().numpy(), deviation.log().numpy(), 1)[0]),
        "random_walk": RATES[optimizer] * NOISE / BATCH * math.sqrt(STEPS) if optimizer == "SGD" else None,
    }


# Plots


def plot_keys(found: dict[str, list[float]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    x = found["variance"]
    axis.plot(x, found["theory"], color="0.6", label="theory: exp(variance / 2)")
    axis.plot(x, found["plain"], "o", color=RARE, label="plain attention")
    axis.plot(x, found["renormalised"], "o", color=FREQUENT, label="Re-Attention")
    axis.plot(x, found["literal"], "x", color=FREQUENT, label="Re-Attention, literal")
    axis.axhline(1, color="0.8", linewidth=0.8, zorder=0)
    axis.set(xlabel="variance of the score", ylabel="attention drawn by noisy keys\n(1 = without noise)")
    axis.set_ylim(0, 1.1 * max(found["plain"]))
    axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def plot_items(in_network: dict[str, list], in_training: dict[str, list], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.4), layout="constrained")
    for name, style in (("plain", "o-"), ("re-attention", "s--")):
        ratios = np.array(in_network[name])  # (scales, blocks, buckets)
        for bucket, color, label in ((0, RARE, "rarest"), (BUCKETS - 1, FREQUENT, "most frequent")):
            axes[0].plot(in_network["scales"], ratios[:, 0, bucket], style, color=color, label=f"{label}, {name}")
    axes[0].set(title="noise on a trained network, block 1", xlabel="scale of the effective error", xscale="log")
    axes[0].set_xticks(in_network["scales"], [f"{scale:g}" for scale in in_network["scales"]])
    axes[0].minorticks_off()
    for block in range(2):
        axis = axes[1 + block]
        for name, color in (("plain", RARE), ("re-attention", FREQUENT)):
            error = np.array(in_training[f"{name}, standard error"])[block]
            axis.errorbar(range(BUCKETS), np.array(in_training[name])[block], error, fmt="o-", color=color, label=name)
        axis.set(title=f"trained with DP-SGD, block {block + 1}", xlabel="items, rarest to most frequent")
        axis.set_xticks(range(BUCKETS))
    for axis in axes:
        axis.axhline(1, color="0.8", linewidth=0.8, zorder=0)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("attention drawn\n(1 = without noise)")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of plots and numbers")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    matplotlib.rcParams |= {"svg.hashsalt": "dpformer", "svg.fonttype": "none"}  # the same bytes for the same numbers
    start = time.perf_counter()
    in_keys = keys([0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
    plot_keys(in_keys, out / "distraction-keys.svg")
    print(f"keys: {time.perf_counter() - start:.0f} s")
    data = Data()
    clean = train(data, 0.0, False, 0)
    in_network = network(clean, data, [0.25, 0.5, 1.0, 2.0])
    print(f"network: {time.perf_counter() - start:.0f} s")
    in_training = training(clean, data)
    print(f"training: {time.perf_counter() - start:.0f} s")
    plot_items(in_network, in_training, out / "distraction-items.svg")
    found = {"keys": in_keys, "p": data.bucket_p(), "network": in_network, "training": in_training}
    rounded = json.loads(json.dumps(found), parse_float=lambda number: round(float(number), 4))
    (out / "distraction.json").write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
