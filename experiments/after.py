"""What is free after training: noisy item rows shrunk by what is known of their noise, and a prior of popularity.

    DPFORMER_DATA=FOLDER python -m experiments.after

Takes the released models of the decisive pairs (kept under .experiments/) and, of the runs of `experiments.networks`,
the last iterates and Adam's second moment. Nothing here looks at the data but to choose a constant on the item before
the last of each user (which these runs were trained on: no validation item was held out) and to measure on the last.

    rows       E_i ← μ_b + c_b (E_i − μ_b), b the group of items of like released popularity, c_b = max(0, 1 − κτ²/v_b),
               v_b the mean square of the group about its mean μ_b and τ² = Σ_t rate_t² the variance of Adam's noise
    singular   singular values of E about its mean, shrunk for noise with deviation κτ (Gavish and Donoho 2017)
    prior      logits + λ·ln p, p the released frequencies

A vanilla run releases no frequencies. Here it is given a release of its own with the noise that Re-Attention's has,
and `epsilon` says what both together cost.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experiments.cells import SEEDS, data_file, decisive
from experiments.store import ROOT, WORK
from torch import Tensor

from dpformer.accounting.accountant import epsilon_of
from dpformer.accounting.events import Event
from dpformer.data import Dataset, prepare
from dpformer.evaluation.metrics import hit, ndcg
from dpformer.models import Transformer
from dpformer.queries.frequencies import release_frequencies
from dpformer.runs import load_release
from dpformer.training.schedule import warmup_then_decay

STORE = ROOT / "docs" / "results" / "after.json"
GROUPS = 20  # of items of like popularity, equally many interactions each
KAPPAS = (0.1, 0.25, 0.5, 1.0)
LAMBDAS = (0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass
class HeldOut:
    """Users' histories before an item that is to be found, and what they have met."""

    histories: list[np.ndarray]
    targets: Tensor  # (U,)
    seen: Tensor  # (U, M) bool, without the target

    @classmethod
    def of(cls, dataset: Dataset, back: int) -> "HeldOut":
        """The item `back` places from the end of each user."""
        users = dataset.test_users
        stops = dataset.offsets[1:][users] - back
        histories = [dataset.items[a:b] for a, b in zip(dataset.offsets[users], stops, strict=True)]
        targets = torch.from_numpy(dataset.items[stops].astype(np.int64))
        seen = torch.zeros(len(users), dataset.num_items, dtype=torch.bool)
        for row, history in enumerate(histories):
            seen[row, torch.from_numpy(history.astype(np.int64))] = True
        seen[torch.arange(len(users)), targets] = False
        return cls(histories, targets, seen)

    def measure(self, logits: Tensor) -> tuple[float, float]:
        """NDCG@10 and HIT@10 in %, seen items masked, ties pessimistic."""
        logits = logits.masked_fill(self.seen, -math.inf)
        own = logits.gather(1, self.targets[:, None])
        ranks = (logits >= own).sum(1)
        return round(100 * float(ndcg(ranks, 10).mean()), 2), round(100 * float(hit(ranks, 10).mean()), 2)


@torch.no_grad()
def states(model: Transformer, held: HeldOut, at_once: int = 64) -> Tensor:
    """(U, d) the state after each history."""
    order = np.argsort([len(history) for history in held.histories], kind="stable")
    found = torch.empty(len(order), model.dim)
    for start in range(0, len(order), at_once):
        rows = order[start : start + at_once]
        found[torch.from_numpy(rows)] = model.final_state([held.histories[row] for row in rows])
    return found


def groups(p: Tensor, count: int = GROUPS) -> Tensor:
    """(M,) items in groups of equal use, the rarest first."""
    order = p.argsort()
    share = p[order].cumsum(0) / p.sum()
    group = torch.empty(len(p), dtype=torch.int64)
    group[order] = (share * count).ceil().long().clamp(1, count) - 1
    return group


def shrunk_rows(table: Tensor, group: Tensor, noise: float) -> Tensor:
    """Rows of each group towards its mean, by the share of `noise` in its variance."""
    out = table.clone()
    for number in group.unique():
        rows = table[group == number]
        mean = rows.mean(0)
        variance = float((rows - mean).square().mean()) * len(rows) / max(1, len(rows) - 1)
        out[group == number] = mean + max(0.0, 1 - noise / max(variance, 1e-12)) * (rows - mean)
    return out


def shrunk_values(table: Tensor, deviation: float) -> Tensor:
    """The optimal shrinker of singular values under Frobenius loss: √((y² − β − 1)² − 4β)/y, y = s/(deviation·√M)."""
    mean = table.mean(0)
    left, values, right = torch.linalg.svd(table - mean, full_matrices=False)
    beta = table.shape[1] / table.shape[0]
    y = values / (deviation * math.sqrt(table.shape[0]))
    kept = ((y.square() - beta - 1).square() - 4 * beta).clamp(min=0).sqrt() / y
    kept = torch.where(y > 1 + math.sqrt(beta), kept, 0.0)
    return mean + left * (kept * deviation * math.sqrt(table.shape[0])) @ right


class Released:
    """A released model and what is known about its noise."""

    def __init__(self, path: Path, dataset: Dataset, release_noise: float) -> None:
        found = load_release(path / "model.safetensors")
        self.model: Transformer = found.model.eval()
        facts = json.loads((path / "privacy.json").read_text(encoding="utf-8"))
        config = (path / "config.toml").read_text(encoding="utf-8")
        rate = float(next(line for line in config.splitlines() if line.startswith("learning_rate")).split("=")[1])
        steps = facts["steps"]
        self.variance = sum((rate * warmup_then_decay(t, steps)) ** 2 for t in range(steps))  # τ²
        self.epsilon = facts["epsilon"]
        if found.frequencies is not None:
            self.p = torch.as_tensor(found.frequencies).float()
        else:
            items, offsets = dataset.packed_train()
            release = release_frequencies(items, dataset.num_items, release_noise, offsets=offsets, seed=7)
            self.p = torch.from_numpy(release.p).float()
            events = [
                *(Event.from_dict({k: v for k, v in e.items() if k != "epsilon_alone"}) for e in facts["events"]),
                release.event,
            ]
            self.epsilon = epsilon_of(events, facts["delta"])  # type: ignore[arg-type]


def candidates(released: Released) -> dict[str, dict[str, Any]]:
    """kind → constant → (the table of the head, what is added to the logits)."""
    table, p, tau = released.model.items.weight.detach(), released.p, released.variance
    group, prior = groups(p), (p / p.sum()).log()
    return {
        "as released": {"": (table, 0.0)},
        "rows": {f"κ = {k:g}": (shrunk_rows(table, group, k * tau), 0.0) for k in KAPPAS},
        "singular values": {f"κ = {k:g}": (shrunk_values(table, math.sqrt(k * tau)), 0.0) for k in KAPPAS},
        "prior": {f"λ = {weight:g}": (table, weight * prior) for weight in LAMBDAS},
    }


def look(released: Released, before: HeldOut, last: HeldOut) -> dict[str, Any]:
    """For each kind the constant that is best on the items before the last, and what it gives on the last."""
    model = released.model
    states_before, states_last = states(model, before), states(model, last)
    out: dict[str, Any] = {"epsilon with frequencies": round(released.epsilon, 4)}
    for kind, choices in candidates(released).items():
        found = {name: before.measure(states_before @ t.T + prior) for name, (t, prior) in choices.items()}
        best = max(found, key=lambda name: found[name][0])
        table, prior = choices[best]
        out[kind] = {
            "constant": best, "chosen on": found[best], "test": last.measure(states_last @ table.T + prior),
            "all": {name: value[0] for name, value in found.items()},
        }  # fmt: skip
    out["rows, in the input too"] = both_sides(released, before, last)
    return out


def both_sides(released: Released, before: HeldOut, last: HeldOut) -> dict[str, Any]:
    """Rows shrunk where they go in as well; κ = 1, the noise as it is known."""
    model = Transformer(**released.model.arguments)
    model.load_state_dict(released.model.state_dict())
    table = shrunk_rows(model.items.weight.detach(), groups(released.p), released.variance)
    with torch.no_grad():
        model.items.weight.copy_(table)
    model.eval()
    found = [held.measure(states(model, held) @ table.T) for held in (before, last)]
    return {"constant": "κ = 1", "chosen on": found[0], "test": found[1]}


def main(*folders: str) -> None:
    torch.set_num_threads(1)
    dataset = prepare(data_file("ml-1m"), max_length=200)
    before, last = HeldOut.of(dataset, 2), HeldOut.of(dataset, 1)
    cells = [WORK / cell.name for seed in SEEDS for cell in decisive(seed)]
    found = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    for path in [Path(folder) for folder in folders] or cells:
        if path.name in found or not (path / "model.safetensors").exists():
            continue
        found[path.name] = look(Released(path, dataset, 7.7369), before, last)
        STORE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path.name, json.dumps(found[path.name], ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
