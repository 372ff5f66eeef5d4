"""A causal language model of Hugging Face, fine-tuned: `--model FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpformer.errors import DpformerError
from dpformer.kinds.network import LONGEST, OF_OWN_NETWORKS, NetworkKind

if TYPE_CHECKING:
    from torch import Tensor

    from dpformer.models import SequenceModel
    from dpformer.runs.config import Config
    from dpformer.runs.model_file import Release
    from dpformer.training.plan import Plan

LEARNING_RATE = 1e-3  # default: a fifth of that of networks trained from scratch


class PretrainedKind(NetworkKind):
    """Trained like every network; sizes, tokenizer and layers come from the checkpoint."""

    name = "pretrained"
    title = "pretrained"
    phrase = "a fine-tuned checkpoint"
    summary = "text: the folder of a Hugging Face checkpoint to fine-tune"
    classes = {"Pretrained": "dpformer.models.pretrained"}  # noqa: RUF012
    silent = OF_OWN_NETWORKS
    exports_folder = True

    def named_by(self, path: Path) -> dict[str, Any] | None:
        return {"model": self.name, "base": path, "learning_rate": LEARNING_RATE} if path.is_dir() else None

    # Chosen.

    def ignores(self, option: str, name: str) -> str:
        return f"{option} is determined by the checkpoint {name}: omit it"

    def refuse(self, config: Config) -> None:
        if config.reattention:
            raise ValueError("Re-Attention cannot be added to a checkpoint: omit it")
        if config.base is None:
            raise ValueError("a checkpoint is given by --model FOLDER: omit base")
        if config.characters is not None or config.tokenizer is not None:
            raise ValueError("a checkpoint has its own tokenizer: omit characters and tokenizer")
        if config.max_length and config.max_length > (most := positions(config.base)):
            raise ValueError(
                f"max_length is {config.max_length}, but {config.base} has only {most} positions: lower it"
            )
        if config.task == "recommend":
            raise ValueError("a checkpoint is a language model: give --task lm and --unit")

    def default_length(self, config: Config) -> int:
        assert config.base is not None
        return min(LONGEST["lm"], positions(config.base))

    # Planned and fitted.

    def needs_frequencies(self, config: Config) -> bool:
        return False

    def build(self, config: Config, num_items: int) -> SequenceModel:
        from dpformer.models.pretrained import Pretrained

        assert config.base is not None and config.max_length is not None
        return Pretrained.read(config.base, num_items, config.max_length, config.lora)

    def set_up(self, model: Any, config: Config, plan: Plan, frequencies: Tensor | None) -> None:
        pass  # everything is trained, or part of the checkpoint

    # Exported.

    def export_folder(self, release: Release, folder: Path, statement: dict[str, Any]) -> list[Path]:
        """Write a Hugging Face checkpoint again: weights, tokenizer, statement, card."""
        if folder.exists():
            raise DpformerError(f"{folder} already exists: give a new folder")
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        from dpformer.statement.cards import write_card

        release.model.whole().save_pretrained(folder)
        tokenizer = Tokenizer.from_str(release.metadata["text"]["tokenizer"])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        write_card(folder, statement)
        return sorted(folder.iterdir())


def positions(folder: Path) -> int:
    """The maximum number of tokens of a checkpoint; unlimited if its config does not say."""
    from dpformer.models.pretrained import positions_of  # torch

    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return positions_of(facts) or sys.maxsize
    except (OSError, ValueError, AttributeError):
        raise DpformerError(f"{folder} contains no config.json of a Hugging Face checkpoint") from None


PRETRAINED = PretrainedKind()
