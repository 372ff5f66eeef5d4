"""The cost of int8: NDCG of the lists that the exported file gives under ONNX Runtime, against the original model."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpformer.data import Dataset
from dpformer.errors import DpformerError
from dpformer.evaluation.metrics import ndcg
from dpformer.export.onnx import masked_scores, padded, session
from dpformer.runs.model_file import Release

AT_ONCE = 128  # users per batch


def measure_loss(path: Path, release: Release, dataset: Dataset, k: int, filter_seen: bool = True) -> dict[str, Any]:
    """NDCG@k of both, over all users with a held-out item; items of the history are excluded if `filter_seen`."""
    runtime, model = session(path), release.model
    users, targets = dataset.held_out()
    if not len(users):
        raise DpformerError("no user has a held-out item: histories of at least 3 items are needed")
    exact, coarse = [], []
    for start in range(0, len(users), AT_ONCE):
        histories = dataset.held_out_histories(users[start : start + AT_ONCE])
        exact.append(masked_scores(model, histories, filter_seen).topk(k).indices.numpy())
        coarse.append(runtime.run(["items"], {"history": padded(histories)})[0])
    before, after = (_ndcg(np.concatenate(lists), targets) for lists in (exact, coarse))
    return {"users": len(users), "k": k, "ndcg": before, "ndcg_int8": after, "loss": before - after, "covered": False}


def _ndcg(lists: np.ndarray, targets: np.ndarray) -> float:
    """Lists (U, k) as ranks: the position of the target, or k + 1 if the list does not contain it."""
    found = lists == targets[:, None]
    ranks = np.where(found.any(1), found.argmax(1) + 1, lists.shape[1] + 1)
    return float(ndcg(torch.from_numpy(ranks), lists.shape[1]))
