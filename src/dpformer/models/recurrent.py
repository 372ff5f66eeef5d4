"""The paper's recurrent baselines: one GRU or LSTM layer between the item embedding and the softmax over items."""

from torch import Tensor, nn

from dpformer.models.dropout import Dropout
from dpformer.models.sequence import SequenceModel, constructor_arguments


class Recurrent(SequenceModel):
    """h_t = cell(√d·E[item_t], h_{t−1}), dropout before and after; the state has the embedding's width, so E is shared.

    PyTorch's own initialisation of the cell, U(±1/√d), keeps ‖h‖ well below √d at the start; see `SequenceModel`.
    """

    def __init__(
        self,
        cell: type[nn.GRU] | type[nn.LSTM],
        num_items: int,
        max_length: int,
        dim: int,
        shared: bool,
        dropout: float,
    ) -> None:
        super().__init__(num_items, max_length, dim, shared)
        self.cell = cell(dim, dim, batch_first=True)
        self.dropout = Dropout(dropout)

    def encode(self, items: Tensor, lengths: Tensor) -> Tensor:
        states, _ = self.cell(self.dropout(self.embed(items)))  # (B, L, d); padding comes after all real positions
        return self.dropout(states)


class GRU(Recurrent):
    """Gated recurrent unit (Cho et al. 2014)."""

    def __init__(
        self, num_items: int, max_length: int, *, dim: int = 64, shared: bool = True, dropout: float = 0.2
    ) -> None:
        arguments = constructor_arguments(locals())
        super().__init__(nn.GRU, num_items, max_length, dim, shared, dropout)
        self.arguments = arguments


class LSTM(Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber 1997)."""

    def __init__(
        self, num_items: int, max_length: int, *, dim: int = 64, shared: bool = True, dropout: float = 0.2
    ) -> None:
        arguments = constructor_arguments(locals())
        super().__init__(nn.LSTM, num_items, max_length, dim, shared, dropout)
        self.arguments = arguments
