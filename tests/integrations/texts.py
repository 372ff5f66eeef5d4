"""Small checkpoints and texts of many authors, made here."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 40


def gpt2(seed: int = 0, dropout: float = 0.0, **changes: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **changes,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def rows(users: int = 24, most: int = 1, seed: int = 0) -> list[dict[str, Any]]:
    """Examples with an author each; authors have 1 … `most` of them, of different lengths."""
    draw = np.random.default_rng(seed)
    found = []
    for user in range(users):
        for _ in range(int(draw.integers(1, most + 1))):
            found.append(
                {
                    "author": f"u{user}",
                    "input_ids": draw.integers(1, VOCABULARY, int(draw.integers(4, 12))).tolist(),
                }
            )
    draw.shuffle(found)
    return found


def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As DataCollatorForLanguageModeling does, without a tokenizer: padded on the right, padding unlabelled."""
    longest = max(len(example["input_ids"]) for example in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, example in enumerate(examples):
        ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
        mask[row, : len(example["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 0.01,
        "save_strategy": "no", "logging_steps": 1, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**given, **changes})
