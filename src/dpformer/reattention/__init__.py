"""Re-Attention: Gaussian moments, the effective error, and the attention that uses them (paper, section 4)."""

from dpformer.reattention.activations import gelu, relu
from dpformer.reattention.attention import attention, attention_weights
from dpformer.reattention.error import EffectiveError, adam_error, effective_error
from dpformer.reattention.moments import Gaussian, add, average, dropout, embedding, layer_norm, linear

__all__ = [
    "EffectiveError",
    "Gaussian",
    "adam_error",
    "add",
    "attention",
    "attention_weights",
    "average",
    "dropout",
    "effective_error",
    "embedding",
    "gelu",
    "layer_norm",
    "linear",
    "relu",
]
