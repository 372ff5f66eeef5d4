"""Re-Attention's effective error taken from Adam itself, at inference alone.

    DPFORMER_DATA=FOLDER python -m experiments.adam_error RUN

Adam's second moment v is made of released gradients, so it is public. The noise of a coordinate has the variance
ν² = (σC/B)² in each gradient, and has moved the parameter by Σ_t rate_t²·ν²/v in square. RUN is the folder of a run of
MovieLens-1M with Re-Attention that is under way: its checkpoint has the weights and v of the last step saved (v̂ is
nearly the mean square of all gradients so far: Adam forgets over 1,000 steps, more than were taken). Prints, by
popularity, the share of noise ν²/v̂, and NDCG@10 on test items with the correction as trained, off, and with the error
from Adam.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import tomllib
import torch
from experiments.after import HeldOut, groups, states
from experiments.cells import data_file
from safetensors import safe_open
from torch import Tensor

from dpformer.data import prepare
from dpformer.models import Transformer
from dpformer.reattention.error import EffectiveError
from dpformer.runs.checkpoint import _unpack
from dpformer.training.schedule import warmup_then_decay

SCALES = (1.0, 3.0)


def read(path: Path) -> dict[str, Any]:
    """The state of a checkpoint, of whatever version."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["dpformer-checkpoint"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    state: dict[str, Any] = _unpack(json.loads(header["body"])["state"], tensors)
    return state


def second_moments(model: Transformer, optimizer: dict[str, Any]) -> dict[str, Tensor]:
    """v̂ by name of parameter."""
    found = {}
    for number, (name, _) in enumerate(model.named_parameters()):
        state = optimizer["inner"]["state"][number]
        found[name] = state["exp_avg_sq"] / (1 - 0.999 ** int(state["step"]))
    return found


def main(folder: str) -> None:
    torch.set_num_threads(1)
    config = tomllib.loads((Path(folder) / "config.toml").read_text(encoding="utf-8"))
    state = read(Path(folder) / "checkpoint" / "state.safetensors")
    trainer, steps = state["trainer"], state["plan"]["steps"]
    optimizer = trainer["optimizer"]
    dataset = prepare(data_file("ml-1m"), max_length=200)
    model = Transformer(dataset.num_items, 200, dim=config["dim"], reattention=True).eval()
    model.load_state_dict(trainer["model"])
    noise = (optimizer["noise_multiplier"] * optimizer["clip_norm"] / optimizer["expected_batch_size"]) ** 2
    rates = (config["learning_rate"] * warmup_then_decay(step, steps) for step in range(trainer["step"]))
    moved = sum(rate**2 for rate in rates)
    share = {name: noise / v for name, v in second_moments(model, optimizer).items()}
    p = noise**0.5 / model.item_error  # the paper's error is σ/(B·p)
    group = groups(p, 5)
    rows = share["items.weight"].mean(1)
    found = {
        "step": trainer["step"],
        "noise share of item rows, rare … popular": [round(float(rows[group == g].mean()), 3) for g in range(5)],
        "items": [int((group == g).sum()) for g in range(5)],
        "noise share of other parameters": {n: round(float(s.mean()), 3) for n, s in share.items() if n[:5] != "items"},
    }
    print(json.dumps(found, indent=1, ensure_ascii=False), flush=True)
    held = HeldOut.of(dataset, 1)
    variants = {"as trained": model, "off": copy.deepcopy(model)}
    variants["off"].reattention = False
    for scale in SCALES:
        other = copy.deepcopy(model)
        other.set_error(EffectiveError(scale * (moved * rows).sqrt(), torch.tensor(scale * moved**0.5)))
        variants[f"from Adam, scale {scale:g}"] = other
    for name, variant in variants.items():
        table = variant.items.weight.detach()
        print(name, held.measure(states(variant, held) @ table.T + variant.bias), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
