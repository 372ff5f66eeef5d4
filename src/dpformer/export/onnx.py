"""ONNX: one file that any ONNX runtime can serve, checked against PyTorch before it is written.

    history  (batch, length) int64   item numbers, oldest first, padded on the right with −1; both sizes are free
    items    (batch, k) int64        the best items that are not in the history, or of all (`filter_seen=False`)
    scores   (batch, k) float32

The file's metadata holds the vocabulary (JSON: item number → id in the log), titles, and the headline of the privacy
statement. A shared embedding is a single tensor: the lookup and the softmax read the same one.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dpformer.errors import DpformerError, MissingExtra
from dpformer.export import symbolic
from dpformer.export.graph import TopItems
from dpformer.export.int8 import rounded, store_in_int8
from dpformer.files import replacing
from dpformer.runs.model_file import Release

OPSET = 18
SHAPES = ((1, 1), (1, 7), (3, 2), (16, 13), (5, 40))  # (batch, length) for checking the file
TOLERANCE = 1e-4  # absolute and relative, for scores: float32 sums in another order


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    bytes: int
    k: int
    int8: bool
    filter_seen: bool
    checked: int  # histories for which ONNX Runtime gave the model's answer
    largest_difference: float  # between the scores


def export_onnx(
    release: Release, path: str | Path, *, k: int = 10, int8: bool = False, filter_seen: bool = True
) -> Exported:
    """Write a released model as ONNX; if ONNX Runtime disagrees with PyTorch, raise and write nothing.

    Args:
        release: the model, its vocabulary and metadata.
        path: the output file, which may exist.
        k: number of items to recommend, part of the graph.
        int8: store matrices in 8 bits (see `int8`).
        filter_seen: exclude items of the history.
    """
    for package in ("onnx", "onnxruntime"):
        if find_spec(package) is None:
            raise MissingExtra(package, "export")
    if "text" in release.metadata:
        raise DpformerError("this is a language model, but ONNX export supports recommenders only")
    if not 1 <= k <= len(release.vocabulary):
        raise DpformerError(f"k is {k}; it must be between 1 and {len(release.vocabulary)}, the number of items")
    if int8 and not any(parameter.ndim == 2 for parameter in release.model.parameters()):
        raise DpformerError(f"a {type(release.model).__name__} has no matrices to store in int8: omit --int8")
    model = rounded(release.model) if int8 else release.model
    content = _convert(TopItems(model, k, filter_seen=filter_seen), release, int8)
    checked, difference = verify(session(content, as_written=int8), model, k, filter_seen=filter_seen)
    with replacing(Path(path)) as part:
        part.write_bytes(content)
    return Exported(Path(path), len(content), k, int8, filter_seen, checked, difference)


def _convert(graph: TopItems, release: Release, int8: bool) -> bytes:
    """The contents of the file.

    The TorchScript exporter is used: torch's newer one cannot export a GRU, and takes twenty times as long.
    """
    import onnx

    file = io.BytesIO()
    sizes = {0: "batch", 1: "length"}
    example = torch.zeros(2, 3, dtype=torch.int64)
    symbolic.register(OPSET)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        torch.onnx.export(
            graph.eval(),
            (example,),
            cast(Any, file),  # a buffer is allowed, despite the type annotation
            input_names=["history"],
            output_names=["items", "scores"],
            dynamic_axes={"history": sizes, "items": {0: "batch"}, "scores": {0: "batch"}},
            opset_version=OPSET,
            do_constant_folding=False,  # it would store squares of weights as well; a runtime folds on loading
            dynamo=False,
        )
    proto = onnx.load_from_string(file.getvalue())
    if int8:
        store_in_int8(proto.graph)
    for name, value in _metadata(release).items():
        proto.metadata_props.add(key=name, value=value)
    onnx.checker.check_model(proto)
    return bytes(proto.SerializeToString())


def _metadata(release: Release) -> dict[str, str]:
    texts = {"dpformer.vocabulary": json.dumps(release.vocabulary), "dpformer.metadata": json.dumps(release.metadata)}
    return texts if release.titles is None else {**texts, "dpformer.titles": json.dumps(release.titles)}


def session(content: bytes | Path, *, as_written: bool = False) -> Any:
    """ONNX Runtime on the CPU, with all optimisations, or only with those that leave the arithmetic unchanged."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if as_written:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    source = content if isinstance(content, bytes) else str(content)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def verify(runtime: Any, model: Any, k: int, *, filter_seen: bool = True, seed: int = 0) -> tuple[int, float]:
    """Compare ONNX Runtime with `model.scores` on random histories; returns their number and the largest difference.

    Equal scores may come in any order, so each item's own score and the list of best scores are compared.
    """
    rng = np.random.default_rng(seed)
    checked, largest = 0, 0.0
    for batch, length in (*SHAPES, (2, model.max_length), (2, model.max_length + 3)):
        lengths = rng.integers(0, length + 1, batch)
        lengths[-1] = length
        histories = [rng.integers(0, model.num_items, size) for size in lengths]
        items, scores = runtime.run(["items", "scores"], {"history": padded(histories)})
        expected = masked_scores(model, histories, filter_seen)
        best = expected.topk(k).values
        own = expected.gather(1, torch.from_numpy(items))
        found = torch.from_numpy(scores)
        largest = max(largest, _apart(found, best), _apart(found, own))
        checked += batch
    if not largest <= TOLERANCE:
        raise DpformerError(
            f"ONNX Runtime and PyTorch differ by {largest:.2g} in a score (tolerance {TOLERANCE:g}): nothing was "
            "written"
        )
    return checked, largest


def padded(histories: Sequence[np.ndarray]) -> np.ndarray:
    """Histories as the graph expects them: (B, longest) int64, padded with −1 on the right."""
    width = max(1, *(len(history) for history in histories))
    rows = np.full((len(histories), width), -1, dtype=np.int64)
    for row, history in zip(rows, histories, strict=True):
        row[: len(history)] = history
    return rows


@torch.no_grad()
def masked_scores(model: Any, histories: Sequence[np.ndarray], filter_seen: bool = True) -> Tensor:
    """The scores of the graph, computed by the model itself: (B, M), −∞ for items of the history if `filter_seen`."""
    scores: Tensor = model.scores(histories)
    if not filter_seen:
        return scores
    for row, history in zip(scores, histories, strict=True):
        row[torch.from_numpy(np.array(history, dtype=np.int64))] = -torch.inf
    return scores


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, absolute or, for large numbers, relative; −∞ equals only itself."""
    gap = (a - b).abs() / b.abs().clamp(min=1)
    return float(gap.where(a != b, 0.0).nan_to_num(torch.inf).max())
