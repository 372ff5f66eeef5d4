"""The kinds of models, by the name that `--model` gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from dpformer.kinds.base import ModelKind
from dpformer.kinds.counts import COUNTS
from dpformer.kinds.pretrained import PRETRAINED
from dpformer.kinds.recurrent import GRU, LSTM
from dpformer.kinds.transformer import TRANSFORMER

KINDS: dict[str, ModelKind] = {kind.name: kind for kind in (COUNTS, TRANSFORMER, GRU, LSTM, PRETRAINED)}
K = TypeVar("K", bound=ModelKind)
ANY = ModelKind()  # any other model, of which only the scores are known


def register(kind: K) -> K:
    """Add a kind; a name that is taken is refused."""
    if kind.name in KINDS:
        raise ValueError(f"a kind of model {kind.name!r} already exists")
    KINDS[kind.name] = kind
    return kind


def kind_of(model: Any) -> ModelKind:
    """The kind of a model, by its class."""
    return next((kind for kind in KINDS.values() if type(model).__name__ in kind.classes), ANY)


def classes() -> dict[str, str]:
    """class → module: everything that a model file may name."""
    return {name: module for kind in KINDS.values() for name, module in kind.classes.items()}


def named_by(path: Path) -> dict[str, Any] | None:
    """The options that `--model PATH` stands for; None if no kind recognises the path."""
    found = (kind.named_by(path) for kind in KINDS.values())
    return next((choices for choices in found if choices is not None), None)


def trained_names() -> str:
    """The names of trained kinds, for messages."""
    names = [kind.name for kind in KINDS.values() if kind.trains and kind is not PRETRAINED]
    return f"{', '.join(names[:-1])} or {names[-1]}"
