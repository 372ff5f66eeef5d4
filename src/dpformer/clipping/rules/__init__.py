"""One exact rule for each function that a parameter may be used in. A rule runs the function and records the call."""

from dpformer.clipping.rules import (  # noqa: F401  (importing a file registers its rules)
    attention,
    broadcast,
    convolution,
    einsum,
    grouped,
    linear,
    lookup,
    normalization,
    recurrent,
    softmax,
)
from dpformer.clipping.rules.any_function import any_function
from dpformer.clipping.rules.registry import RULES, rule

__all__ = ["RULES", "any_function", "rule"]
