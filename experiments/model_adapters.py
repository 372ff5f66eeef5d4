"""Adapters of peft on a small GPT-2 or T5, and the ways to train only some of a model's own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.model_cases import Case, Loss, causal, ids, small_config
from torch import nn

LAYERS = ["c_attn", "c_fc"]
LLAMA = ["q_proj", "v_proj"]

# name → class of peft, its options; on Llama, whose layers are nn.Linear
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, "target_modules": LLAMA}),
    "LoRA, rank-stabilised": ("LoraConfig", {"r": 2, "target_modules": LLAMA, "use_rslora": True}),
    "LoRA of embeddings": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "LoRA with biases": ("LoraConfig", {"r": 2, "target_modules": LLAMA, "lora_bias": True}),
    "LoRA and a trained norm": ("LoraConfig", {"r": 2, "target_modules": LLAMA, "modules_to_save": ["norm"]}),
    "DoRA": ("LoraConfig", {"r": 2, "target_modules": LLAMA, "use_dora": True}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 3, "target_r": 2, "target_modules": LLAMA, "total_step": 10}),
    "LoHa": ("LoHaConfig", {"r": 2, "target_modules": LLAMA}),
    "LoKr": ("LoKrConfig", {"r": 2, "target_modules": LLAMA}),
    "IA³": ("IA3Config", {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4, "target_modules": LLAMA}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, "target_modules": LLAMA}),
    "HRA": ("HRAConfig", {"r": 2, "target_modules": LLAMA}),
    "VeRA": ("VeraConfig", {"r": 2, "target_modules": LLAMA, "save_projection": False}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 10, "target_modules": LLAMA}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "Bone / MiSS": ("MissConfig", {"r": 2, "target_modules": LLAMA}),
    "RandLoRA": ("RandLoraConfig", {"r": 2, "target_modules": LLAMA, "save_projection": False}),
    "C³A": ("C3AConfig", {"block_size": 4, "target_modules": LLAMA}),
    "SHiRA": ("ShiraConfig", {"r": 1, "target_modules": LLAMA}),
    "RoAd": ("RoadConfig", {"group_size": 4, "target_modules": LLAMA}),
    "trainable tokens": ("TrainableTokensConfig", {"token_indices": [3, 4, 5], "target_modules": ["embed_tokens"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning with projection": (
        "PrefixTuningConfig", {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 8}
    ),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "P-tuning with an LSTM": (
        "PromptEncoderConfig",
        {"num_virtual_tokens": 3, "encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM"},
    ),
    "LLaMA-Adapter": ("AdaptionPromptConfig", {"adapter_len": 3, "adapter_layers": 1}),
}  # fmt: skip


def base(family: str = "llama") -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(small_config(family))


def _adapted(kind: str, options: dict[str, Any], family: str = "llama") -> nn.Module:
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", **options)
    return Loss(peft.get_peft_model(base(family), config), causal)


def _part(chosen: Callable[[str], bool]) -> nn.Module:
    body = base("gpt2")
    for name, p in body.named_parameters():
        p.requires_grad_(chosen(name))
    return Loss(body, causal)


def adapters() -> list[Case]:
    group = "adapters (peft) on Llama"
    cases = [
        Case(group, name, lambda kind=kind, options=options: _adapted(kind, options), ids)
        for name, (kind, options) in CONFIGS.items()
    ]
    gpt2 = {"r": 2, "target_modules": LAYERS, "fan_in_fan_out": True}
    cases += [
        Case(group, "LoRA on GPT-2", lambda: _adapted("LoraConfig", gpt2, "gpt2"), ids),
        Case(group, "DoRA on GPT-2", lambda: _adapted("LoraConfig", {**gpt2, "use_dora": True}, "gpt2"), ids),
    ]
    group = "a part of GPT-2's own parameters"
    return [
        *cases,
        Case(group, "BitFit (biases)", lambda: _part(lambda name: name.endswith("bias")), ids),
        Case(group, "normalisation only", lambda: _part(lambda name: ".ln_" in name), ids),
        Case(group, "last block", lambda: _part(lambda name: ".h.1." in name), ids),
        Case(group, "tied embedding only", lambda: _part(lambda name: "wte" in name), ids),
    ]
