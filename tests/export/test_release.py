"""The released file: everything comes back as it was, and nothing else gets in."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dpformer.data import Vocabulary
from dpformer.errors import DpformerError
from dpformer.models import GRU, LSTM, SequenceModel, Transformer
from dpformer.models.counts import TransitionCounts
from dpformer.runs import model_file as module
from dpformer.runs.model_file import load_release, model_file, save_release

IDS: list[Any] = [1, "b", -3, "ü", 10**30, "\ud800", "two words"]
MODELS: dict[str, Callable[[], SequenceModel]] = {
    "transformer": lambda: Transformer(7, 5, dim=8),
    "re-attention": lambda: Transformer(7, 5, dim=8, heads=2, blocks=3, hidden=12, reattention="literal", norm="pre"),
    "not shared": lambda: Transformer(7, 5, dim=8, shared=False, activation="gelu"),
    "gru": lambda: GRU(7, 5, dim=8),
    "lstm": lambda: LSTM(7, 5, dim=8, shared=False),
}


def made(name: str = "re-attention") -> SequenceModel:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    frequencies = torch.linspace(0.1, 0.9, 7)
    model.set_frequencies(frequencies)
    if isinstance(model, Transformer):
        model.set_privacy(1.0, 10, frequencies)
    return model


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_release(path, made(), vocabulary=IDS, metadata={"a": [1, None]})
    return path


@pytest.mark.parametrize("name", MODELS)
def test_all_comes_back(name: str, tmp_path: Path) -> None:
    model, path = made(name), tmp_path / "model.safetensors"
    frequencies = np.linspace(0, 0.4, 7)
    save_release(path, model, vocabulary=IDS, titles=list("ABCDEFG"), metadata={"ε": 5.0}, frequencies=frequencies)
    release = load_release(path)
    assert release.vocabulary == IDS and [type(name) for name in release.vocabulary] == [type(name) for name in IDS]
    assert release.titles == list("ABCDEFG") and release.metadata == {"ε": 5.0}
    assert release.frequencies is not None and np.array_equal(release.frequencies, frequencies)
    assert type(release.model) is type(model) and not release.model.training
    assert release.model.arguments == model.arguments
    histories = [[0, 6, 3], [], [5, 4, 3, 2, 1, 0]]
    assert torch.equal(release.model.scores(histories), model.scores(histories))
    assert [p.requires_grad for p in release.model.parameters()] == [p.requires_grad for p in model.parameters()]


def test_a_vocabulary_brings_its_titles(tmp_path: Path) -> None:
    words = Vocabulary([f"i{n}" for n in range(7)], [f"Title {n}" for n in range(7)])
    save_release(tmp_path / "m", made("gru"), vocabulary=words, metadata={})
    release = load_release(tmp_path / "m")
    assert release.vocabulary == words.ids and release.title(3) == "Title 3" and release.frequencies is None
    assert release.index(["i6", "i0"]).tolist() == [6, 0]


def test_equal_models_are_equal_files_that_others_may_read(tmp_path: Path, good: Path) -> None:
    save_release(tmp_path / "again", made(), vocabulary=IDS, metadata={"a": [1, None]})
    assert good.read_bytes() == (tmp_path / "again").read_bytes()
    mask = os.umask(0)
    os.umask(mask)
    assert good.stat().st_mode & 0o777 == 0o666 & ~mask


@settings(max_examples=80)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_single_wrong_bit_or_a_cut_is_refused(good: Path, place: float, bit: int, cut: bool) -> None:
    content = bytearray(good.read_bytes())
    at = int(place * len(content))
    content[at] ^= 1 << bit
    bad = good.with_name("bad")
    bad.write_bytes(content[:at] if cut else content)
    with pytest.raises(DpformerError, match="is not an intact dpformer model") as error:
        load_release(bad)
    assert "\n" not in str(error.value)


@settings(max_examples=50)
@given(st.binary(max_size=300))
def test_junk_is_refused(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "junk").write_bytes(junk)
    with pytest.raises(DpformerError):
        load_release(tmp_path / "junk")


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch /tmp/dpformer-was-attacked",))


def test_foreign_files_are_refused_and_run_no_code(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Attack()))
    with pytest.raises(DpformerError):
        load_release(path)
    buffer = io.BytesIO()
    torch.save({"a": Attack()}, buffer)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(DpformerError):
        load_release(path)
    assert not Path("/tmp/dpformer-was-attacked").exists()
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(DpformerError, match="not written by dpformer"):
        load_release(path)


def forge(good: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """A file that is whole and says something else: what an attacker writes."""
    with module.safe_open(good, framework="pt") as file:
        about = json.loads(file.metadata()["dpformer"])
    tensors = load_file(good)
    about.pop("sha256")
    change(about, tensors)
    about["sha256"] = module._digest(about, tensors)
    path = good.with_name("forged")
    save_file(tensors, path, {"dpformer": json.dumps(about)})
    return path


FORGERIES: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], str]] = {
    "class": (lambda a, t: a.update(model="os.system"), "names the model 'os.system'"),
    "module": (lambda a, t: a.update(model=["Transformer"]), "names the model"),
    "format": (lambda a, t: a.update(format=2), "format 2"),
    "items": (lambda a, t: a["arguments"].update(num_items=10**12), "7 ids for 1000000000000 items"),
    "width": (lambda a, t: a["arguments"].update(dim=2**24, hidden=None), "has shape"),
    "length": (lambda a, t: a["arguments"].update(max_length=2**50), "has shape"),
    "layers": (lambda a, t: a["arguments"].update(blocks=10**9), "claims 1000000000 blocks"),
    "unknown argument": (lambda a, t: a["arguments"].update(path="/etc"), "path"),
    "arguments": (lambda a, t: a.update(arguments=[1]), "list"),
    "extra tensor": (lambda a, t: t.update({"model.x": torch.zeros(1)}), "do not fit a Transformer"),
    "missing tensor": (lambda a, t: t.pop("model.items.weight"), "do not fit a Transformer"),
    "shape": (lambda a, t: t.update({"model.bias": torch.zeros(8)}), "shape"),
    "kind": (lambda a, t: t.update({"model.bias": torch.zeros(7, dtype=torch.int32)}), "int32"),
    "not finite": (lambda a, t: t["model.bias"].fill_(np.nan), "not finite"),
    "vocabulary": (lambda a, t: t.update(vocabulary=module._pack([1, "1", 3, 4, 5, 6, 7])), "twice"),
    "id": (lambda a, t: t.update(vocabulary=module._pack([[], 2, 3, 4, 5, 6, 7])), "neither text nor"),
    "text": (lambda a, t: t.update(vocabulary=torch.zeros(3)), "float32"),
    "titles": (lambda a, t: t.update(titles=module._pack(["a"])), "titles"),
    "frequencies": (lambda a, t: t.update(frequencies=torch.full((7,), -1.0)), "frequencies"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused(name: str, good: Path) -> None:
    change, says = FORGERIES[name]
    with pytest.raises(DpformerError, match=says):
        load_release(forge(good, change))


def test_transition_counts_come_back_and_lead_nowhere_else(tmp_path: Path) -> None:
    model, path = TransitionCounts(7, 3), tmp_path / "counts"
    model.offsets.copy_(torch.tensor([0, 2, 2, 3, 3, 3, 3, 3]))
    model.targets.copy_(torch.tensor([1, 4, 6]))
    model.chances.copy_(torch.tensor([0.5, 0.25, 0.1]))
    save_release(path, model, vocabulary=IDS, metadata={})
    assert torch.equal(load_release(path).model.scores([[0], [2, 5]]), model.scores([[0], [2, 5]]))
    for name, values in (
        ("offsets", [0, 2, 1, 3, 3, 3, 3, 3]),
        ("offsets", [0, 2, 2, 3, 3, 3, 3, 10**9]),
        ("offsets", [1, 2, 2, 3, 3, 3, 3, 3]),
        ("targets", [1, 4, 7]),
        ("targets", [-1, 4, 6]),
    ):
        with pytest.raises(DpformerError, match=r"rows|outside"):
            load_release(forge(path, lambda a, t, n=name, v=values: t.update({f"model.{n}": torch.tensor(v)})))  # type: ignore[misc]


def test_an_honest_change_passes_as_a_check_of_the_forger(good: Path) -> None:
    assert load_release(forge(good, lambda a, t: a.update(metadata={"b": 2}))).metadata == {"b": 2}


def test_what_is_no_model_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "m"
    for vocabulary, says in ((IDS[:3], "3 ids for 7"), ([7, "7", 1, 2, 3, 4, 5], "twice"), ([1.5] * 7, "neither")):
        with pytest.raises(ValueError, match=says):
            save_release(path, made(), vocabulary=vocabulary, metadata={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="item_error holds numbers that are not finite"):
        save_release(path, Transformer(7, 5, dim=8, reattention=True), vocabulary=IDS, metadata={})
    with pytest.raises(ValueError, match="Linear cannot be released"):
        save_release(path, torch.nn.Linear(2, 2), vocabulary=IDS, metadata={})  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        save_release(path, made(), vocabulary=IDS, metadata={"a": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = good.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DpformerError, match="No space left"):
        save_release(good, made("gru"), vocabulary=IDS, metadata={})
    assert good.read_bytes() == before and [path.name for path in good.parent.iterdir()] == [good.name]


def test_recommendations_are_the_best_that_are_not_in_the_history(good: Path) -> None:
    release = load_release(good)
    history = np.array([2, 2, 5])
    (best,) = release.recommend([history], 3)
    scores = release.model.scores([history])[0].tolist()
    order = sorted((n for n in range(7) if n not in (2, 5)), key=lambda n: -scores[n])
    assert [entry["item_id"] for entry in best] == [IDS[n] for n in order[:3]]
    assert [entry["score"] for entry in best] == pytest.approx([scores[n] for n in order[:3]])
    everything, nothing = release.recommend([np.arange(6), np.arange(7)], 5)
    assert [entry["item_id"] for entry in everything] == [IDS[6]] and nothing == []


def test_unknown_ids_are_named(good: Path) -> None:
    with pytest.raises(DpformerError, match=r"not among the 7 items of the model: 'x', 'y'$"):
        load_release(good).index(["x", 1, "y", "x"])
    with pytest.raises(DpformerError, match="an invalid item id"):
        load_release(good).index([None])


def test_a_folder_stands_for_its_model(good: Path, tmp_path: Path) -> None:
    assert model_file(tmp_path) == good and model_file(good) == good
    (tmp_path / "empty").mkdir()
    with pytest.raises(DpformerError, match="holds no model"):
        model_file(tmp_path / "empty")
    with pytest.raises(DpformerError, match="does not exist"):
        load_release(tmp_path / "nowhere")
