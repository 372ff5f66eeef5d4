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


def bert(layers: int) -> Made:
    """A classifier of Hugging Face."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"num_hidden_layers": layers, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=100, max_position_embeddings=32, **sizes)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    tokens = torch.randint(0, 100, (USERS, LENGTH)).to(second_device.NAME)
    labels = torch.randint(0, 2, (USERS,)).to(second_device.NAME)

    def losses(model: nn.Module, data: Any) -> Tensor:
        tokens, labels = data
        return F.cross_entropy(model(input_ids=tokens).logits, labels, reduction="none")

    return BertForSequenceClassification(config), losses, (tokens, labels)


def lora(layers: int) -> Made:
    """GPT-2 with trainable adapters of low rank, the rest frozen."""
    from peft import LoraConfig, get_peft_model

    model, losses, tokens = gpt2(layers)
    adapters = LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    return get_peft_model(model, adapters), losses, tokens  # type: ignore[arg-type]


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
    "HF BERT, 2 layers": lambda: bert(2),
    "HF GPT-2, 2 layers, LoRA": lambda: lora(2),
    "our Transformer": lambda: transformer(False),
    "our Transformer, Re-Attention": lambda: transformer(True),
}


def count(
    model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], data: Any, private: bool, micro_batches: int = 1
) -> dict[str, Counts]:
    """The third step; each micro-batch has all users' data."""
    model = model.to(second_device.NAME)
    inner = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], foreach=True)
    clipping = dp.PhantomClipping(model, self_check=False) if private else None
    sizes: dict[str, Any] = {"noise_multiplier": 1.0, "clip_norm": 1.0, "expected_batch_size": USERS}
    optimizer = dp.PrivateOptimizer(inner, **sizes) if private else inner
    for _ in range(3):
        counted = DeviceCalls(second_device.NAME)
        with counted:
            for _ in range(micro_batches):
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
    cases = [(name, build, 1) for name, build in MODELS.items()]
    cases.append(("HF GPT-2, 2 layers, 3 micro-batches", MODELS["HF GPT-2, 2 layers"], 3))
    for name, build, micro_batches in cases:
        torch.manual_seed(0)
        model, losses, data = build()
        for kind in ("plain", "private"):
            phases = count(model, losses, data, kind == "private", micro_batches)
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
