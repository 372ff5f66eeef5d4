"""Options for the model: which kind, its size, and what it starts from."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from dpformer.kinds import auto
from dpformer.kinds.recipes import RECIPES
from dpformer.kinds.registry import KINDS
from dpformer.options import Count, Limit, NotNegative, Options, Share, option


class ModelOptions(Options):
    """The section `Model`."""

    section: ClassVar[str] = "Model"

    recipe: str = option("default", f"A named set of defaults: {', '.join(RECIPES)}.")
    model: str = option(
        auto.AUTO,
        "auto: chosen from public numbers (users, items, attributes, ε); a network for text or if a network option is "
        f"given; {'; '.join(kind.summary for kind in KINDS.values())}.",
    )
    base: Path | None = option(None, "The checkpoint given by `--model FOLDER`.")
    lora: Limit = option(0, "Checkpoints: train low-rank adapters of this rank; 0 trains all weights.")
    dim: Count = option(64, "Width of embeddings and hidden states.")
    heads: Count = option(1, "Number of attention heads.")
    blocks: Count = option(2, "Number of Transformer blocks.")
    dropout: Share = option(0.2, "Dropout rate.")
    norm: Literal["post", "pre"] = option("post", "LayerNorm after each residual sum (post), or before each layer.")
    shared: bool = option(True, "Share one matrix between input embedding and softmax.")
    reattention: bool | None = option(
        None, "Correct attention for noise (default: on for a Transformer, off with --bands)."
    )
    reattention_variant: Literal["renormalised", "literal"] = option(
        "renormalised", "Renormalised rows, or the paper's formula."
    )
    reattention_scale: NotNegative = option(1.0, "Scale of the effective error; 1 is the paper's.")
    repeat_weight: NotNegative = option(
        0.0,
        "Counts: weight of the items that a user already had, for data with repeats; recommend with --allow-seen.",
    )
    frequency_bias: bool = option(True, "Initialise the output bias from released item frequencies.")

    def check_model(self) -> None:
        """Raise ValueError on contradictions within the section."""
        if self.dim % self.heads:
            raise ValueError(f"heads is {self.heads}; it must divide dim, which is {self.dim}")
