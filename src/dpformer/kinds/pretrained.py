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

LEARNING_RATE = 1e-3  # by default: a fifth of what networks from nothing have


class PretrainedKind(NetworkKind):
    """Trained as every network; its sizes, its tokenizer and its layers are the checkpoint's."""

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
        return f"{option} is what the checkpoint {name} says: leave it out"

    def refuse(self, config: Config) -> None:
        if config.reattention:
            raise ValueError("Re-Attention cannot be put into a checkpoint: leave it out")
        if config.base is None:
            raise ValueError("a checkpoint is named by --model FOLDER; leave base out")
        if config.characters is not None or config.tokenizer is not None:
            raise ValueError("a checkpoint brings its own tokenizer: leave characters and tokenizer out")
        if config.max_length and config.max_length > (most := positions(config.base)):
            raise ValueError(
                f"max_length is {config.max_length}, and {config.base} has {most} positions: give at most that"
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
        pass  # all that it has is trained, or the checkpoint's

    # Exported.

    def export_folder(self, release: Release, folder: Path, statement: dict[str, Any]) -> list[Path]:
        """A checkpoint of Hugging Face again: weights, tokenizer, statement, card."""
        if folder.exists():
            raise DpformerError(f"{folder} is there already; give the name of a new folder")
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        from dpformer.statement.cards import write_card

        release.model.whole().save_pretrained(folder)
        tokenizer = Tokenizer.from_str(release.metadata["text"]["tokenizer"])
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        write_card(folder, statement)
        return sorted(folder.iterdir())


def positions(folder: Path) -> int:
    """How many tokens a checkpoint takes; where its config is silent, any number."""
    from dpformer.models.pretrained import positions_of  # torch

    try:
        facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return positions_of(facts) or sys.maxsize
    except (OSError, ValueError, AttributeError):
        raise DpformerError(f"{folder} holds no config.json of a Hugging Face checkpoint") from None


PRETRAINED = PretrainedKind()
