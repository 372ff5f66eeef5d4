"""Whether a network is being recorded for export rather than executed."""

import torch


def recording() -> bool:
    """A recording (torch.export, torch.compile, ONNX) cannot branch on values or loop over variable ranges."""
    return torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()
