"""Small models of many kinds for docs/results/models.md: Hugging Face families, adapters of peft, layers of torch.

A case makes a module that maps a batch of users to one loss per user. Sizes are tiny and weights random: what is asked
is whether the gradients of each user are exact, which depends on how a model is written, not on how large it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, USERS, WIDTH = 24, 6, 3, 16


@dataclass(frozen=True)
class Case:
    group: str
    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(3, VOCABULARY, (USERS, LENGTH)),)


def floats(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(USERS, *shape),)


# -- Hugging Face -----------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return text.split()


# Set wherever a config has an attribute of this name: families name the same size in many ways.
SMALL: dict[str, Any] = dict.fromkeys(
    [
        "hidden_size",
        "d_model",
        "n_embd",
        "dim",
        "embedding_size",
        "emb_dim",
        "d_embed",
        "model_dim",
        "embed_dim",
        "hidden_dim",
        "classifier_proj_size",
        "pooler_hidden_size",
    ],
    WIDTH,
) | dict.fromkeys(_words("intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner ffn_hidden_size"), 24)
SMALL |= dict.fromkeys(
    [
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
        "num_decoder_layers",
        "depth",
    ],
    2,
)
SMALL |= dict.fromkeys(
    [
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "num_encoder_attention_heads",
        "num_decoder_attention_heads",
    ],
    2,
)
SMALL |= dict.fromkeys(["num_key_value_heads", "num_kv_heads"], 1)
SMALL |= dict.fromkeys(_words("head_dim d_kv kv_channels"), 8)
SMALL |= dict.fromkeys(_words("max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length"), 64)
SMALL |= dict.fromkeys(_words("num_local_experts num_experts n_routed_experts moe_num_experts"), 4)
SMALL |= {"vocab_size": VOCABULARY, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "sliding_window": 4}
SMALL |= {"shared_expert_intermediate_size": 12, "state_size": 4, "conv_kernel": 3, "time_step_rank": 4}
SMALL |= {"image_size": 8, "patch_size": 4, "num_channels": 3, "word_embed_proj_dim": WIDTH, "type_vocab_size": 2}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False}
SMALL |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 8}
SMALL |= {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "qk_head_dim": 8}

# What a family needs beyond that.
FAMILY: dict[str, dict[str, Any]] = {
    "codegen": {"n_head": 4, "n_embd": 32, "rotary_dim": 4},
    "deepseek_v2": {"num_key_value_heads": 2, "head_dim": 4},
    "deepseek_v3": {"num_key_value_heads": 2, "head_dim": 4},
    "diffllama": {"num_key_value_heads": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "mobilevit": {"image_size": 64, "hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 8]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "mpt": {"d_model": WIDTH},
    "bloom": {"hidden_size": WIDTH},
    "gptj": {"rotary_dim": 4},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4, "expand": 2},
    "reformer": {},
    "convbert": {"conv_kernel_size": 3, "num_groups": 1, "head_ratio": 1},
    "squeezebert": {"q_groups": 1, "k_groups": 1, "v_groups": 1},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "swin": {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16,
             "patch_size": 2},
    "convnext": {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "image_size": 16},
    "resnet": {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8, "image_size": 16},
    "mobilenet_v2": {"image_size": 16},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1], "d_head": 8, "d_inner": 24, "num_decoder_layers": 1},
    "prophetnet": {"num_encoder_layers": 2, "num_buckets": 8, "relative_max_distance": 16},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "position_embedding_type": "rotary", "token_dropout": False},
    "levit": {"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2],
              "depths": [1, 1, 1], "key_dim": [4, 4, 4]},
    "pvt": {"image_size": 32, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
            "hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2]},
    "efficientnet": {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "canine": {"local_transformer_stride": 2, "downsampling_rate": 2, "num_hash_buckets": 8},
    "nystromformer": {"num_landmarks": 3, "segment_means_seq_len": LENGTH, "conv_kernel_size": 3},
    "longformer": {"attention_window": [4, 4]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "wav2vec2": {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2,
                 "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    "rwkv": {"attention_hidden_size": WIDTH},
    "xlm": {"emb_dim": WIDTH},
    "fsmt": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "langs": ["a", "b"]},
    "ctrl": {"dff": 24},
    "mobilebert": {"intra_bottleneck_size": 8, "num_feedforward_networks": 1, "embedding_size": 8},
    "recurrent_gemma": {"lru_width": WIDTH, "attention_window_size": 4, "block_types": ["recurrent", "attention"]},
    "falcon": {"new_decoder_architecture": False},
}  # fmt: skip

CAUSAL = [
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "codegen",
    "opt",
    "bloom",
    "mpt",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "falcon",
    "stablelm",
    "starcoder2",
    "olmo",
    "olmo2",
    "olmoe",
    "granite",
    "granitemoe",
    "cohere",
    "persimmon",
    "biogpt",
    "ctrl",
    "gpt_bigcode",
    "openai-gpt",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
    "recurrent_gemma",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm",
    "smollm3",
    "modernbert-decoder",
    "vaultgemma",
    "diffllama",
    "nemotron",
    "xglm",
]
MASKED = [
    "bert",
    "roberta",
    "albert",
    "distilbert",
    "electra",
    "deberta",
    "deberta-v2",
    "camembert",
    "xlm-roberta",
    "mpnet",
    "modernbert",
    "squeezebert",
    "convbert",
    "fnet",
    "ibert",
    "rembert",
    "roformer",
    "layoutlm",
    "longformer",
    "big_bird",
    "yoso",
    "xlm",
    "flaubert",
    "megatron-bert",
    "roberta-prelayernorm",
    "eurobert",
    "data2vec-text",
    "ernie",
    "mobilebert",
    "funnel",
    "esm",
    "nystromformer",
]
SEQ2SEQ = [
    "t5",
    "mt5",
    "umt5",
    "bart",
    "mbart",
    "pegasus",
    "marian",
    "blenderbot",
    "blenderbot-small",
    "longt5",
    "switch_transformers",
    "m2m_100",
    "led",
    "plbart",
    "bigbird_pegasus",
    "t5gemma",
    "prophetnet",
    "fsmt",
]
VISION = [
    "vit",
    "beit",
    "swin",
    "convnext",
    "resnet",
    "dinov2",
    "vit_msn",
    "mobilenet_v2",
    "mobilevit",
    "poolformer",
    "regnet",
    "focalnet",
    "ijepa",
    "deit",
    "levit",
    "pvt",
    "efficientnet",
    "hiera",
    "siglip",
]

# Families of which transformers has several models for the task.
ARCHITECTURE = {"deit": "DeiTForImageClassification", "levit": "LevitForImageClassification"}


def small_config(family: str) -> Any:
    """Made anew from small sizes, so that what is derived from them is small too."""
    from transformers import AutoConfig

    given = AutoConfig.for_model(family)
    sizes = _known(given) | FAMILY.get(family, {})
    for name in ("encoder", "decoder", "text_config"):
        if hasattr(getattr(given, name, None), "to_dict"):
            part = getattr(given, name)
            sizes[name] = type(part)(**_known(part))
    for name in ("head_dim", "num_hidden_layers"):
        if isinstance(getattr(type(given), name, None), property):
            sizes.pop(name, None)  # derived from other sizes
    config = AutoConfig.for_model(family, **sizes)
    for name, value in sizes.items():
        with contextlib.suppress(AttributeError, NotImplementedError):  # derived from other sizes
            setattr(config, name, value)
    if "layer_types" in vars(config) and isinstance(config.layer_types, list):
        config.layer_types = config.layer_types[:2]
    return config


def _known(config: Any) -> dict[str, Any]:
    """The sizes that this config has, under its names."""
    known = {}
    for name, value in SMALL.items():
        with contextlib.suppress(AttributeError, NotImplementedError):
            if isinstance(getattr(config, name), (int, float)) or name.endswith("_id"):
                known[name] = value
    return known


class Loss(nn.Module):
    """A Hugging Face model with one loss per user."""

    def __init__(self, body: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.run = body, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.body, x)


def token_loss(logits: Tensor, x: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), x.flatten(), reduction="none")
    return each.view(x.shape).sum(1)


def causal(body: nn.Module, x: Tensor) -> Tensor:
    logits = body(input_ids=x).logits
    return token_loss(logits[:, -x.shape[1] : -1], x[:, 1:])  # virtual tokens of adapters come first


def masked(body: nn.Module, x: Tensor) -> Tensor:
    return token_loss(body(input_ids=x).logits, x)


def seq2seq(body: nn.Module, x: Tensor) -> Tensor:
    return token_loss(body(input_ids=x, decoder_input_ids=x).logits, x)


def classify(body: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(body(x).logits, torch.zeros(len(x), dtype=torch.long), reduction="none")


def _family(
    kind: str,
    auto: str,
    family: str,
    run: Callable[[nn.Module, Tensor], Tensor],
    batch: Any,
    experts: str = "eager",  # torch's grouped product has no float64
) -> Case:
    def make() -> nn.Module:
        import transformers

        config = small_config(family)
        config._experts_implementation = experts
        if family in ARCHITECTURE:
            config.architectures = [ARCHITECTURE[family]]
        body = getattr(transformers, auto).from_config(config)
        return Loss(body, run)

    return Case(kind, family if experts == "eager" else f"{family} ({experts})", make, batch)


def pixels(family: str) -> Callable[[], tuple[Tensor, ...]]:
    def batch() -> tuple[Tensor, ...]:
        size = getattr(small_config(family), "image_size", 16)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return (torch.randn(USERS, 3, height, width),)

    return batch


def families() -> list[Case]:
    cases = [_family("causal language model", "AutoModelForCausalLM", f, causal, ids) for f in CAUSAL]
    cases += [_family("causal language model", "AutoModelForCausalLM", "mixtral", causal, ids, "batched_mm")]
    cases += [_family("masked language model", "AutoModelForMaskedLM", f, masked, ids) for f in MASKED]
    cases += [_family("encoder and decoder", "AutoModelForSeq2SeqLM", f, seq2seq, ids) for f in SEQ2SEQ]
    cases += [_family("images", "AutoModelForImageClassification", f, classify, pixels(f)) for f in VISION]
    text = ("bert", "roberta", "distilbert", "electra", "gpt2", "llama")
    cases += [_family("text classification", "AutoModelForSequenceClassification", f, classify, ids) for f in text]
    return cases
