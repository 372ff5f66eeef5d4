"""Calls, synchronisations and copies of a plain and a private step, on the mock device of the tests.

    python -m benchmarks.device_calls [--triton] [--json]

Counts are those of torch's dispatcher, so a GPU is asked for the same. `--triton` runs the noise kernel in Triton's
interpreter. The engine's self-check is off.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests import second_device
from torch import Tensor, nn

import dpformer as dp
from dpformer.models import Batch, Transformer
from dpformer.training.device_calls import Counts, DeviceCalls

USERS, LENGTH = 4, 12


Made = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]  # a model, the loss of each user, users' data


def gpt2(layers: int) -> Made:
    """A language model of Hugging Face; the loss of each user."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=100, n_positions=32)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    tokens = torch.randint(0, 100, (USERS, LENGTH)).to(second_device.NAME)

    def losses(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)

    return GPT2LMHeadModel(config), losses, tokens


def transformer(reattention: bool) -> Made:
    """Our own."""
    model = Transformer(100, LENGTH, dim=32, blocks=2, dropout=0.0, reattention=reattention)
    if reattention:
        model.item_error.fill_(0.1)
        model.weight_error.fill_(0.1)
    histories = [torch.randint(0, 100, (LENGTH,)).numpy() for _ in range(USERS)]
    batch = Batch.from_histories(histories, LENGTH).to(second_device.NAME)
    return model, lambda there, users: there(users), batch


MODELS: dict[str, Callable[[], Made]] = {
    "HF GPT-2, 2 layers": lambda: gpt2(2),
    "HF GPT-2, 6 layers": lambda: gpt2(6),
    "our Transformer": lambda: transformer(False),
    "our Transformer, Re-Attention": lambda: transformer(True),
}


def count(model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], data: Any, private: bool) -> dict[str, Counts]:
    """The third step."""
    model = model.to(second_device.NAME)
    inner = torch.optim.Adam(model.parameters(), foreach=True)
    clipping = dp.PhantomClipping(model, self_check=False) if private else None
    sizes: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": USERS}
    optimizer = dp.PrivateOptimizer(inner, **sizes) if private else inner
    for _ in range(3):
        counted = DeviceCalls(second_device.NAME)
        with counted:
            with counted.phase("forward"):
                if clipping is None:
                    found = losses(model, data)
                else:
                    with clipping.users(data) as user:
                        found = losses(model, user)
            with counted.phase("backward"):
                if clipping is None:
                    found.mean().backward()
                else:
                    clipping.backward(found, dp.clip(1.0))
            with counted.phase("step"):
                optimizer.step()
        optimizer.zero_grad()
    return {name: counted.phases[name] for name in ("forward", "backward", "step")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--triton", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.triton:
        os.environ["TRITON_INTERPRET"] = "1"
    second_device.add()
    rows: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, losses, data = build()
        for kind in ("plain", "private"):
            phases = count(model, losses, data, kind == "private")
            found = {**phases, "total": sum(phases.values(), Counts())}
            rows.setdefault(name, {})[kind] = {phase: counts.to_dict() for phase, counts in found.items()}
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("| model | phase | calls, plain → private | synchronisations | copies to the device |")
    print("| --- | --- | --- | --- | --- |")
    for name, kinds in rows.items():
        for phase, plain in kinds["plain"].items():
            pairs = [f"{plain[what]:,} → {kinds['private'][phase][what]:,}" for what in plain]
            print(f"| {name} | {phase} | {' | '.join(pairs)} |")


if __name__ == "__main__":
    main()
