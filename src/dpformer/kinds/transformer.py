"""The Transformer, with Re-Attention or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpformer.kinds.base import Picture
from dpformer.kinds.network import NetworkKind, common_arguments

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from dpformer.models import SequenceModel, Transformer
    from dpformer.runs.config import Config
    from dpformer.training.plan import Plan


class TransformerKind(NetworkKind):
    """See `ModelKind`."""

    name = "transformer"
    title = "Transformer"
    phrase = "a Transformer with Re-Attention"
    summary = name
    attention = True
    classes = {"Transformer": "dpformer.models.transformer"}  # noqa: RUF012

    def resolved(self, config: Config, users: int) -> dict[str, Any]:
        by_default = not config.noise.correlated
        corrected = by_default if config.reattention is None else config.reattention
        return {**super().resolved(config, users), "reattention": corrected}

    def needs_frequencies(self, config: Config) -> bool:
        return super().needs_frequencies(config) or bool(config.reattention)

    def without_share(self, config: Config, option: str) -> str:
        if option != "frequency_share" or not config.reattention:
            return super().without_share(config, option)
        return "Re-Attention needs item frequencies: give frequency_share above 0, or --no-re-attention"

    def build(self, config: Config, num_items: int) -> SequenceModel:
        from dpformer.models import Transformer

        assert config.max_length is not None
        return Transformer(
            num_items,
            config.max_length,
            heads=config.heads,
            blocks=config.blocks,
            norm=config.norm,
            reattention=config.reattention_variant if config.reattention else False,
            **common_arguments(config),
        )

    def set_up(self, model: Any, config: Config, plan: Plan, frequencies: Tensor | None) -> None:
        super().set_up(model, config, plan, frequencies)
        if config.reattention:
            _set_error(model, config, plan, frequencies)

    def description(self, config: Config) -> str:
        return f"{self.title} with Re-Attention" if config.reattention else self.title

    def pictures(self, model: Any, history: np.ndarray) -> list[Picture]:
        """The attention map of the last block, with the correction and without it."""
        from dpformer.models import Batch

        if not len(history):
            return []
        batch = Batch.for_scores([history], model.max_length)
        corrected = _last_map(model, batch)
        if not model.reattention:
            return [Picture("Attention, last block", corrected, "attention")]
        errors = model.item_error.clone(), model.weight_error.clone()
        try:  # attention without removing the noise in the keys
            model.item_error.zero_()
            model.weight_error.zero_()
            plain = _last_map(model, batch)
        finally:
            model.item_error.copy_(errors[0])
            model.weight_error.copy_(errors[1])
        return [
            Picture("With Re-Attention", corrected, "attention with the correction"),
            Picture("Without the correction", plain, "attention without the correction"),
        ]


def _set_error(model: Transformer, config: Config, plan: Plan, frequencies: Tensor | None) -> None:
    """Set the noise of the parameters; without the required frequencies it stays unset until a state is loaded."""
    from dpformer.reattention.error import effective_error

    if frequencies is None:
        return
    noise, batch_size = plan.noise_multiplier * plan.noise.step_deviation(plan.steps), plan.expected_batch_size
    model.set_error(effective_error(noise, batch_size, frequencies, scale=config.reattention_scale))


def _last_map(model: Transformer, batch: Any) -> np.ndarray:
    """(L, L), the mean over heads."""
    import numpy as np

    return np.asarray(model.attention_maps(batch)[-1][0].mean(0).numpy())


TRANSFORMER = TransformerKind()
