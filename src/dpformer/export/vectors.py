r"""Item vectors whose inner product with a query vector is the score, for vector search (pgvector, usearch, faiss).

- *Networks*, scores h·E_b + bias_b: the item vector is (E_b, bias_b), the query (h, 1). Nothing is lost.
- *Counts*, scores Σ_k α_k S_{x_k b} + 0.01·q_b with S = T + μK: S is not of low rank. Its truncated singular value
  decomposition, S ≈ U Vᵀ, is the best approximation of its rank in squares; the item vector is (V_b, 0.01·q_b), and the
  query (Σ_k α_k U_{x_k}, 1). What is lost is measured: the share of the squares of S and, with the owner's data, NDCG.

A query depends on one user's history and is as private as that; item vectors are the released model in another form.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpformer.data import Dataset
from dpformer.errors import DpformerError, MissingExtra
from dpformer.files import replacing
from dpformer.kinds.ranking import ranker
from dpformer.kinds.registry import kind_of
from dpformer.models.vectors import Vectors
from dpformer.runs.model_file import Release

CHECKED = 30  # random histories for which inner products must be the scores
TOLERANCE = 1e-3  # relative to the largest score
QUERIES = 200  # random queries for the recall of an index


def vectors_of(release: Release, dim: int | None = None) -> Vectors:
    """The vectors of a released recommender.

    Args:
        release: the model.
        dim: number of coordinates, for counts (default: 64); a network has its own.
    """
    if "text" in release.metadata:
        raise DpformerError("this is a language model, but vectors are those of recommenders")
    try:
        found = kind_of(release.model).vectors(release.model, dim)
    except ValueError as error:
        raise DpformerError(str(error)) from None
    if found.lost is None:
        _check(found, release.model)
    return found


def _check(found: Vectors, model: Any) -> None:
    """Inner products must be the model's scores."""
    rng = np.random.default_rng(0)
    histories = [rng.integers(0, model.num_items, rng.integers(0, model.max_length + 1)) for _ in range(CHECKED)]
    with torch.no_grad():
        due = model.scores(histories).numpy()
    apart = float(np.abs(found.queries(histories) @ found.items.T - due).max())
    if not apart <= TOLERANCE * max(1.0, float(np.abs(due).max())):
        raise DpformerError(f"inner products differ from the model's scores by {apart:.2g}: nothing was written")


def measure_loss(found: Vectors, release: Release, dataset: Dataset) -> dict[str, Any]:
    """NDCG of the model and of the vectors on held-out items, seen items excluded. Not covered by the guarantee."""
    from dpformer.evaluation import evaluate, ndcg

    if dataset.num_items != len(release.vocabulary):
        raise DpformerError(
            "the data has items that the model lacks: the loss is measured with a public item list only"
        )
    exact = evaluate(ranker(release.model), dataset).served
    coarse = evaluate(lambda histories: torch.from_numpy(found.queries(histories) @ found.items.T), dataset).served
    before, after = float(ndcg(exact, 10)), float(ndcg(coarse, 10))
    return {"users": len(exact), "ndcg": before, "ndcg_vectors": after, "covered": False}


def write_items(found: Vectors, release: Release, path: str | Path) -> None:
    """A Parquet file: item_id, title if there are titles, vector FLOAT[d] and, for counts, query FLOAT[d]."""
    columns = {"item_id": [str(name) for name in release.vocabulary]}
    if release.titles is not None:
        columns["title"] = list(release.titles)
    tables = {"vector": found.items} | ({} if found.parts is None else {"query": found.parts})
    _write(path, columns, tables)


def write_queries(found: Vectors, user_ids: Sequence[str], histories: Sequence[np.ndarray], path: str | Path) -> None:
    """A Parquet file: user_id, query FLOAT[d]; as private as the histories."""
    _write(path, {"user_id": [str(name) for name in user_ids]}, {"query": found.queries(histories)})


def _write(path: str | Path, columns: dict[str, list[str]], tables: dict[str, np.ndarray]) -> None:
    from dpformer.engines.duckdb_connection import connect, text

    path = Path(path)
    if path.suffix.lower() != ".parquet":
        raise DpformerError(f"{path.name} is not a Parquet file: give a name ending in .parquet")
    with replacing(path) as part, connect(what=str(path), failed="cannot be written") as connection:
        rows = len(next(iter(tables.values())))
        names = {name: np.array(values, dtype=object) for name, values in columns.items()}
        connection.register("named", {"number": np.arange(rows), **names})
        joins, shown = "", ", ".join(columns)
        for name, table in tables.items():
            number, place = (axis.ravel() for axis in np.indices(table.shape))
            values = np.ascontiguousarray(table, dtype=np.float32).ravel()
            connection.register(f"{name}_cells", {"number": number, "place": place, "value": values})
            joins += f""" JOIN (SELECT number, list(value ORDER BY place)::FLOAT[{table.shape[1]}] AS {name}
                FROM {name}_cells GROUP BY number) USING (number)"""
            shown += f", {name}"
        query = f"SELECT {shown} FROM named{joins} ORDER BY number"
        connection.execute(f"COPY ({query}) TO {text(str(part))} (FORMAT parquet, COMPRESSION zstd)")


def write_index(found: Vectors, path: str | Path, k: int = 10) -> float:
    """An index of usearch over the item vectors, with item numbers as keys; returns its recall@k on random queries."""
    if find_spec("usearch") is None:
        raise MissingExtra("usearch", "index")
    from usearch.index import Index

    index = Index(ndim=found.items.shape[1], metric="ip", dtype="f32", connectivity=32, expansion_search=256)
    numbers = np.arange(len(found.items), dtype=np.uint64)
    index.add(numbers, np.ascontiguousarray(found.items, dtype=np.float32))
    rng, k = np.random.default_rng(0), min(k, len(numbers))
    queries = found.queries([rng.integers(0, len(numbers), 1 + place % 20) for place in range(QUERIES)])
    best = np.argpartition(-(queries @ found.items.T), k - 1)[:, :k]
    keys = np.asarray(index.search(queries.astype(np.float32), k).keys, dtype=np.int64).reshape(QUERIES, -1)
    with replacing(Path(path)) as part:
        index.save(str(part))
    return float(np.mean([len(np.intersect1d(*pair)) / k for pair in zip(best, keys, strict=True)]))
