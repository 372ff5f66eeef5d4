"""Text in, one token sequence a *unit* out. The unit is what the guarantee protects, so it is never guessed.

| unit | one sample is | from |
| --- | --- | --- |
| `chunk` | `max_length` consecutive tokens, at fixed places of the file | any text |
| `line` | a line that is not empty | any text |
| `document` | a line of JSON, or all lines with the same document id | JSON lines with `text` |
| `author` | everything one author wrote | JSON lines with `text` and `author` |

The vocabulary is public: characters of given Unicode ranges, others becoming one replacement symbol, or the tokens of a
given tokenizer file. It is never taken from the data.

Held out is a tenth. Of plain text that is the last tenth of the file (as usual for TinyShakespeare; where the cut falls
is assumed public). Units with an id are held out by a hash of the id, so that nobody's part depends on anybody else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dpformer.accounting.units import Unit
from dpformer.data.dataset import Dataset
from dpformer.data.tokens import Tokens
from dpformer.errors import DpformerError

HELD_OUT = 10  # one in ten
AUTHOR_KEYS = ("author", "author_id", "user", "user_id")
DOCUMENT_KEYS = ("document", "document_id", "doc_id", "id")


@dataclass(frozen=True, eq=False)
class TextDataset(Dataset):
    """Sequences of tokens, one a unit; "items" are tokens and "users" are units. Nothing of a unit is held out.

    What is held out are other units or, of plain text, the end of it: `held_out_text`, one array of tokens each.
    """

    tokens: Tokens | None = None
    held_out_text: Sequence[np.ndarray] = field(default_factory=list)
    held_out_characters: int = 0

    @cached_property
    def train_stops(self) -> np.ndarray:
        return self.offsets[1:]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of tokens, vocabulary and split. Made from the data without noise: do not release it."""
        digest = hashlib.sha256(b"dpformer text 1\n")
        for array in (self.offsets, self.items, *self.held_out_text):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
            digest.update(b"|")
        for name in (*self.vocabulary.ids, *(self.vocabulary.titles or ())):
            digest.update(name.encode("utf-8", "surrogatepass") + b"\n")
        return digest.hexdigest()


def read_text(
    path: str | Path,
    *,
    unit: Unit,
    tokens: Tokens,
    max_length: int = 256,
    id_column: str | None = None,
) -> TextDataset:
    """Reads a text file, or JSON lines, as samples of a unit.

    Args:
        path: UTF-8 text, or JSON lines for `document` and `author`.
        unit: what one sample is, and what is protected.
        tokens: characters or a tokenizer (`Tokens`).
        max_length: tokens of a unit to train on, the last ones; the length of a chunk.
        id_column: key of the author or document id, if it is not a usual one.
    """
    if unit not in get_args(Unit):
        raise DpformerError(f"unit is {unit!r}; it must be one of {', '.join(get_args(Unit))}")
    path = Path(path)
    if unit in ("chunk", "line"):
        train, held_out = _plain(_read(path), unit, tokens, max_length)
    else:
        train, held_out = _by_id(_json_texts(path, unit, id_column), tokens)
    if len(train) < 2 or not held_out:
        raise DpformerError(
            f"{path} gives {len(train)} units of text to train on and {len(held_out)} held out: too few"
        )
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in train])]).astype(np.int64)
    return TextDataset(
        items=np.concatenate(train).astype(np.int32),
        offsets=offsets,
        user_ids=range(len(train)),  # type: ignore[arg-type]  # whose a unit is, nobody needs to know
        vocabulary=tokens.vocabulary,
        max_length=max_length,
        description=_description(unit, tokens, max_length, len(train)),
        tokens=tokens,
        held_out_text=[ids.astype(np.int32) for ids, _ in held_out],
        held_out_characters=sum(characters for _, characters in held_out),
    )


Held = list[tuple[np.ndarray, int]]  # tokens, and how many characters they are


def _plain(text: str, unit: Unit, tokens: Tokens, max_length: int) -> tuple[list[np.ndarray], Held]:
    """The first nine tenths of the characters in units; the rest, whole."""
    cut = len(text) * (HELD_OUT - 1) // HELD_OUT
    if unit == "line":
        cut = text.rfind("\n", 0, cut) + 1  # no line on both sides
        train = [tokens.encode(_framed(line)) for line in text[:cut].splitlines() if line.strip()]
    else:
        stream = tokens.encode(text[:cut])
        train = [stream[at : at + max_length] for at in range(0, len(stream), max_length)]
    return train, [(tokens.encode(text[cut:]), len(text) - cut)] if text[cut:] else []


def _by_id(texts: Iterable[tuple[str | None, str]], tokens: Tokens) -> tuple[list[np.ndarray], Held]:
    """Units of (id, text); a text without an id is a unit by itself, even if another one reads the same."""
    together: dict[str, list[str]] = {}
    alone: list[tuple[str, list[str]]] = []
    for name, text in texts:
        if name is None:
            alone.append((text, [text]))
        else:
            together.setdefault(name, []).append(text)
    train: list[np.ndarray] = []
    held_out: Held = []
    for name, parts in (*together.items(), *alone):
        text = _framed("\n".join(parts))
        if _is_held_out(name):
            held_out.append((tokens.encode(text), len(text)))
        else:
            train.append(tokens.encode(text))
    return train, held_out


def _framed(text: str) -> str:
    """A unit begins after a line break, from which its first token is predicted, and ends with one."""
    return f"\n{text}\n"


def _is_held_out(name: str) -> bool:
    """By the unit's own id or text alone: a place in the file would depend on what others have there."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") % HELD_OUT == 0


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DpformerError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    if not text.strip():
        raise DpformerError(f"{path} holds no text")
    return text


def _json_texts(path: Path, unit: Unit, id_column: str | None) -> Iterator[tuple[str | None, str]]:
    """(id, text) of each line; documents need no id."""
    keys = (id_column,) if id_column is not None else AUTHOR_KEYS if unit == "author" else DOCUMENT_KEYS
    for number, line in enumerate(_read(path).split("\n"), start=1):  # other line breaks may be inside a text
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DpformerError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise DpformerError(f'{path}, line {number} has no text under "text"')
        name = next((row[key] for key in keys if row.get(key) is not None), None)
        if name is None and (unit == "author" or id_column is not None):
            raise DpformerError(f"{path}, line {number} has no {keys[0]!r}; whose text it is has to be known")
        yield None if name is None else str(name), row["text"]


def _description(unit: Unit, tokens: Tokens, max_length: int, units: int) -> dict[str, Any]:
    return {"task": "lm", "unit": unit, "max_length": max_length, "users": units, "tokens": tokens.description}


def decoder(release: Any) -> tuple[Tokens, Callable[[Sequence[int]], str]]:
    """Tokens of a released language model, and the way back to text."""
    about = release.metadata.get("text")
    if not isinstance(about, dict):
        raise DpformerError("this model was not trained on text; dpformer recommend is for recommenders")
    tokens = Tokens.from_json(about["tokenizer"]) if about.get("tokenizer") else Tokens.of_titles(release.titles or [])
    return tokens, tokens.decode
