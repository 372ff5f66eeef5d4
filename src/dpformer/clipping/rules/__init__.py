"""One exact rule for each function that a parameter may be used in. A rule runs the function and records the call.

Rules see tensors of all users, the user's dimension first; one_user.py calls them.
"""

from dpformer.clipping.recording import RULES, rule
from dpformer.clipping.rules import linear, lookup, normalization  # noqa: F401  (importing a file registers its rules)

__all__ = ["RULES", "rule"]
