"""Public vocabularies for text: characters of Unicode ranges, or the tokens of a tokenizer file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.vocabulary import Vocabulary
from dpformer.errors import DpformerError

REPLACEMENT = "\ufffd"
SETS = {  # names of Unicode ranges; all include the line break
    "ascii": "U+000A,U+0020-U+007E",
    "latin": "U+000A,U+0020-U+007E,U+00A0-U+017F,U+2010-U+2027,U+20AC",
    "greek": "U+000A,U+0020-U+007E,U+0370-U+03FF",
    "cyrillic": "U+000A,U+0020-U+007E,U+0400-U+04FF",
}
LARGEST = 0x110000


class Tokens:
    """Text to token numbers and back: `characters` in order with the replacement last, or a Hugging Face tokenizer."""

    def __init__(self, characters: Sequence[str] = (), tokenizer: Any = None, description: str = "") -> None:
        self.characters, self.tokenizer, self.description = list(characters), tokenizer, description

    @classmethod
    def of_characters(cls, ranges: str = "ascii") -> Tokens:
        """Characters by a name of `SETS`, or ranges such as "U+000A,U+0020-U+007E"."""
        points: set[int] = {0x0A}
        for part in SETS.get(ranges, ranges).split(","):
            found = re.fullmatch(r"U\+([0-9A-Fa-f]{1,6})(?:-U\+([0-9A-Fa-f]{1,6}))?", part.strip())
            if found is None:
                raise DpformerError(
                    f"characters is {ranges!r}; give {', '.join(SETS)}, or ranges such as U+000A,U+0020-U+007E"
                )
            first, last = int(found[1], 16), int(found[2] or found[1], 16)
            if not first <= last < LARGEST:
                raise DpformerError(f"the range {part.strip()} of characters is empty, or exceeds U+10FFFF")
            points.update(range(first, last + 1))
        points -= {*range(0xD800, 0xE000), ord(REPLACEMENT)}
        words = f"The vocabulary is public: the {len(points):,} characters {SETS.get(ranges, ranges)}"
        return cls([*map(chr, sorted(points)), REPLACEMENT], None, f"{words}, and one symbol for any other.")

    @classmethod
    def of_file(cls, path: str | Path) -> Tokens:
        """A `tokenizer.json` of Hugging Face's tokenizers."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DpformerError(f"the tokenizer {path} cannot be read: {error}") from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, where: str = "of the model") -> Tokens:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DpformerError("a tokenizer file needs the tokenizers package: pip install 'dpformer[hf]'") from None
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # the package raises bare Exception
            raise DpformerError(f"the tokenizer {where} is not one of Hugging Face's tokenizers: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        size = tokenizer.get_vocab_size()
        numbers = sorted(tokenizer.get_vocab().values())
        if numbers != list(range(size)):
            raise DpformerError(f"the tokenizer {where} has gaps in its token numbers")
        return cls((), tokenizer, f"The vocabulary of {size:,} tokens is from a given tokenizer, assumed public.")

    @classmethod
    def of_titles(cls, titles: Sequence[str]) -> Tokens:
        """The characters of a released model."""
        return cls(titles)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Ids are names such as U+0041, or token numbers; titles are characters, or tokens."""
        if self.tokenizer is not None:
            words = [self.tokenizer.id_to_token(number) for number in range(self.tokenizer.get_vocab_size())]
            return Vocabulary([str(number) for number in range(len(words))], words, "catalog")
        return Vocabulary([f"U+{ord(c):04X}" for c in self.characters], self.characters, "catalog")

    @cached_property
    def _numbers(self) -> np.ndarray:
        """(LARGEST,) the token of each code point."""
        table = np.full(LARGEST, len(self.characters) - 1, dtype=np.int32)
        table[[ord(c) for c in self.characters]] = np.arange(len(self.characters))
        return table

    def encode(self, text: str) -> np.ndarray:
        """Token numbers, (n,) int32; carriage returns of line breaks are dropped."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        if self.tokenizer is not None:
            return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        return self._numbers[points]

    def decode(self, numbers: Sequence[int]) -> str:
        """Text of token numbers."""
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(list(numbers), skip_special_tokens=False))
        return "".join(self.characters[number] for number in numbers)

    @property
    def unknown(self) -> int | None:
        """The replacement symbol, which stands for many characters and is never generated."""
        return None if self.tokenizer is not None else len(self.characters) - 1

    def to_json(self) -> str | None:
        """The tokenizer as JSON, for the model file; characters are already in its vocabulary."""
        return None if self.tokenizer is None else str(self.tokenizer.to_str())
