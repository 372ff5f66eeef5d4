"""Item vectors: inner products are scores; what a low rank loses is measured; files and indexes hold the same."""

import json
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from scipy import sparse

from dpformer.errors import DpformerError
from dpformer.export.vectors import vectors_of, write_index, write_items
from dpformer.models import LSTM, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.models.evidence import Evidence
from dpformer.models.vectors import _squares, of_counts
from dpformer.queries.transitions.rounds import nothing_released
from dpformer.runs.model_file import Release
from tests.export.test_onnx import counts, described
from tests.tiny_runs import printed, refused, tiny_run

M = 40
HISTORIES = [np.array([3, 9, 3, 1]), np.array([], dtype=np.int64), np.arange(30)]


@pytest.mark.parametrize("kind", ["shared", "not shared", "lstm"])
def test_inner_products_of_a_network_are_its_scores(kind: str) -> None:
    torch.manual_seed(0)
    model = LSTM(M, 12, dim=8) if kind == "lstm" else Transformer(M, 12, dim=8, shared=kind == "shared")
    model.set_frequencies(torch.rand(M))
    found = vectors_of(Release(model.eval(), list(range(M)), None, {}))
    assert found.items.shape == (M, 9) and found.lost is None
    with torch.no_grad():
        np.testing.assert_allclose(found.queries(HISTORIES) @ found.items.T, model.scores(HISTORIES).numpy(), atol=1e-5)


def dense(model: TransitionCounts) -> np.ndarray:
    evidence = Evidence(model)
    return (evidence.transitions + sparse.csr_array(evidence.reach @ evidence.offered)).toarray()


@pytest.mark.parametrize("kind", ["counts", "attributes"])
def test_counts_are_the_best_of_their_rank(kind: str) -> None:
    model = counts() if kind == "counts" else described(M, 300, 8, 90)
    table, dim = dense(model), 9
    assert _squares(Evidence(model)) == pytest.approx(float((table.astype(float) ** 2).sum()), rel=1e-5)
    found = of_counts(model, dim)
    left, values, right = np.linalg.svd(table)
    best = (left[:, : dim - 1] * values[: dim - 1]) @ right[: dim - 1]
    assert found.parts is not None
    np.testing.assert_allclose(found.parts[:, :-1] @ found.items[:, :-1].T, best, atol=1e-5)
    assert found.lost == pytest.approx(1 - (values[: dim - 1] ** 2).sum() / (values**2).sum(), abs=1e-5)
    # With (nearly) all of the rank, the inner product is the evidence: exp(score).
    full = of_counts(model, model.num_items - 1)
    histories = [history % model.num_items for history in HISTORIES]
    expected = model.scores(histories).exp().numpy()
    np.testing.assert_allclose(full.queries(histories) @ full.items.T, expected, atol=2e-3 * expected.max())


def test_wrong_vectors_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(M, 12, dim=8).eval()
    with torch.no_grad():
        model.items.weight.mul_(20)
    right = model.final_state
    monkeypatch.setattr(model, "final_state", lambda histories: right(histories) * 1.5)
    monkeypatch.setattr(model, "scores", lambda histories: right(histories) @ model.output_weight().T + model.bias)
    with pytest.raises(DpformerError, match="nothing was written"):
        vectors_of(Release(model, list(range(M)), None, {}))


def test_a_file_holds_them_in_order_and_an_index_finds_them(tmp_path: Path) -> None:
    pytest.importorskip("usearch", reason="usearch is not installed (dpformer[index])")
    from usearch.index import Index

    release = Release(described(M, 300, 8, 90), [f"i{n}" for n in range(M)], [f"T{n}" for n in range(M)], {})
    found = vectors_of(release, 12)
    write_items(found, release, tmp_path / "items.parquet")
    rows = duckdb.sql(f"SELECT * FROM '{tmp_path / 'items.parquet'}'")
    assert rows.columns == ["item_id", "title", "vector", "query"] and str(rows.types[2]) == "FLOAT[]"
    table = rows.fetchall()
    assert [row[0] for row in table] == release.vocabulary and [row[1] for row in table] == release.titles
    np.testing.assert_array_equal(np.array([row[2] for row in table], dtype=np.float32), found.items)
    assert write_index(found, tmp_path / "items.usearch") > 0.95
    index = Index.restore(str(tmp_path / "items.usearch"))
    query = found.queries([np.array([3, 9])])
    keys = np.asarray(index.search(query, 5).keys).ravel().tolist()
    assert set(keys) == set(np.argsort(-(query @ found.items.T)[0])[:5].tolist())


def test_on_the_command_line(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    run, log = tiny_run(tmp_path_factory, model="counts"), tmp_path / "log.csv"
    facts = json.loads(printed("export", run, "--vectors", tmp_path / "v.parquet", "--dim", 6, "--json"))
    assert facts["dim"] == 6 and 0 <= facts["lost"] < 1 and not facts["loss"]["covered"]
    assert "instead of" in printed("export", run, "--vectors", tmp_path / "v.parquet", "--dim", 6)
    network = tiny_run(tmp_path_factory)
    log.write_text("user_id,item_id,timestamp\nann,i3,1\nann,i7,2\nbob,i1,1\n")
    said = printed("export", network, "--queries", tmp_path / "q.parquet", "--histories", log)
    assert "query vectors of 2 users" in said and "inner products are the model's scores" in said
    rows = duckdb.sql(f"SELECT user_id, len(query) FROM '{tmp_path / 'q.parquet'}'").fetchall()
    assert [row[0] for row in rows] == ["ann", "bob"] and rows[0][1] == rows[1][1] > 2
    for arguments, words in (
        ((run,), "give either an output file"),
        ((run, tmp_path / "m.onnx", "--vectors", tmp_path / "v.parquet"), "give either an output file"),
        ((run, "--queries", tmp_path / "q.parquet"), "need each other"),
        ((run, "--vectors", tmp_path / "v.csv"), "give a name ending in .parquet"),
        ((run, "--vectors", tmp_path / "v.parquet", "--dim", 1), "dim is 1; it must be from 2 to the number of items"),
        ((network, "--vectors", tmp_path / "v.parquet", "--dim", 8), "those of a network have its own"),
    ):
        assert words in refused("export", *arguments)


def test_counts_of_which_nothing_is_left_have_vectors() -> None:
    """Popularity alone, which an item's last coordinate holds."""
    empty = TransitionCounts.from_release(nothing_released(M))
    found = of_counts(empty, 8)
    scores = found.queries(HISTORIES) @ found.items.T
    assert found.lost == 0.0 and found.items.shape == (M, 8)
    np.testing.assert_allclose(scores, np.broadcast_to(found.items[:, -1], scores.shape))
    np.testing.assert_allclose(scores[0], empty.scores([HISTORIES[1]]).exp().numpy()[0], rtol=1e-5)
