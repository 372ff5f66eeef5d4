"""`dpformer export`: a file that serves, and what int8 costs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.tiny_runs import copied, printed, ranking_of, refused, same_ranking, tiny_run


@pytest.fixture
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory)


@pytest.fixture
def attributes(tmp_path: Path) -> Path:
    """A catalogue that says what items share, as a shop's does."""
    path = tmp_path / "items.csv"
    rows = (f"i{item},Title {item},{'shoes' if item % 2 else 'shirts'},brand {item % 3}\n" for item in range(20))
    path.write_text("item_id,title,category,brand\n" + "".join(rows))
    return path


EVERY_KIND: dict[str, dict[str, Any]] = {
    "transformer": {},
    "re-attention": {"reattention": True},
    "warm start": {"warm_start": 0.5},
    "gru": {"model": "gru"},
    "lstm": {"model": "lstm"},
    "counts": {"model": "counts"},
    "counts with attributes": {"model": "counts", "catalog": "attributes"},
    "counts without a catalogue": {"model": "counts", "catalog": None},
}


@pytest.mark.parametrize("name", EVERY_KIND)
def test_the_file_answers_like_recommend(
    name: str, attributes: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    choices = {key: attributes if value == "attributes" else value for key, value in EVERY_KIND[name].items()}
    run, path = tiny_run(tmp_path_factory, **choices), tmp_path / "m.onnx"
    facts = json.loads(printed("export", run, path, "-k", 5, "--json"))
    assert facts["bytes"] == path.stat().st_size and facts["checked"] > 0 and not facts["int8"]
    runtime = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = json.loads(runtime.get_modelmeta().custom_metadata_map["dpformer.vocabulary"])
    items, scores = runtime.run(None, {"history": np.array([[ids.index("i3"), ids.index("i7")]])})
    line = json.loads(printed("recommend", run, "--history", "i3,i7", "-k", 5, "--json"))
    found = [(ids[item], score) for item, score in zip(items[0], scores[0].tolist(), strict=True)]
    same_ranking(found, ranking_of(line["recommendations"]))


def test_int8_says_what_it_costs(run: Path, tmp_path: Path) -> None:
    facts = json.loads(printed("export", run, tmp_path / "m.onnx", "--int8", "--json"))
    loss = facts["int8_loss"]
    assert loss["loss"] == pytest.approx(loss["ndcg"] - loss["ndcg_int8"]) and loss["users"] > 0
    assert loss["covered"] is False
    assert "int8 changes NDCG@10 from" in printed("export", run, tmp_path / "m.onnx", "--int8")
    alone = printed("export", run / "model.safetensors", tmp_path / "m.onnx", "--int8")
    assert "could not be measured" in alone and (tmp_path / "m.onnx").exists()


def test_bad_input_is_one_sentence(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert "k is 0" in refused("export", run, out / "m.onnx", "-k", 0)
    assert "k is 21; it must be between 1 and 20" in refused("export", run, out / "m.onnx", "-k", 21)
    assert "does not exist" in refused("export", tmp_path / "nowhere", out / "m.onnx")
    assert "cannot be written" in refused("export", run, out / "nowhere" / "m.onnx")
    assert "cannot be written" in refused("export", run, out)
    spoiled = copied(run, tmp_path)
    (spoiled / "model.safetensors").write_bytes(b"PK\x03\x04")
    assert "not an intact dpformer model" in refused("export", spoiled, out / "m.onnx")
    assert not list(out.iterdir())
