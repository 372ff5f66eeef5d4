"""GRU and LSTM, for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpformer.kinds.network import NetworkKind, common_arguments

if TYPE_CHECKING:
    from dpformer.models import SequenceModel
    from dpformer.runs.config import Config


class RecurrentKind(NetworkKind):
    """GRU and LSTM."""

    def __init__(self, name: str, title: str) -> None:
        self.name, self.title, self.phrase, self.summary = name, title, f"a {title}", name  # type: ignore[misc]
        self.classes = {title: "dpformer.models.recurrent"}

    def build(self, config: Config, num_items: int) -> SequenceModel:
        from dpformer.models import recurrent

        assert config.max_length is not None
        make = getattr(recurrent, self.title)
        model: SequenceModel = make(num_items, config.max_length, **common_arguments(config))
        return model


GRU = RecurrentKind("gru", "GRU")
LSTM = RecurrentKind("lstm", "LSTM")
