"""Text as samples of a unit: nothing lost, nothing twice, and no unit depends on another."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data.text import read_text
from dpformer.data.tokens import REPLACEMENT, SETS, Tokens
from dpformer.errors import DpformerError
from dpformer.statement.data import text_statement

ASCII = Tokens.of_characters()
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=40)


def lines_of(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(dataset: object) -> list[str]:
    return [ASCII.decode(dataset.train(user)) for user in range(dataset.num_users)]  # type: ignore[attr-defined]


class TestTokens:
    def test_printable_ascii_is_the_default(self) -> None:
        assert len(ASCII.vocabulary) == 97 and ASCII.vocabulary.policy == "catalog"
        assert ASCII.vocabulary.ids[:3] == ["U+000A", "U+0020", "U+0021"] and ASCII.vocabulary.titles[0] == "\n"

    @given(TEXT)
    def test_there_and_back(self, text: str) -> None:
        expected = "".join(c if c == "\n" or " " <= c <= "~" else REPLACEMENT for c in text)
        assert ASCII.decode(ASCII.encode(text)) == expected

    def test_line_breaks_of_other_systems(self) -> None:
        assert ASCII.decode(ASCII.encode("a\r\nb\rc")) == "a\nb\nc"

    def test_ranges(self) -> None:
        tokens = Tokens.of_characters("U+0041-U+0043, u+0061".replace("u", "U"))
        assert tokens.characters == ["\n", "A", "B", "C", "a", REPLACEMENT]
        for name in SETS:
            assert "\n" in Tokens.of_characters(name).characters
        for bad in ("klingon", "U+0043-U+0041", "U+FFFFFF", ""):
            with pytest.raises(DpformerError, match="characters"):
                Tokens.of_characters(bad)

    def test_a_tokenizer_file(self, tmp_path: Path) -> None:
        tokens = Tokens.of_file(tokenizer_file(tmp_path / "tokenizer.json"))
        ids = tokens.encode("to be or not")
        assert tokens.decode(ids) == "to be or not" and len(ids) == 4
        assert list(tokens.vocabulary.titles or []) == ["[UNK]", "to", "be", "or", "not"]
        again = Tokens.from_json(tokens.to_json() or "")
        np.testing.assert_array_equal(again.encode("or to"), tokens.encode("or to"))
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(DpformerError, match="is not one of Hugging Face's tokenizers"):
            Tokens.of_file(tmp_path / "bad.json")
        with pytest.raises(DpformerError, match="cannot be read"):
            Tokens.of_file(tmp_path / "none.json")


def tokenizer_file(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return path


class TestUnits:
    def test_chunks_are_the_text(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        path.write_text("0123456789" * 10)
        dataset = read_text(path, unit="chunk", tokens=ASCII, max_length=16)
        assert "".join(texts(dataset)) == "0123456789" * 9
        assert [len(text) for text in texts(dataset)] == [16] * 5 + [10]
        assert ASCII.decode(dataset.held_out_text[0]) == "0123456789" and dataset.held_out_characters == 10

    def test_every_token_of_a_unit_is_trained_on(self, tmp_path: Path) -> None:
        """Unlike a recommender's user, a unit holds nothing back: its last token would be tested on else."""
        path = tmp_path / "text"
        path.write_text("abcdefgh" * 20)
        dataset = read_text(path, unit="chunk", tokens=ASCII, max_length=8)
        items, offsets = dataset.packed_train()
        assert len(items) == offsets[-1] == 144

    def test_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        lines = ["first", "", "second one", *(f"line {number}" for number in range(40))]
        path.write_text("\n".join(lines) + "\n")
        dataset = read_text(path, unit="line", tokens=ASCII, max_length=8)
        assert dataset.num_users == len(lines), "held-out and empty lines count, and train on nothing"
        assert texts(dataset)[:3] == ["\nfirst\n", "", "ond one\n"]
        held_out = {ASCII.decode(text).strip() for text in dataset.held_out_text}
        assert 0 < len(held_out) < 20
        for line, text in zip(lines, texts(dataset), strict=True):
            assert (text == "") == (line == "" or line in held_out), "no line is on both sides"

    @pytest.mark.parametrize("separator", ["\u2028", "\f", "\v", "\x1c", "\x85", "\r"])
    def test_a_line_ends_at_a_line_break_alone(self, tmp_path: Path, separator: str) -> None:
        """500 U+2028 or form feeds made 500 units of one."""
        path = tmp_path / "text"
        lines = [f"line {number}" for number in range(40)]
        path.write_bytes(("\n".join([*lines, separator.join(["mine"] * 500)]) + "\n").encode())
        assert read_text(path, unit="line", tokens=ASCII, max_length=8).num_users == 41

    def test_a_long_line_moves_no_other(self, tmp_path: Path) -> None:
        """It moved the cut at nine tenths of the file, and 587 lines with it."""
        path = tmp_path / "text"
        lines = [f"line {number}" for number in range(6000)]
        parts = []
        for first in ("short", "long" * 20_000):
            path.write_text("\n".join([first, *lines]) + "\n")
            parts.append(texts(read_text(path, unit="line", tokens=ASCII, max_length=12))[1:])
        assert parts[0] == parts[1] and 4800 < sum(map(bool, parts[0])) < 5800

    def test_a_declared_number_of_units(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        path.write_text("".join(f"line {number}\n" for number in range(40)))
        dataset = read_text(path, unit="line", tokens=ASCII, units=50)
        assert dataset.num_users == 50 and "was declared" in " ".join(text_statement(dataset.description))
        with pytest.raises(DpformerError, match="names 40 lines: declare at least as many"):
            read_text(path, unit="line", tokens=ASCII, units=39)

    def test_a_key_twice_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        path.write_text('{"author": "a", "text": "x", "author": "b"}\n')
        with pytest.raises(DpformerError, match="has a duplicate key 'author'"):
            read_text(path, unit="author", tokens=ASCII)

    def test_all_of_an_author_is_one_sample(self, tmp_path: Path) -> None:
        rows = [{"author": f"a{i % 30}", "text": f"{i}."} for i in range(90)]
        dataset = read_text(lines_of(tmp_path / "x.jsonl", rows), unit="author", tokens=ASCII, max_length=50)
        assert dataset.num_users == 30
        everything = [*filter(None, texts(dataset)), *(ASCII.decode(text) for text in dataset.held_out_text)]
        assert sorted(everything) == sorted(f"\n{i}.\n{i + 30}.\n{i + 60}.\n" for i in range(30))

    def test_an_author_who_wrote_much_counts_as_one_sample_too(self, tmp_path: Path) -> None:
        """The last tokens; the rest is not even counted in frequencies."""
        rows = [{"author": f"a{i % 30}", "text": "early" * 20 if i < 30 else "late"} for i in range(60)]
        dataset = read_text(lines_of(tmp_path / "x.jsonl", rows), unit="author", tokens=ASCII, max_length=8)
        assert set(texts(dataset)) == {"ly\nlate\n", ""}
        items, offsets = dataset.packed_train()
        assert set(ASCII.decode(items.tolist())) == set("ly\nlate\n") and set(np.diff(offsets)) == {0, 8}

    @settings(max_examples=30)
    @given(st.lists(st.tuples(st.integers(0, 40) | st.none(), TEXT), min_size=60, max_size=80), st.data())
    def test_removing_a_unit_changes_nothing_else(
        self, tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int | None, str]], data: st.DataObject
    ) -> None:
        """What training sees with and without a unit differs in that sample alone: the accounting rests on it."""
        path = tmp_path_factory.getbasetemp() / "neighbours.jsonl"
        written = [{"text": text} if name is None else {"id": name, "text": text} for name, text in rows]
        gone = data.draw(st.integers(0, len(rows) - 1))
        name = rows[gone][0]
        others = [r for i, r in enumerate(written) if (rows[i][0] != name if name is not None else i != gone)]
        try:
            one = read_text(lines_of(path, written), unit="document", tokens=ASCII, max_length=30)
            two = read_text(lines_of(path, others), unit="document", tokens=ASCII, max_length=30)
        except DpformerError as error:
            assert "too few" in str(error)
            return
        ours, theirs = sorted(texts(one)), sorted(texts(two))
        for text in theirs:
            ours.remove(text)
        assert len(ours) == 1

    def test_other_data_has_another_hash(self, tmp_path: Path) -> None:
        path = tmp_path / "text"
        hashes = set()
        for text, unit in (("ab" * 50, "chunk"), ("ba" * 50, "chunk"), ("".join(f"{n}\n" for n in range(50)), "line")):
            path.write_text(text)
            hashes.add(read_text(path, unit=unit, tokens=ASCII, max_length=10).hash)  # type: ignore[arg-type]
        assert len(hashes) == 3

    @pytest.mark.parametrize(
        ("unit", "content", "message"),
        [
            ("word", b"abc", "unit is 'word'; it must be one of chunk, line, document, author"),
            ("chunk", b"", "contains no text"),
            ("chunk", b"ab\xff", "is not UTF-8 text: byte 2 is 0xff"),
            ("chunk", b"abc", "too few"),
            ("author", b'{"text": "a"}', "line 1 has no 'author'"),
            ("author", b'{"author": 1}', 'line 1 has no text under "text"'),
            ("document", b"plain", "line 1 is not JSON"),
        ],
    )
    def test_refusals(self, tmp_path: Path, unit: str, content: bytes, message: str) -> None:
        path = tmp_path / "text"
        path.write_bytes(content)
        with pytest.raises(DpformerError, match=message):
            read_text(path, unit=unit, tokens=ASCII)  # type: ignore[arg-type]


def test_the_statement_names_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("".join(f"abcdefgh {number}\n" for number in range(30)))
    for unit, words in (("chunk", "chunk by chunk, not as a person"), ("line", "line by line, not as a person")):
        dataset = read_text(path, unit=unit, tokens=ASCII, max_length=16)  # type: ignore[arg-type]
        sentences = " ".join(text_statement(dataset.description))
        assert words in sentences and "U+000A,U+0020-U+007E" in sentences and "assumed public" in sentences
