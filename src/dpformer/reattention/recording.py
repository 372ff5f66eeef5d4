"""Whether a network is being recorded for export rather than run."""

import torch


def recording() -> bool:
    """A recording (torch.export, torch.compile, ONNX) cannot branch on values nor loop over parts of any number."""
    return torch.compiler.is_compiling() or torch.onnx.is_in_onnx_export()
