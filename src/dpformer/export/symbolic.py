"""Functions of PyTorch that its TorchScript exporter lacks, or fixes to one size, in terms of ONNX."""

from typing import Any

import torch
from torch.onnx import register_custom_op_symbolic
from torch.onnx.symbolic_helper import parse_args


def _transpose(g: Any, tensor: Any) -> Any:
    """`Tensor.mT`: the last two dimensions change places."""
    rank = tensor.type().dim()
    return g.op("Transpose", tensor, perm_i=[*range(rank - 2), rank - 1, rank - 2])


def _erfc(g: Any, tensor: Any) -> Any:
    """erfc x = 1 − erf x"""
    return g.op("Sub", g.op("Constant", value_t=torch.tensor(1.0)), g.op("Erf", tensor))


@parse_args("v", "i", "is")
def _unflatten(g: Any, tensor: Any, dimension: int, sizes: list[int]) -> Any:
    """Split the last dimension into heads with one reshape; torch's own fixes batch and length to the example's."""
    rank = tensor.type().dim()
    if dimension not in (-1, rank - 1):
        raise ValueError(f"unflatten of dimension {dimension} of {rank} has no export; only that of the last has one")
    as_it_is = [0] * (rank - 1)
    return g.op("Reshape", tensor, g.op("Constant", value_t=torch.tensor([*as_it_is, *sizes])))


def register(opset: int) -> None:
    """Register them with the exporter."""
    for name, translation in (("mT", _transpose), ("erfc", _erfc), ("unflatten", _unflatten)):
        register_custom_op_symbolic(f"aten::{name}", translation, opset)
