"""One loss per user from the outputs of a Hugging Face model.

The models' own `.loss`, and Trainer's label smoothing, average over all tokens of the batch, so that each user's loss
depends on the others. Here the loss of a user is the mean over that user's own labelled positions, in all examples:

    ℓ_u = Σ_{labelled positions of u} CE / number of labelled positions of u
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpformer.errors import DpformerError
from dpformer.integrations.batches import Part

IGNORED = -100
SEQ2SEQ = "ForConditionalGeneration"
PER_TOKEN = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")


def kind_of(model: nn.Module) -> str:
    """The kind of loss, by its name in transformers."""
    from torch.distributed.fsdp import FSDPModule
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    inner: Any = model
    if hasattr(inner, "get_base_model"):  # peft
        inner = inner.get_base_model()
    kinds = [kind for kind in type(inner).__mro__ if not issubclass(kind, FSDPModule)]  # fully_shard prepends a class
    name = kinds[0].__name__
    return "ForCausalLM" if name in CAUSAL.values() else str(getattr(inner, "loss_type", None) or name)


def user_losses(model: nn.Module, part: Part, smoothing: float = 0.0) -> Tensor:
    """(B,): the loss of each user, on its own examples. Call it while uses are recorded.

    Args:
        model: a Hugging Face model with a head for language modelling (an encoder and decoder too), token or sequence
            classification.
        part: a part whose inputs have `labels`.
        smoothing: label smoothing, over the classes of each position.
    """
    inputs = dict(part.inputs)
    labels = inputs.pop("labels", None)
    kind, config = kind_of(model), getattr(model, "config", None)
    if labels is None:
        raise DpformerError(
            f"the collator returns {', '.join(sorted(inputs))} but no labels; for a language model use "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )
    translates = kind.endswith(SEQ2SEQ) and getattr(config, "is_encoder_decoder", False)
    logits = model(**with_decoder_inputs(model, inputs, labels)).logits
    if kind == "ForSequenceClassification":
        return part.mean(*_of_sequences(logits, labels, config, smoothing))
    if not translates and (kind not in PER_TOKEN or getattr(config, "is_encoder_decoder", False)):
        raise DpformerError(
            f"the per-user loss of {kind} is not supported: give compute_loss_func(outputs, labels, "
            "num_items_in_batch), which returns one loss per row"
        )
    if kind == "ForCausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return part.mean(*_of_tokens(logits, labels, smoothing))


def with_decoder_inputs(model: nn.Module, inputs: dict[str, Any], labels: Tensor | None) -> dict[str, Any]:
    """The inputs of a model; a decoder reads the labels before each position, as the model itself would have it."""
    inner: Any = model
    if hasattr(inner, "get_base_model"):  # peft
        inner = inner.get_base_model()
    shift = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    if labels is None or shift is None or "decoder_input_ids" in inputs:
        return inputs
    return {**inputs, "decoder_input_ids": shift(labels=labels)}


def _of_tokens(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Losses (rows, L), and a mask of those that count."""
    losses = F.cross_entropy(
        logits.flatten(0, 1).float() if logits.dtype != torch.float64 else logits.flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    return losses.view(labels.shape), labels != IGNORED


def _of_sequences(logits: Tensor, labels: Tensor, config: Any, smoothing: float) -> tuple[Tensor, Tensor | None]:
    """Losses (rows,), by the model's `problem_type`, which is inferred as in transformers."""
    kind = getattr(config, "problem_type", None)
    if kind is None:
        whole = labels.dtype in (torch.int64, torch.int32)
        kind = "regression" if logits.shape[1] == 1 else "single" if whole else "multi"
    if kind == "regression":
        return F.mse_loss(logits.view(len(labels), -1), labels.view(len(labels), -1), reduction="none").mean(1), None
    if kind.startswith("single"):
        each, counted = _of_tokens(logits[:, None], labels.view(-1, 1), smoothing)
        return each[:, 0], counted[:, 0]
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1), None
