"""Phantom Clipping: per-user gradient norms and clipped sums without per-user gradients, for any model."""

from dpformer.clipping.clip_functions import ClipFunction, clip, normalize
from dpformer.clipping.engine import PhantomClipping
from dpformer.clipping.isolation import Check, check
from dpformer.errors import UnsupportedUse

__all__ = ["Check", "ClipFunction", "PhantomClipping", "UnsupportedUse", "check", "clip", "normalize"]
