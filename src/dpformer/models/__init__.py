"""The paper's models (Transformer, shared or not, with or without Re-Attention; GRU; LSTM) transition counts; and
the softmax head."""

from dpformer.models.batch import Batch
from dpformer.models.counts import TransitionCounts
from dpformer.models.recurrent import GRU, LSTM
from dpformer.models.sequence import SequenceModel
from dpformer.models.softmax_head import softmax_loss
from dpformer.models.transformer import Transformer

__all__ = ["GRU", "LSTM", "Batch", "SequenceModel", "Transformer", "TransitionCounts", "softmax_loss"]
