"""The ONNX file gives the model's own answers, holds the embedding once, and is not written otherwise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from dpformer.errors import DpformerError, MissingExtra
from dpformer.export import export_onnx
from dpformer.export import onnx as module
from dpformer.export.int8 import quantize, restore, rounded
from dpformer.export.loss import measure_loss
from dpformer.export.onnx import padded, session
from dpformer.models import GRU, LSTM, SequenceModel, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.runs.model_file import Release
from tests.tiny_runs import ranking_of, same_ranking

M, LONGEST, DIM = 60, 9, 12
OF_COUNTS = ("counts", "attributes")
KINDS = ("transformer", "re-attention", "literal", "gru", "lstm", "not shared")


def counts() -> TransitionCounts:
    """300 transitions between random items: many lead to the same item, and some items to none."""
    model = TransitionCounts(M, 300)
    rows = torch.randint(0, M - 10, (300,)).sort().values
    model.offsets.copy_(torch.searchsorted(rows, torch.arange(M + 1)))
    model.targets.copy_(torch.randint(0, M, (300,)))
    model.chances.copy_(torch.rand(300) / 10)
    model.popularity.copy_(torch.rand(M))
    return model.eval()


def described(items: int, transitions: int, attributes: int, links: int) -> TransitionCounts:
    """Counts that back off to attributes: items without any, attributes of many items, an attribute twice in a row."""
    model = TransitionCounts(items, transitions, attributes, links)
    for name, size, rows, columns in (
        ("", transitions, items - 10, items), ("attribute_", links, items - 5, attributes)
    ):  # fmt: skip
        origins = torch.randint(0, rows, (size,)).sort().values
        getattr(model, f"{name}offsets").copy_(torch.searchsorted(origins, torch.arange(items + 1)))
        getattr(model, f"{name}links" if name else "targets").copy_(torch.randint(0, columns, (size,)))
    model.chances.copy_(torch.rand(transitions) / 10)
    model.popularity.copy_(torch.rand(items) / items)
    model.attribute_weights.copy_(torch.rand(attributes) + 0.1)
    model.pull.copy_(torch.rand(items) + 0.1)
    model.backoff.fill_(0.3)
    return model.eval()


def made(kind: str) -> Release:
    torch.manual_seed(0)
    if kind in OF_COUNTS:
        of_counts = described(M, 300, 8, 90) if kind == "attributes" else counts()
        return Release(of_counts, [f"i{item}" for item in range(M)], None, {})
    common: dict[str, Any] = {"dim": DIM}
    model: SequenceModel
    if kind in ("gru", "lstm"):
        model = {"gru": GRU, "lstm": LSTM}[kind](M, LONGEST, **common)
    elif kind == "not shared":
        model = Transformer(M, LONGEST, shared=False, norm="pre", activation="gelu", **common)
    else:
        variant: Any = {"transformer": False, "re-attention": True, "literal": "literal"}[kind]
        model = Transformer(M, LONGEST, heads=3, reattention=variant, **common)
    with torch.no_grad():
        for parameter in model.parameters():  # far from the small initial values, where attention does nothing
            parameter.mul_(2)
    frequencies = torch.rand(M)
    model.set_frequencies(frequencies)
    if isinstance(model, Transformer):
        model.set_privacy(1.0, 50, frequencies)
    names = [f"i{n}" if n % 2 else n for n in range(M)]
    return Release(model.eval(), names, [f"T{n}" for n in range(M)], {"headline": "ε"})


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Release, Any]]:
    """A release and ONNX Runtime with its file."""
    folder = tmp_path_factory.mktemp("onnx")
    return {kind: (made(kind), session(_export(made(kind), folder / f"{kind}.onnx"))) for kind in (*KINDS, *OF_COUNTS)}


def _export(release: Release, path: Path, **options: Any) -> Path:
    facts = export_onnx(release, path, k=7, **options)
    assert facts.bytes == path.stat().st_size and facts.largest_difference < 1e-4 and facts.checked > 20
    return path


@pytest.mark.parametrize("kind", (*KINDS, *OF_COUNTS))
@settings(max_examples=15)
@given(histories=st.lists(st.lists(st.integers(0, M - 1), max_size=LONGEST + 4), min_size=1, max_size=5))
def test_any_batch_and_length_gives_the_models_own_list(
    exported: dict[str, tuple[Release, Any]], kind: str, histories: list[list[int]]
) -> None:
    release, runtime = exported[kind]
    arrays = [np.array(history, dtype=np.int64) for history in histories]
    items, scores = runtime.run(["items", "scores"], {"history": padded(arrays)})
    for row, best in enumerate(release.recommend(arrays, 7)):
        assert np.allclose([entry["score"] for entry in best], scores[row], atol=1e-4, rtol=1e-4)
        assert not set(items[row]) & set(histories[row])
        gaps = np.diff([entry["score"] for entry in best])
        if (gaps < -1e-3).all():
            assert [release.vocabulary[item] for item in items[row]] == [entry["item_id"] for entry in best]


@pytest.mark.parametrize("kind", ["transformer", "attributes"])
def test_seen_items_are_recommended_if_asked(kind: str, tmp_path: Path) -> None:
    release = made(kind)
    runtime = session(_export(release, tmp_path / "m.onnx", filter_seen=False))
    histories = [np.array([3, 1, 4]), np.array([5])]
    items, scores = runtime.run(["items", "scores"], {"history": padded(histories)})
    expected = release.model.scores(histories)
    assert torch.allclose(torch.from_numpy(scores), expected.topk(7).values, atol=1e-4)
    assert torch.allclose(torch.from_numpy(scores), expected.gather(1, torch.from_numpy(items)), atol=1e-4)


def test_more_pads_change_nothing(exported: dict[str, tuple[Release, Any]]) -> None:
    for _, runtime in exported.values():
        history = np.array([[3, 1, 4, -1], [5, -1, -1, -1]])
        wider = np.pad(history, ((0, 0), (0, 30)), constant_values=-1)
        (narrow,), (wide,) = (runtime.run(["items"], {"history": h}) for h in (history, wider))
        assert (narrow == wide).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("int8", [False, True])
def test_one_file_and_one_embedding(kind: str, int8: bool, tmp_path: Path) -> None:
    release = made(kind)
    model = onnx.load(_export(release, tmp_path / "m.onnx", int8=int8), load_external_data=False)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    constants = [a.t for node in model.graph.node for a in node.attribute if a.name == "value"]
    size = [
        array.size for array in (*tensors.values(), *map(numpy_helper.to_array, constants)) if array.size >= M * DIM
    ]
    assert size == [M * DIM] * (2 if kind == "not shared" else 1), "the shared embedding is there once"
    kinds = {array.dtype for array in tensors.values() if array.size >= M * DIM}
    assert kinds == {np.dtype("int8" if int8 else "float32")}
    (history,) = model.graph.input
    assert [d.dim_param for d in history.type.tensor_type.shape.dim] == ["batch", "length"]
    about = {entry.key: json.loads(entry.value) for entry in model.metadata_props}
    assert about["dpformer.vocabulary"] == release.vocabulary and about["dpformer.titles"][3] == "T3"


def test_a_file_that_disagrees_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, other, convert = made("gru"), made("gru"), module._convert
    with torch.no_grad():
        other.model.items.weight[5] += 0.01
    monkeypatch.setattr(module, "_convert", lambda _, *rest: convert(module.TopItems(other.model, 10), *rest))
    with pytest.raises(DpformerError, match="nothing was written"):
        export_onnx(release, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in (0, -1, M + 1):
        with pytest.raises(DpformerError, match=f"k is {k}; it must be between 1 and {M}"):
            export_onnx(made("gru"), tmp_path / "m.onnx", k=k)
    with pytest.raises(DpformerError, match="cannot be written"):
        export_onnx(made("gru"), tmp_path / "nowhere" / "m.onnx")
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install 'dpformer\[export\]'"):
        export_onnx(made("gru"), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 1), st.integers(0, 999))
@settings(max_examples=40)
def test_int8_is_off_by_half_a_step_at_most(rows: int, columns: int, axis: int, seed: int) -> None:
    weight = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    weight[0] = 0
    codes, scales = quantize(weight, axis)
    again = restore(codes, scales, axis)
    step = scales[:, None] if axis == 0 else scales[None, :]
    assert codes.dtype == np.int8 and (np.abs(again - weight) <= step * 0.5001).all()
    assert np.allclose(restore(*quantize(again, axis), axis), again, rtol=1e-6), "rounding twice is rounding once"


def test_rounding_leaves_the_model_itself_alone() -> None:
    release = made("re-attention")
    before = {name: tensor.clone() for name, tensor in release.model.state_dict().items()}
    coarse = rounded(release.model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in release.model.state_dict().items())
    assert not torch.equal(coarse.items.weight, release.model.items.weight)


def test_the_loss_of_int8_is_that_of_the_written_file(tmp_path: Path) -> None:
    from dpformer.data import Dataset

    release, rng = made("transformer"), np.random.default_rng(0)
    dataset = Dataset.from_histories([rng.integers(0, M, rng.integers(1, 12)) for _ in range(40)], M)
    path = _export(release, tmp_path / "m.onnx")
    assert abs(measure_loss(path, release, dataset, 7)["loss"]) < 1e-9, "in float32 nothing is lost"
    users, targets = dataset.held_out()
    gains = []
    for user, target in zip(users, targets, strict=True):  # the slow way
        entries = release.recommend([dataset.test_history(int(user))], 7)[0]
        names = [release.vocabulary.index(entry["item_id"]) for entry in entries]
        gains.append(1 / np.log2(names.index(target) + 2) if target in names else 0.0)
    facts = measure_loss(path, release, dataset, 7)
    assert facts["ndcg"] == pytest.approx(np.mean(gains)) and facts["users"] == len(users)
    with torch.no_grad():
        release.model.items.weight.neg_()  # now the file is another model than the release
    assert measure_loss(path, release, dataset, 7)["loss"] != 0


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    text = replace(made("gru"), metadata={"text": {"unit": "line"}})
    with pytest.raises(DpformerError, match="language model"):
        export_onnx(text, tmp_path / "m.onnx")
    with pytest.raises(DpformerError, match="no matrices to store in int8"):
        export_onnx(made("counts"), tmp_path / "m.onnx", int8=True)
    assert not list(tmp_path.iterdir())


def test_counts_of_which_nothing_is_left_are_exported(tmp_path: Path) -> None:
    """Noise may hide every transition of a small log: the file could not be loaded then."""
    model = TransitionCounts(M, 0)
    model.popularity.copy_(torch.rand(M))
    _export(Release(model.eval(), [f"i{item}" for item in range(M)], None, {}), tmp_path / "m.onnx")


def test_a_large_catalogue_is_exported(tmp_path: Path) -> None:
    """10⁵ items with attributes: the graph reads the rows of the history alone, and gives the model's own list."""
    items = 100_000
    release = Release(described(items, 500_000, 500, 200_000), [f"i{item}" for item in range(items)], None, {})
    runtime = session(_export(release, tmp_path / "m.onnx"))
    histories = [np.arange(0, 60), np.array([items - 1]), np.array([], dtype=np.int64), np.array([7, 7, 7])]
    found, scores = runtime.run(["items", "scores"], {"history": padded(histories)})
    for row, best in enumerate(release.recommend(histories, 7)):
        ours = [(release.vocabulary[item], score) for item, score in zip(found[row], scores[row].tolist(), strict=True)]
        same_ranking(ours, ranking_of(best))
