"""From text to one token sequence per *unit*. The unit is what the guarantee protects, so it is never guessed.

| unit | one sample is | from |
| --- | --- | --- |
| `chunk` | `max_length` consecutive tokens, at fixed places of the file | any text |
| `line` | a line, ended by `\n` and nothing else | any text |
| `document` | a line of JSON or row of a table, or all with the same document id | JSON lines or a table with `text` |
| `author` | all texts of one author | JSON lines with `text` and `author` |

The vocabulary is public: characters of given Unicode ranges, with one replacement symbol for all others, or the tokens
of a given tokenizer file. It is never taken from the data.

A tenth is held out. For chunks that is the last tenth of the file (as usual for TinyShakespeare; the position of the
cut is assumed public). For other units it is those whose id (or text, if there is no id) has a certain keyed hash, so
that one unit's assignment does not depend on the others. Held-out and empty units are still units: they add nothing to
training, and N, the number of units, does not depend on anyone's text.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dpformer.accounting.units import Unit
from dpformer.data.dataset import Dataset
from dpformer.data.population import with_declared
from dpformer.data.reading import Reading
from dpformer.data.text_table import Here, TextColumns, here, table_texts
from dpformer.data.tokens import Tokens
from dpformer.errors import DpformerError

HELD_OUT = 10  # one in ten
_SPLIT_KEY = b"dpformer held-out units 1"  # fixed and public: the split is a function of each unit alone
AUTHOR_KEYS = ("author", "author_id", "user", "user_id")
DOCUMENT_KEYS = ("document", "document_id", "doc_id", "id")


@dataclass(frozen=True, eq=False)
class TextDataset(Dataset):
    """Sequences of tokens, one per unit; "items" are tokens and "users" are units.

    Held out are whole units, whose sequences are empty here, or the end of a text in chunks: `held_out_text`, one token
    array each.
    """

    tokens: Tokens | None = None
    held_out_text: Sequence[np.ndarray] = field(default_factory=list)
    held_out_characters: int = 0

    @cached_property
    def train_stops(self) -> np.ndarray:
        return self.offsets[1:]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of tokens, vocabulary and split. Computed from the data without noise: do not release it."""
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
    units: int | None = None,
    text_column: str = "text",
    time_column: str | None = None,
    reading: Reading | None = None,
) -> TextDataset:
    """Read a text file, JSON lines, or a table as samples of a unit.

    Args:
        path: UTF-8 text; for `document` and `author` JSON lines or a table (Parquet, DuckDB, Delta, Iceberg, database);
            a file or a URL.
        unit: what one sample is, and what is protected.
        tokens: characters or a tokenizer (`Tokens`).
        max_length: number of last tokens of a unit to train on; the length of a chunk.
        id_column: key of the author or document id, if it is not one of the usual names.
        units: the declared number of units; by default they are counted.
        text_column: key or column of the text.
        time_column: column of a table by which texts are ordered.
        reading: format, table, query and snapshot of a table.
    """
    if unit not in get_args(Unit):
        raise DpformerError(f"unit is {unit!r}; it must be one of {', '.join(get_args(Unit))}")
    columns = text_columns(unit, id_column, text_column, time_column)
    with here(Path(path), reading or Reading(), columns) as found:
        train, held_out = _units(found, unit, tokens, max_length, columns)
    trained = sum(1 for ids in train if len(ids))
    if trained < 2 or not held_out:
        raise DpformerError(f"{path} gives {trained} units of text to train on and {len(held_out)} held out: too few")
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in train])]).astype(np.int64)
    # The owner of a unit is not needed.
    names, offsets = with_declared([""] * len(train), offsets, units, f"{unit}s")
    return TextDataset(
        items=np.concatenate(train).astype(np.int32),
        offsets=offsets,
        user_ids=names,
        vocabulary=tokens.vocabulary,
        max_length=max_length,
        description={
            **_description(unit, tokens, max_length),
            **({} if found.snapshot is None else {"snapshot": found.snapshot}),
            "users": len(names),
            "users_declared": units is not None,
        },
        tokens=tokens,
        held_out_text=[ids.astype(np.int32) for ids, _ in held_out],
        held_out_characters=sum(characters for _, characters in held_out),
    )


def text_columns(unit: Unit, id_column: str | None, text: str = "text", time: str | None = None) -> TextColumns:
    """The columns for a unit; documents need no id."""
    ids = (id_column,) if id_column is not None else AUTHOR_KEYS if unit == "author" else DOCUMENT_KEYS
    return TextColumns(text, ids, unit == "author" or id_column is not None, time)


def _units(
    found: Here, unit: Unit, tokens: Tokens, max_length: int, columns: TextColumns
) -> tuple[list[np.ndarray], Held]:
    """The sequence that each unit trains on, and what is held out."""
    form = found.format()
    if form is not None:
        if unit not in ("author", "document"):
            raise DpformerError(f"unit is {unit}, but {found.where} is a table: give --unit author or document")
        return _by_id(table_texts(found, form, columns), tokens)
    given = [name for name in ("table", "query", "snapshot") if getattr(found.reading, name) is not None]
    given += [] if columns.time is None else ["timestamp_column"]
    if given:
        raise DpformerError(
            f"--{given[0].replace('_', '-')} applies to tables, but {found.where} is JSON lines or plain text: omit it"
        )
    if unit == "chunk":
        return _chunks(_read(found.path), tokens, max_length)
    if unit == "line":
        return _split(((line, [line]) for line in _lines(_read(found.path))), tokens)
    return _by_id(_json_texts(found.path, columns), tokens)


Held = list[tuple[np.ndarray, int]]  # tokens, and their number of characters


def _chunks(text: str, tokens: Tokens, max_length: int) -> tuple[list[np.ndarray], Held]:
    """The first nine tenths of the characters in chunks; the rest in one piece."""
    cut = len(text) * (HELD_OUT - 1) // HELD_OUT
    stream = tokens.encode(text[:cut])
    train = [stream[at : at + max_length] for at in range(0, len(stream), max_length)]
    return train, [(tokens.encode(text[cut:]), len(text) - cut)] if text[cut:] else []


def _lines(text: str) -> list[str]:
    """Lines between `\n` and no other character: form feeds and U+2028 are text, which one unit may contain."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def _by_id(texts: Iterable[tuple[str | None, str]], tokens: Tokens) -> tuple[list[np.ndarray], Held]:
    """Units of (id, text); a text without an id is a unit by itself, even if another one is identical."""
    together: dict[str, list[str]] = {}
    alone: list[tuple[str, list[str]]] = []
    for name, text in texts:
        if name is None:
            alone.append((text, [text]))
        else:
            together.setdefault(name, []).append(text)
    return _split((*together.items(), *alone), tokens)


def _split(units: Iterable[tuple[str, list[str]]], tokens: Tokens) -> tuple[list[np.ndarray], Held]:
    """The training tokens of each unit of (id, texts), empty if held out or empty; and the held-out tokens."""
    train: list[np.ndarray] = []
    held_out: Held = []
    nothing = np.zeros(0, np.int32)
    for name, parts in units:
        text = _framed("\n".join(parts))
        if not text.strip():
            train.append(nothing)
        elif _is_held_out(name):
            train.append(nothing)
            held_out.append((tokens.encode(text), len(text)))
        else:
            train.append(tokens.encode(text))
    return train, held_out


def _framed(text: str) -> str:
    """A unit begins after a line break, from which its first token is predicted, and ends with one."""
    return f"\n{text}\n"


def _is_held_out(name: str) -> bool:
    """By the unit's own id or text alone: a position in the file would depend on other units."""
    code = hmac.digest(_SPLIT_KEY, name.encode("utf-8", "surrogatepass"), "sha256")
    return int.from_bytes(code[:8], "big") % HELD_OUT == 0


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")  # line breaks unchanged
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DpformerError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}"
        ) from None
    if not text.strip():
        raise DpformerError(f"{path} contains no text")
    return text


def _json_texts(path: Path, columns: TextColumns) -> Iterator[tuple[str | None, str]]:
    """(id, text) of each line; documents need no id."""
    for number, line in enumerate(_read(path).split("\n"), start=1):  # other line breaks may be part of a text
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_pairs)
        except (ValueError, RecursionError) as error:
            raise DpformerError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(columns.text), str):
            raise DpformerError(f'{path}, line {number} has no text under "{columns.text}"')
        name = next((row[key] for key in columns.ids if row.get(key) is not None), None)
        if name is None and columns.required:
            raise DpformerError(f"{path}, line {number} has no {columns.ids[0]!r}, but each text needs an owner")
        yield None if name is None else str(name), row[columns.text]


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a duplicate key would leave its owner ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
        raise ValueError(f"it has a duplicate key {twice[:40]!r}")
    return found


def _description(unit: Unit, tokens: Tokens, max_length: int) -> dict[str, Any]:
    return {"task": "lm", "unit": unit, "max_length": max_length, "tokens": tokens.description}


def decoder(release: Any) -> tuple[Tokens, Callable[[Sequence[int]], str]]:
    """Tokens of a released language model, and a function from tokens back to text."""
    about = release.metadata.get("text")
    if not isinstance(about, dict):
        raise DpformerError("this model was not trained on text: use dpformer recommend")
    tokens = Tokens.from_json(about["tokenizer"]) if about.get("tokenizer") else Tokens.of_titles(release.titles or [])
    return tokens, tokens.decode
