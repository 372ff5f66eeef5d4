"""Options for training by steps."""

from __future__ import annotations

from typing import ClassVar

from dpformer.options import Count, Limit, NotNegative, Options, Positive, Share, option


class TrainingOptions(Options):
    """The section `Training`."""

    section: ClassVar[str] = "Training"

    batch_size: Count | None = option(
        None, "Expected number of users per batch (default: 1024, at most a quarter of the users)."
    )
    epochs: Count | None = option(None, "Expected passes over the users (default: 100; synthetic data: 10).")
    learning_rate: Positive = option(5e-3, "Peak learning rate of Adam.")
    weight_decay: NotNegative = option(1e-5, "L2 penalty of Adam.")
    warmup: Share = option(0.2, "Share of the steps with increasing learning rate; afterwards it decays to 0.")
    evaluate_every: Limit = option(0, "Epochs between evaluations, which are not covered by ε; 0: none.")
    micro_batch_tokens: Count = option(8_192, "Maximum positions computed at once; affects rounding only.")
    bf16: bool = option(False, "Forward passes in bfloat16; everything else in float32.")
