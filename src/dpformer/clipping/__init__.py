"""Phantom Clipping: per-user gradient norms and clipped sums without per-user gradients, for any model."""

from dpformer.clipping.clip_functions import ClipFunction, clip, normalize
from dpformer.clipping.engine import PhantomClipping
from dpformer.clipping.errors import UnsupportedUse
from dpformer.clipping.independence import Check, check
from dpformer.clipping.softmax_head import softmax_loss

__all__ = ["Check", "ClipFunction", "PhantomClipping", "UnsupportedUse", "check", "clip", "normalize", "softmax_loss"]
