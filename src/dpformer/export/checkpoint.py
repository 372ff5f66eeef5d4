"""A fine-tuned language model as a Hugging Face checkpoint again: weights, tokenizer, statement, card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpformer.errors import DpformerError
from dpformer.models.pretrained import Pretrained
from dpformer.runs.model_file import Release
from dpformer.statement.cards import write_card


def export_checkpoint(release: Release, folder: Path, statement: dict[str, Any]) -> list[Path]:
    """Writes a folder for `from_pretrained`, which must not be there yet; gives what is in it.

    Args:
        release: of a checkpoint that was fine-tuned.
        folder: to make.
        statement: of the run, for privacy.json and the model card.
    """
    if not isinstance(release.model, Pretrained):
        raise DpformerError("this model was not fine-tuned from a Hugging Face checkpoint; give a file: model.onnx")
    if folder.exists():
        raise DpformerError(f"{folder} is there already; give the name of a new folder")
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    release.model.whole().save_pretrained(folder)
    tokenizer = Tokenizer.from_str(release.metadata["text"]["tokenizer"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    write_card(folder, statement)
    return sorted(folder.iterdir())
