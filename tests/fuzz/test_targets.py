"""Every reader of files on strange files: valid ones with pieces changed, and noise. Read, or refused in a sentence.

`python -m fuzz` searches longer, by coverage, with the same targets.
"""

import tempfile
from functools import cache
from pathlib import Path

import pytest
from fuzz.targets import TARGETS, try_one
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# What breaks readers: numbers out of range, unclosed brackets, bytes that are no text, names with a meaning.
PIECES = st.sampled_from(
    [
        b"", b"\0", b"\xff", b"\n", b"\r", b'"', b"{", b"}", b",", b"-1", b"0", b"1e999", b"NaN", b"Infinity", b"null",
        b"true", b"[]", b"{}", b'""', b"9" * 400, b"1e-320", b"\xed\xa0\x80", "é\u2028".encode(), b"PAR1", b"\\u0000",
        b"[" * 3000,
    ]
) | st.binary(max_size=6)  # fmt: skip


@cache
def seeds_of(name: str) -> list[bytes]:
    return TARGETS[name].seeds()


@st.composite
def contents(draw: st.DrawFn, name: str) -> bytes:
    """A valid file with up to four pieces replaced, or noise."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    content = draw(st.sampled_from(seeds_of(name)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from([0, 1, 1, 2, 4, 16, len(content)]))
        content = content[:start] + draw(PIECES) + content[start + length :]
    return content


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_valid_files_are_read(name: str, tmp_path: Path) -> None:
    assert all(try_one(TARGETS[name], content, tmp_path) for content in seeds_of(name))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_strange_files_are_read_or_refused(name: str) -> None:
    @settings(max_examples=8 if TARGETS[name].slow else 60, suppress_health_check=list(HealthCheck))
    @given(contents(name))
    def one(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            try_one(TARGETS[name], content, Path(folder))

    one()


def test_a_reader_that_falls_over_is_noticed(tmp_path: Path) -> None:
    """The net has no hole: a reader with a fault, and one with a refusal of two lines."""
    from dataclasses import replace

    from dpformer.errors import DpformerError

    def faulty(path: Path) -> None:
        raise KeyError("x")

    def talkative(path: Path) -> None:
        raise DpformerError("two\nlines")

    with pytest.raises(KeyError):
        try_one(replace(TARGETS["csv"], read=faulty), b"x", tmp_path)
    with pytest.raises(AssertionError, match="not one sentence"):
        try_one(replace(TARGETS["csv"], read=talkative), b"x", tmp_path)
