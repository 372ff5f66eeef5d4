"""One exact rule for each function that a parameter may be used in. A rule runs the function and records the call.

Rules see tensors of all users, the user's dimension first; user_rules.py calls them.
"""

from dpformer.clipping.rules import (  # noqa: F401  (importing a file registers its rules)
    convolution,
    linear,
    lookup,
    normalization,
    softmax,
)
from dpformer.clipping.rules.registry import RULES, rule

__all__ = ["RULES", "rule"]
