"""One exact rule for each function that a parameter may be used in. A rule runs the function and leaves a tap."""

from typing import Any

from dpformer.clipping.gate import Rule
from dpformer.clipping.rules import attention, broadcast, convolution, head, linear, lookup, normalization, recurrent

RULES: dict[Any, Rule] = {
    **linear.RULES,
    **lookup.RULES,
    **normalization.RULES,
    **broadcast.RULES,
    **convolution.RULES,
    **attention.RULES,
    **recurrent.RULES,
    **head.RULES,
}
