"""The released model file (safetensors): the model, its vocabulary and its metadata.

    header "dpformer"      JSON: format, the model's class and constructor arguments, metadata
    model.<name>           the tensors of the model's state
    vocabulary, titles     JSON as bytes: the ids of items 0, 1, … as in the log (text or int), and titles
    attributes             JSON as bytes: [column, value] of each attribute of the model
    frequencies            (M,) float64, item frequencies, if public or released with DP

There is no pickle. A file is untrusted until it is checked: class names are looked up among those that a kind of model
has (`kinds.registry.classes`), and the model is built without memory (on the meta device) and compared with the
contents of the file, before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dpformer.data import Vocabulary
from dpformer.data.interactions import id_text
from dpformer.errors import DpformerError
from dpformer.evaluation import NonFiniteScores
from dpformer.files import replacing, strict_json
from dpformer.kinds.registry import classes

FORMAT = 1
Id: TypeAlias = "str | int"


class Model(Protocol):
    """A module of a known class: rebuilt by `type(model)(**model.arguments)`, after which its state is loaded."""

    arguments: dict[str, Any]
    num_items: int

    def scores(self, histories: Sequence[ArrayLike]) -> Tensor: ...


@dataclass(frozen=True)
class Release:
    """A model in evaluation mode, and the meaning of its item numbers."""

    model: Any  # a `Model`, which is also an nn.Module
    vocabulary: list[Id]
    titles: list[str] | None
    metadata: dict[str, Any]
    frequencies: np.ndarray | None = None  # (M,) float64

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {id_text(name): number for number, name in enumerate(self.vocabulary)}

    def index(self, ids: Iterable[Any]) -> np.ndarray:
        """Item numbers of ids, (n,) int64; unknown ids are named in the error."""
        try:
            names = [id_text(name) for name in ids]
        except ValueError as error:
            raise DpformerError(f"a history holds an invalid item id: {error}") from None
        unknown = list(dict.fromkeys(name for name in names if name not in self._numbers))
        if unknown:
            shown = ", ".join(map(repr, unknown[:5])) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
            raise DpformerError(f"not among the {len(self.vocabulary):,} items of the model: {shown}")
        return np.array([self._numbers[name] for name in names], dtype=np.int64)

    def title(self, item: int) -> str:
        """An item's title, or its id if it has none."""
        return (self.titles[item] if self.titles is not None else "") or str(self.vocabulary[item])

    def titled(self, catalog: Vocabulary) -> Release:
        """The same release with the titles of a catalogue; an item missing there keeps its id."""
        titles = {name: catalog.title(number) for number, name in enumerate(catalog.ids)}
        return replace(self, titles=[titles.get(name := id_text(item), name) for item in self.vocabulary])

    def recommend(self, histories: Sequence[np.ndarray], k: int = 10) -> list[list[dict[str, Any]]]:
        """For each history of item numbers (`index`), the k best items that are not in it, or as many as there are.

        An item is a dict of `item_id`, `title` if there are titles, and `score`, the model's logit.
        """
        with torch.no_grad():
            scores = self.model.scores(histories)
        if not bool(torch.isfinite(scores).all()):
            raise NonFiniteScores("the model's scores are not finite: training has diverged")
        for row, history in zip(scores, histories, strict=True):
            row[torch.from_numpy(np.array(history, dtype=np.int64))] = -torch.inf
        values, items = scores.topk(min(k, len(self.vocabulary)))
        return [
            [self._entry(item, value) for item, value in zip(*row, strict=True) if value > -torch.inf]
            for row in zip(items.tolist(), values.tolist(), strict=True)
        ]

    def entries(self, items: np.ndarray, scores: np.ndarray) -> list[dict[str, Any]]:
        """Ranked items as dicts; negative numbers are padding."""
        return [self._entry(item, s) for item, s in zip(items.tolist(), scores.tolist(), strict=True) if item >= 0]

    def _entry(self, item: int, score: float) -> dict[str, Any]:
        title = {} if self.titles is None else {"title": self.titles[item]}
        return {"item_id": self.vocabulary[item], **title, "score": score}


def save_release(
    path: str | Path,
    model: Model,
    *,
    vocabulary: Vocabulary | Sequence[Id],
    titles: Sequence[str] | None = None,
    metadata: Mapping[str, Any],
    frequencies: ArrayLike | None = None,
) -> None:
    """Write a model for release, atomically.

    Args:
        path: the file, replaced if it is there.
        model: of a class that belongs to a kind of model.
        vocabulary: the ids of items 0 … M−1, text or integers; a `Vocabulary` includes titles.
        titles: of the items.
        metadata: any JSON; it is published with the model, so it must hold nothing about individual users.
        frequencies: (M,) item frequencies, public or released with DP: never raw counts.
    """
    if isinstance(vocabulary, Vocabulary):
        titles = vocabulary.titles if titles is None else titles
        vocabulary = vocabulary.ids
    name, state = type(model).__name__, cast(nn.Module, model).state_dict()
    if name not in classes():
        raise ValueError(f"a {name} cannot be released; the classes that can are {', '.join(classes())}")
    _check_ids(vocabulary, model.num_items)
    tensors = {f"model.{key}": tensor.detach().cpu().contiguous() for key, tensor in state.items()}
    _check_finite(tensors)
    tensors["vocabulary"] = _pack(list(vocabulary))
    if titles is not None:
        tensors["titles"] = _pack(_check_titles(list(titles), model.num_items))
    if names := getattr(model, "attribute_names", None):
        tensors["attributes"] = _pack([list(name) for name in names])
    if frequencies is not None:
        tensors["frequencies"] = _check_frequencies(torch.as_tensor(np.asarray(frequencies)), model.num_items)
    about = {"format": FORMAT, "model": name, "arguments": model.arguments, "metadata": dict(metadata)}
    # One key only: safetensors writes several in random order, and equal runs must give equal files.
    header = {"dpformer": json.dumps({**about, "sha256": _digest(about, tensors)}, allow_nan=False)}
    with replacing(Path(path)) as part:
        part.write_bytes(save(tensors, header))  # safetensors' own function makes the file unreadable for others


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def model_file(path: str | Path) -> Path:
    """The model file of a run folder, or the file itself."""
    path = Path(path)
    if path.is_dir():
        if not (path / "model.safetensors").exists():
            raise DpformerError(
                f"{path} holds no model.safetensors: it is not a run folder, or the run is not finished"
            )
        return path / "model.safetensors"
    return path


def load_release(path: str | Path) -> Release:
    """Read what `save_release` wrote; anything else is refused in one sentence, and no code in it can run."""
    path = Path(path)
    if not path.is_file():
        raise DpformerError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            return _load(file)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DpformerError(f"{path} is not an intact dpformer model: {reason}") from None


def _load(file: Any) -> Release:
    header = file.metadata() or {}
    if "dpformer" not in header:
        raise ValueError("it was not written by dpformer")
    about = _parse(header["dpformer"], dict)
    if about.get("format") != FORMAT:
        raise ValueError(f"it has format {about.get('format')!r}, this version reads {FORMAT}")
    names = {key.removeprefix("model."): key for key in file.keys() if key.startswith("model.")}  # noqa: SIM118
    vocabulary = _parse(_bytes(file.get_tensor("vocabulary")), list)
    num_items = len(vocabulary)
    _check_ids(vocabulary, num_items)
    others = set(file.keys()) - set(names.values())
    titles = _check_titles(_parse(_bytes(file.get_tensor("titles")), list), num_items) if "titles" in others else None
    model = _empty_model(about["model"], _parse_arguments(about["arguments"], len(names), num_items))
    _check_shapes(model, {key: tuple(file.get_slice(name).get_shape()) for key, name in names.items()})
    # Copies: a tensor of an open file is a memory map.
    tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if about.pop("sha256", None) != _digest(about, tensors):
        raise ValueError("its contents were altered")
    state = {key: tensors[name] for key, name in names.items()}
    _check_kinds(model, state)
    _check_finite(state)
    model.load_state_dict(state, assign=True)
    if hasattr(model, "check_state"):  # tensors of indices must be in range
        cast(Any, model).check_state()
    if getattr(model, "num_attributes", 0):
        cast(Any, model).attribute_names = _attribute_names(tensors["attributes"], cast(Any, model).num_attributes)
    frequencies = None
    if "frequencies" in others:
        if tensors["frequencies"].dtype != torch.float64:
            raise ValueError(f"frequencies are stored as {tensors['frequencies'].dtype}")
        frequencies = _check_frequencies(tensors["frequencies"], num_items).numpy()
    return Release(model.eval(), vocabulary, titles, _dict(about["metadata"]), frequencies)


def _attribute_names(packed: Tensor, size: int) -> list[tuple[str, str]]:
    names = _parse(_bytes(packed), list)
    if len(names) != size:
        raise ValueError(f"it has {len(names)} names for {size} attributes")
    for name in names:
        if not (isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name)):
            raise ValueError(f"{name!r} is not the name of an attribute")
    return [(column, value) for column, value in names]


def _empty_model(name: object, arguments: dict[str, Any]) -> nn.Module:
    """The model on the meta device, without memory behind its tensors."""
    known = classes()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"it names the model {name!r}; known are {', '.join(known)}")
    with torch.device("meta"):
        model = getattr(import_module(known[name]), name)(**arguments)
    return cast(nn.Module, model)


def _parse_arguments(arguments: object, num_tensors: int, num_items: int) -> dict[str, Any]:
    known = _dict(arguments)
    if known.get("num_items") != num_items:
        raise ValueError(f"it has {num_items} ids for {known.get('num_items')} items")
    # Layers take time to build even without memory, so their number is bounded by that of the tensors.
    layers = known.get("blocks", 0)
    if not isinstance(layers, int) or layers > num_tensors:
        raise ValueError(f"it claims {layers!r} blocks but holds {num_tensors} tensors")
    return known


def _digest(about: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the contents of the file: bits flip on disks, and a wrong weight looks like any other."""
    digest = hashlib.sha256(json.dumps(about, allow_nan=False).encode("ascii"))
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_shapes(model: nn.Module, found: dict[str, tuple[int, ...]]) -> None:
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        raise ValueError(f"its tensors do not fit a {type(model).__name__} ({odd[0]})")
    for key, shape in found.items():
        if shape != expected[key]:
            raise ValueError(f"{key} has shape {shape} but the model needs {expected[key]}")


def _check_kinds(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Require exactly the model's dtypes: another precision, or complex numbers, would fail much later, or silently."""
    for key, empty in model.state_dict().items():
        if state[key].dtype != empty.dtype:
            raise ValueError(f"{key} holds {state[key].dtype} but the model needs {empty.dtype}")


def _check_finite(tensors: dict[str, Tensor]) -> None:
    for key, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{key} holds numbers that are not finite")


def _check_ids(ids: Sequence[object], num_items: int) -> None:
    if len(ids) != num_items:
        raise ValueError(f"there are {len(ids)} ids for {num_items} items")
    for name in ids:
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise ValueError(f"the id {name!r} is neither text nor an integer")
    if len({id_text(name) for name in ids}) != len(ids):
        raise ValueError("an id occurs twice in the vocabulary (7 and '7' are the same id)")


def _check_titles(titles: list[Any], num_items: int) -> list[str]:
    if len(titles) != num_items or not all(isinstance(title, str) for title in titles):
        raise ValueError(f"titles must be {num_items} texts, one per item")
    return titles


def _check_frequencies(frequencies: Tensor, num_items: int) -> Tensor:
    values = frequencies.detach().cpu().to(torch.float64).contiguous()
    if values.shape != (num_items,) or not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError(f"frequencies must be {num_items} finite numbers, 0 or more")
    return values


def _pack(value: list[Any]) -> Tensor:
    """JSON as bytes; pure ASCII, so that lone surrogates survive."""
    return torch.from_numpy(np.frombuffer(json.dumps(value).encode("ascii"), dtype=np.uint8).copy())


def _bytes(tensor: Tensor) -> str:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"its text is stored as {tensor.dtype}")
    return tensor.numpy().tobytes().decode("ascii")


def _parse(text: str, kind: type) -> Any:
    value = strict_json(text)
    if not isinstance(value, kind):
        raise ValueError(f"its JSON is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _dict(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"its JSON holds a {type(value).__name__} instead of an object")
    return value
