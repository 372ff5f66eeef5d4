"""A causal language model of Hugging Face, from a folder on disk, as a sequence model of tokens.

    logits = h_t Wᵀ      h_t from the checkpoint's own layers; W its input embedding if tied, otherwise a separate
    matrix

Whether this describes a checkpoint's logits completely is tested when it is read: one that scales or caps them, or has
a bias there, is refused. With `lora` only low-rank adapters (peft) are trained; `merged` adds them to the weights,
and the result is released.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpformer.errors import DpformerError, MissingExtra
from dpformer.models.sequence import SequenceModel

UNTOLD = ("_name_or_path", "transformers_version")  # local paths are not published


class Pretrained(SequenceModel):
    """The layers of a checkpoint, without memory until a state is loaded or `read` has filled them.

    Args:
        num_items: number of tokens of the tokenizer; the checkpoint may have more rows, which are never generated.
        max_length: maximum number of input tokens.
        blocks: number of layers, as in `config`.
        config: the checkpoint's config.json.
    """

    def __init__(self, num_items: int, max_length: int, blocks: int, config: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self.arguments = {"num_items": num_items, "max_length": max_length, "blocks": blocks, "config": config}
        self.num_items, self.max_length = num_items, max_length
        known = _config(config)
        if blocks != known.num_hidden_layers:
            raise ValueError(f"it claims {blocks} layers, but its config says {known.num_hidden_layers}")
        whole = _transformers().AutoModelForCausalLM.from_config(known)
        self._take(whole)

    @classmethod
    def read(cls, folder: Path, num_items: int, max_length: int, lora: int = 0) -> Pretrained:
        """A checkpoint from disk, in float32; nothing is downloaded."""
        whole = _read(folder)
        facts = {name: value for name, value in json.loads(whole.config.to_json_string()).items() if name not in UNTOLD}
        _check(whole, folder, num_items, max_length)
        model = cls.__new__(cls)
        nn.Module.__init__(model)
        blocks = whole.config.num_hidden_layers
        model.arguments = {"num_items": num_items, "max_length": max_length, "blocks": blocks, "config": facts}
        model.num_items, model.max_length = num_items, max_length
        model._take(whole)
        if lora:
            _adapt(model, lora)
        return model

    def _take(self, whole: Any) -> None:
        self.body = whole.base_model
        table, head = whole.get_input_embeddings().weight, whole.get_output_embeddings().weight
        tied = head is table or bool(getattr(whole.config, "tie_word_embeddings", False))
        self.output = None if tied else head
        self.dim = head.shape[1]
        self.register_buffer("bias", torch.zeros(len(head)))

    def encode(self, items: Tensor, lengths: Tensor) -> Tensor:
        # Attention is causal and padding is on the right: no real position attends to padding.
        hidden: Tensor = self.body(input_ids=items, use_cache=False).last_hidden_state
        return hidden

    def scores(self, histories: Any) -> Tensor:
        return super().scores(histories)[:, : self.num_items]

    def output_weight(self) -> Tensor:
        table: Tensor = self.body.get_input_embeddings().weight
        return table if self.output is None else self.output

    def merged(self) -> Pretrained:
        """Merge adapters into the weights they adapt, if there are any, in place."""
        for name, layer in list(self.body.named_modules()):
            if hasattr(layer, "get_base_layer") and hasattr(layer, "merge"):
                layer.merge()
                parent, _, last = name.rpartition(".")
                setattr(self.body.get_submodule(parent), last, layer.get_base_layer())
        return self

    def check_state(self) -> None:
        """Fill what no file contains, such as tables of rotary positions, after a state was loaded."""
        empty = {name for name, buffer in self.named_buffers() if buffer.is_meta}
        if not empty:
            return
        fresh = Pretrained(**self.arguments)
        for name, buffer in fresh.named_buffers():
            if name in empty:
                parent, _, last = name.rpartition(".")
                self.get_submodule(parent).register_buffer(last, buffer, persistent=False)

    def whole(self) -> Any:
        """The model as a transformers model again, with these weights."""
        model = _transformers().AutoModelForCausalLM.from_config(_config(self.arguments["config"]))
        model.base_model.load_state_dict(self.body.state_dict())
        if self.output is not None:
            model.get_output_embeddings().weight = nn.Parameter(self.output.detach())
        model.tie_weights()
        return model.eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", "hf") from None
    return transformers


def _config(facts: dict[str, Any]) -> Any:
    try:
        return _transformers().AutoConfig.for_model(**facts)
    except DpformerError:
        raise
    except Exception as error:  # an untrusted file may cause any error
        raise ValueError(f"its config is not one of transformers: {error}") from None


def _read(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise DpformerError(f"{folder} holds no config.json: give a folder with a Hugging Face checkpoint")
    try:
        return (
            _transformers()
            .AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
            .eval()
        )
    except DpformerError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DpformerError(f"{folder} is not a causal language model that transformers can read: {reason}") from None


def _check(whole: Any, folder: Path, num_items: int, max_length: int) -> None:
    """Check that logits are h Wᵀ, that all tokens have rows, and that there are enough positions."""
    rows, positions = len(whole.get_input_embeddings().weight), positions_of(whole.config.to_dict())
    if num_items > rows:
        raise DpformerError(f"the tokenizer of {folder} has {num_items:,} tokens, but the model only {rows:,} rows")
    if positions is not None and max_length > positions:
        raise DpformerError(f"max_length is {max_length}, but {folder} has only {positions} positions: lower it")
    head = whole.get_output_embeddings()
    tokens = torch.arange(min(rows, 8, max_length))[None] % rows
    with torch.no_grad():
        hidden = whole.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = whole(input_ids=tokens, use_cache=False).logits
    if head is None or not torch.allclose(logits, hidden @ head.weight.T, rtol=1e-4, atol=1e-5):
        raise DpformerError(
            f"the logits of {folder} are not its hidden states times one matrix (they are scaled, capped or have a "
            "bias), for which there is no exact rule here: use PrivateTrainer"
        )


def positions_of(facts: dict[str, Any]) -> int | None:
    """The maximum number of tokens of a checkpoint, if its config says so."""
    found = [facts.get(name) for name in ("max_position_embeddings", "n_positions")]
    return next((value for value in found if isinstance(value, int)), None)


def _adapt(model: Pretrained, rank: int) -> None:
    """Freeze all weights and add adapters to all linear layers of the body."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise MissingExtra("peft", "hf") from None
    from transformers.pytorch_utils import Conv1D

    turned = any(isinstance(layer, Conv1D) for layer in model.body.modules())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", fan_in_fan_out=turned
    )
    inject_adapter_in_model(config, model.body)
    for name, parameter in model.body.named_parameters():
        parameter.requires_grad_("lora_" in name)
