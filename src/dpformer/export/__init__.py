"""A released model as one ONNX file: history in, the best unseen items out."""

from dpformer.export.onnx import Exported, export_onnx

__all__ = ["Exported", "export_onnx"]
