r"""Splitting lines into fields, in SQL, each line by itself: an invalid line does not affect the next.

DuckDB is asked for whole lines, so that no quote can extend beyond its line. A line of CSV with quotes must be well
formed; a quoted field that does not end on its line makes the line invalid. If a later line could be the end of that
field (`Fields.opened`, `Fields.closed`), the lines between may be rows or part of the field: then the whole file is
refused, not just those lines.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpformer.engines.duckdb_connection import text

BLOCK = 1 << 18  # bytes processed together, which fit in the cache
LONGEST = 1 << 21  # maximum length of a row, in bytes
OK, FIELDS, QUOTE, JSON, TWICE, USER, ITEM, TIME, RATING = range(9)  # faults of a row
FILTERED = 9  # no fault, but dropped by a filter
EVENT = 10  # a fault: an event without a weight
UNREADABLE = (FIELDS, QUOTE, JSON, TWICE)  # faults after which the user of a row is unknown


@dataclass(frozen=True)
class Fields:
    """SQL over a column `line`: `expression` makes the list of fields, `fault` checks their number and quoting."""

    expression: str
    fault: str
    quoted: bool = False
    opened: str = ""  # number of fields before one that opens a quote and ends with the line; NULL: no such line
    closed: str = ""  # number of fields after the end of such a field; NULL: no such line

    def field(self, place: int, fields: str = "s") -> str:
        """SQL of the field at an index, from 0."""
        found = f"{fields}[{place + 1}]"
        if not self.quoted:
            return found
        inner = f"replace(substring({found}, 2, length({found}) - 2), '\"\"', '\"')"
        return f"CASE WHEN starts_with({found}, '\"') THEN {inner} ELSE {found} END"


def lines(files: list[Path], skip: int, *, rejects: bool = True) -> str:
    """SQL of the lines of text files as column `line`, in order; invalid UTF-8 and over-long lines are skipped, and
    recorded by DuckDB with `rejects`.

    Carriage returns also end lines, whatever the other line ends are; blank lines become NULL.
    """
    names = ", ".join(text(no_glob(file)) for file in files)
    return (
        f"read_csv([{names}], auto_detect = false, header = false, skip = {skip}, columns = {{'line': 'VARCHAR'}}, "
        f"delim = '\x01', quote = '', escape = '', comment = '', new_line = '\\n', strict_mode = false, "
        f"max_line_size = {LONGEST}, ignore_errors = true, store_rejects = {str(rejects).lower()})"
    )


def columns(files: list[Path], skip: int, delimiter: str, width: int) -> str:
    """SQL of the fields of plain lines, as columns c0, c1, …; a row of another width fails.

    DuckDB's own splitting takes half the time of splitting lines here. If nothing is quoted and no line is blank
    (`all_plain`), both give the same fields, except that empty ones are NULL here.
    """
    names = ", ".join(text(no_glob(file)) for file in files)
    kinds = ", ".join(f"'c{place}': 'VARCHAR'" for place in range(width))
    return (
        f"read_csv([{names}], auto_detect = false, header = false, skip = {skip}, columns = {{{kinds}}}, "
        f"delim = {text(delimiter)}, quote = '', escape = '', comment = '', new_line = '\\n', strict_mode = true, "
        f"null_padding = false, ignore_errors = false, max_line_size = {LONGEST})"
    )


def all_plain(files: list[Path], delimiter: str, *, quotes: bool) -> bool:
    """Whether no line is blank or ends in a delimiter or carriage return and, with `quotes`, nothing is quoted."""
    end = delimiter.encode()  # DuckDB accepts one after the last field
    odd = [b"\r", b"\0", b"\x01", *([b'"'] if quotes else [])]
    for path in files:
        if len(end) > 1 or path.suffix.lower() in (".gz", ".zst"):
            return False
        last = b"\n"
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                if any(mark in block for mark in odd) or _cut_short(last + block, end):
                    return False
                last = block[-1:]
        if last == end:
            return False
    return True


def _cut_short(block: bytes, end: bytes) -> bool:
    """Whether a line break follows another one or `end`; arrays take a third of the time of searching for two bytes."""
    found = np.frombuffer(block, dtype=np.uint8)
    before = found[:-1]
    return bool((((before == ord("\n")) | (before == ord(end))) & (found[1:] == ord("\n"))).any())


def no_glob(path: Path) -> str:
    """A file name that DuckDB does not interpret as a pattern."""
    return re.sub(r"([\[*?])", r"[\1]", str(path.resolve()))


def delimited(delimiter: str, width: int, *, quotes: bool) -> Fields:
    """CSV and TSV: fields between delimiters; with `quotes`, fields may be quoted."""
    plainly = f"string_split(line, {text(delimiter)})"
    wrong = f"CASE WHEN len(s) <> {width} THEN {FIELDS} ELSE {OK} END"
    if not quotes:
        return Fields(plainly, wrong)
    d = re.escape(delimiter)
    some, bare = '"(?:[^"]|"")*"', f'[^{d}"][^{d}]*'
    pieces = text(f"{d}({some}|[^{d}]*)")
    whole = text(f"(?:{some}|{bare}|)(?:{d}(?:{some}|{bare}|))*")
    has = "contains(line, '\"')"
    return Fields(
        f"CASE WHEN {has} THEN regexp_extract_all({text(delimiter)} || line, {pieces}, 1) ELSE {plainly} END",
        f"CASE WHEN {has} AND NOT regexp_full_match(line, {whole}) THEN {QUOTE} ELSE {wrong} END",
        quoted=True,
        opened=_count(f'((?:(?:{some}|{bare}|){d})*)"(?:[^"]|"")*', f"(?:{some}|[^{d}]*){d}"),
        closed=_count(f'(?:[^"]|"")*"((?:{d}(?:{some}|{bare}|))*)', f"{d}(?:{some}|[^{d}]*)"),
    )


def _count(line: str, piece: str) -> str:
    """SQL of the number of pieces in the group of a pattern for lines; NULL if a line does not match."""
    group = f"regexp_extract(line, {text(f'^{line}$')}, 1)"
    return f"CASE WHEN regexp_full_match(line, {text(line)}) THEN len(regexp_extract_all({group}, {text(piece)})) END"


def separated(separator: str, width: int | None) -> Fields:
    """MovieLens' `::`, or spaces (`" "`: any number of blanks and tabs). Width None: at least two fields."""
    if separator == " ":
        clean = "trim(replace(line, chr(9), ' '))"
        expression = (
            f"CASE WHEN contains({clean}, '  ') THEN string_split_regex({clean}, ' +') ELSE "
            f"string_split({clean}, ' ') END"
        )
    else:
        expression = f"string_split(line, {text(separator)})"
    enough = "len(s) < 2" if width is None else f"len(s) <> {width}"
    return Fields(expression, f"CASE WHEN {enough} THEN {FIELDS} ELSE {OK} END")
