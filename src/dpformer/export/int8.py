"""Weights in 8 bits: each row of a matrix as integers −127 … 127 and one scale, w ≈ s·q, s = max|w| / 127.

The file stores the model with rounded weights, and is checked as such. ONNX Runtime may also compute in int8 where
that is faster, so the loss of accuracy is measured with the runtime itself (`measure_loss`).
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import nn


def rounded(model: nn.Module) -> Any:
    """A copy of a model whose matrices are rounded to values that int8 can represent."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                codes, scales = quantize(parameter.numpy(), axis=0)
                parameter.copy_(torch.from_numpy(restore(codes, scales, axis=0)))
    return model


def quantize(weight: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """int8 numbers of the weight's shape, and a float32 scale for each index of `axis`."""
    others = tuple(dimension for dimension in range(weight.ndim) if dimension != axis)
    scales = (np.abs(weight).max(axis=others) / np.float32(127)).astype(np.float32)
    scales[scales == 0] = 1
    codes = np.rint(weight / _along(scales, axis, weight.ndim)).astype(np.int8)
    return codes, scales


def restore(codes: np.ndarray, scales: np.ndarray, axis: int) -> np.ndarray:
    """The float32 weights that the int8 values represent."""
    return codes.astype(np.float32) * _along(scales, axis, codes.ndim)


def _along(scales: np.ndarray, axis: int, ndim: int) -> np.ndarray:
    return scales.reshape([-1 if dimension == axis else 1 for dimension in range(ndim)])


def store_in_int8(graph: Any) -> None:
    """Replace each float matrix in the ONNX graph of a rounded model by int8 values, scales and their product.

    The exporter has transposed some matrices and joined others, so the axis of the scales is found by trial: the right
    one reproduces the weights. A matrix that no axis reproduces was not rounded, and stays unchanged.
    """
    from onnx import helper, numpy_helper

    for weight in list(graph.initializer):
        values = numpy_helper.to_array(weight)
        if values.dtype != np.float32 or values.ndim < 2 or values.shape[-1] < 4:
            continue
        for axis in range(values.ndim):
            codes, scales = quantize(values, axis)
            if scales.size * 4 <= values.size and np.allclose(restore(codes, scales, axis), values, rtol=1e-5, atol=0):
                graph.initializer.remove(weight)
                graph.initializer.append(numpy_helper.from_array(codes, f"{weight.name}.int8"))
                graph.initializer.append(numpy_helper.from_array(scales, f"{weight.name}.scale"))
                inputs = [f"{weight.name}.int8", f"{weight.name}.scale"]
                graph.node.insert(0, helper.make_node("DequantizeLinear", inputs, [weight.name], axis=axis))
                break
