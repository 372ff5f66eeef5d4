"""The paper's models (Transformer, shared or not, with or without Re-Attention; GRU; LSTM) and transition counts."""

from dpformer.models.batch import Batch
from dpformer.models.counts import TransitionCounts
from dpformer.models.recurrent import GRU, LSTM
from dpformer.models.sequence import SequenceModel
from dpformer.models.transformer import Transformer

__all__ = ["GRU", "LSTM", "Batch", "SequenceModel", "Transformer", "TransitionCounts"]
