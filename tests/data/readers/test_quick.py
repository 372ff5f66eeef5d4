"""Text read by the engine's own splitting: the same rows as line by line, or line by line after all."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Reading, read
from dpformer.data.histories import Histories
from dpformer.data.readers import delimited, split_line
from dpformer.errors import DpformerError

HEADER = "user_id,item_id,note,timestamp\n"
PLAIN = HEADER + "a,x,,3\nb,y,n,2\na, z ,\t,1\nb,x,é,4\n"


def both(path: Path, monkeypatch: pytest.MonkeyPatch, reading: Reading | None = None) -> list[Histories | str]:
    """What is read with and without the quick way; a refusal as its sentence."""
    found: list[Histories | str] = []
    for plain in (split_line.all_plain, lambda *given, quotes: False):
        monkeypatch.setattr(delimited, "all_plain", plain)
        try:
            found.append(read(path, reading=reading))
        except DpformerError as error:
            found.append(str(error))
    return found


def same(found: list[Histories | str]) -> None:
    quick, slow = found
    if isinstance(quick, str) or isinstance(slow, str):
        assert quick == slow
    else:
        assert (quick.named(), quick.facts) == (slow.named(), slow.facts)


def test_a_plain_file_takes_the_quick_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    path.write_text(PLAIN)
    assert split_line.all_plain([path], ",", quotes=True)
    found = both(path, monkeypatch)
    same(found)
    assert isinstance(found[0], Histories) and found[0].named() == {"a": ["z", "x"], "b": ["y", "x"]}


ODD = {
    "a quote": PLAIN + 'a,"x",n,5\n',
    "an unclosed quote": PLAIN + 'a,x,"n,5\n',
    "a blank line": PLAIN + "\na,x,n,5\n",
    "a line of blanks": PLAIN + "  \na,x,n,5\n",
    "carriage returns": PLAIN.replace("\n", "\r\n"),
    "too few fields": PLAIN + "a,x,5\n",
    "too many": PLAIN + "a,x,n,5,6\n",
    "a delimiter too many": PLAIN + "a,x,n,5,\n",
    "and at the end of the file": PLAIN + "a,x,n,5,",
    "no user": PLAIN + ",x,n,5\n",
    "no time": PLAIN + "a,x,n,\n",
    "no line break at the end": PLAIN.rstrip("\n"),
    "a zero byte": PLAIN + "a,x\0,n,5\n",
    "words that mean nothing": PLAIN + "NULL,null,NA,5\n",
    "a header alone": HEADER,
    "a fraction": PLAIN + "a,x,n,5.5\n",
    "a fraction of nothing": PLAIN + "a,x,n,5.\n",
    "an exponent": PLAIN + "a,x,n,5e2\n",
    "blanks around times": PLAIN + "a,x,n, 0 \na,y,n,\t-7\t\nb,z,n,\v9\n",
    "a time of blanks": PLAIN + "a,x,n,  \n",
    "a time of tabs": PLAIN + "a,x,n,\t\n",
    "signs and zeros": PLAIN + "a,x,n,+5\nb,y,n,007\n",
    "a number with underscores": PLAIN + "a,x,n,1_000\n",
    "a hexadecimal number": PLAIN + "a,x,n,0x1F\n",
    "a date among numbers": PLAIN + "a,x,n,2024-01-31\n",
    "a date": HEADER + "a,x,n,2024-01-31\nb,x,n,2024-01-30 10:00\n",
    "a number too large": PLAIN + f"a,x,n,{10**25}\n",
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("skip", [False, True])
def test_odd_files_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, skip: bool) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(ODD[case].encode())
    same(both(path, monkeypatch, Reading(skip_bad_rows=skip)))


def test_broken_utf8_is_found_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(PLAIN.encode() + b"a,\xff,n,5\n")
    same(both(path, monkeypatch))


@settings(max_examples=12)
@given(rows=st.lists(st.text(alphabet='ab1,,,,"\n\t. é', max_size=12), max_size=6), quotes=st.booleans())
def test_junk_is_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[str], quotes: bool) -> None:
    path = tmp_path / "log.csv"
    path.write_text(PLAIN + "".join(row + "\n" for row in rows))
    same(both(path, monkeypatch, Reading(quotes=quotes, skip_bad_rows=True)))
