"""Which way to the norm of a user is the cheaper one: inner products of its rows, or its gradient written out.

A user's own rows and public sizes decide, never how many users there are or how far rows are padded: the two ways round
differently, and nobody may change the way of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import inf, prod, sqrt

import torch
from torch import Tensor

from dpformer.clipping.uses.kinds import Dense, Lookup, Outer, Ragged
from dpformer.clipping.uses.pairs import Use
from dpformer.kernels import native

PASSES = 16.0  # multiply-adds in the time in which a number goes to memory and back
DOUBLE = {"cpu": 2.0, "mps": inf}  # multiply-adds of float32 in the time of one in float64
DOUBLE_IN_CUDA = dict.fromkeys([(6, 0), (7, 0), (8, 0), (9, 0)], 2.0)  # by compute capability: P100, V100, A100, H100
DOUBLE_ELSEWHERE = 32.0
HALF = 0.5  # of the inner products are computed by compiled code, since the others are the same
OFTEN = 3 << 18  # numbers of a parameter up to which gradients of 64 users are kept


def closed_form(uses: Sequence[Use]) -> bool:
    """Whether all inner products have one. What is written out already is simply added to the others."""
    return not any(isinstance(use, Dense) for use in uses) and sum(isinstance(use, Ragged) for use in uses) <= 1


def by_rows(uses: Sequence[Use]) -> list[int]:
    """The places of the uses whose rows are counted: outer products, or all where there are none."""
    return [i for i, use in enumerate(uses) if not isinstance(use, Lookup)] or list(range(len(uses)))


def reach(uses: Sequence[Use]) -> float:
    """Inner products are for users with fewer rows than this.

    In multiply-adds of float32, n rows of a weight of p × q cost n²(p + q) in float64 and one pass over n(p + q)
    numbers; a gradient costs a pass over its p·q numbers, and where it is too large to be kept for the sum, n·p·q.
    """
    device, numbers = tensor_of(uses[0]).device, prod(uses[0].shape)
    double = _double(device)
    if not closed_form(uses) or double == inf:
        return 0.0
    outers = [use for use in uses if isinstance(use, (Outer, Ragged))]
    depth = max((use.grad.shape[-1] for use in uses if isinstance(use, Lookup)), default=0)
    if not outers:
        return 4.0 * numbers / depth
    width = max(use.left.shape[-1] + use.right.shape[-1] for use in outers)
    return _reach(double, width, depth, numbers)


def reach_of_product(left: int, right: int) -> float:
    """The same of one outer product of rows so wide, on the CPU."""
    return _reach(_double(torch.device("cpu")), left + right, 0, left * right)


def _double(device: torch.device) -> float:
    if device.type == "cuda":
        return _double_in_cuda(device)
    double = DOUBLE.get(device.type, DOUBLE_ELSEWHERE)
    if device.type == "cpu" and native.multiplies():
        double *= HALF
    return double


@cache
def _double_in_cuda(device: torch.device) -> float:
    return DOUBLE_IN_CUDA.get(torch.cuda.get_device_capability(device), DOUBLE_ELSEWHERE)


def _reach(double: float, width: int, depth: int, numbers: int) -> float:
    square = double * (width + depth)
    linear = PASSES * width - (0 if numbers <= OFTEN else numbers)
    return (sqrt(linear * linear + 4 * square * PASSES * numbers) - linear) / (2 * square)


def tensor_of(use: Use) -> Tensor:
    """Its rows; those of one side, where it has two."""
    return use.left if isinstance(use, (Outer, Ragged)) else use.grad
