"""The law of reading, as a function that raises where it is broken.

Whatever one user's rows hold, every other user's history stays as it is, or the file is refused. Rows that name other
users (or nobody known) are not one user's rows: what they add to others is what they say.
"""

import json
from pathlib import Path

from dpformer.data import Reading, read
from dpformer.errors import DpformerError

USERS = [f"u{user}" for user in range(4)]
ROWS = [
    (user, f"i{(number * 3 + step) % 5}", 40 - 10 * step + number)
    for number, user in enumerate(USERS)
    for step in range(4)
]
# suffix, header, one row, what has to be declared where bad rows are skipped
FORMATS: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "csv": (".csv", "user_id,item_id,timestamp\n", "{},{},{}\n", {}),
    "semicolons": (".csv", "user_id;item_id;timestamp\n", "{};{};{}\n", {}),
    "unquoted": (".csv", "user_id,item_id,timestamp\n", "{},{},{}\n", {"quotes": ""}),
    "headerless": (".csv", "", "{},{},{}\n", {"columns": "user,item,timestamp"}),
    "tsv": (".tsv", "user_id\titem_id\ttimestamp\n", "{}\t{}\t{}\n", {}),
    "inter": (".inter", "user_id:token\titem_id:token\ttimestamp:float\n", "{}\t{}\t{}\n", {}),
    "movielens": (".dat", "", "{}::{}::5::{}\n", {"columns": "user,item,rating,timestamp"}),
    "lines": (".txt", "", "{} {} {}\n", {"columns": "user,item,timestamp"}),
    "jsonl": (".jsonl", "", "", {}),
}


def log_of(name: str) -> bytes:
    """A small log in one format."""
    _, header, row, _ = FORMATS[name]
    if name == "jsonl":
        return "".join(
            json.dumps(dict(zip(("user_id", "item_id", "timestamp"), fields, strict=True))) + "\n" for fields in ROWS
        ).encode()
    return (header + "".join(row.format(*fields) for fields in ROWS)).encode()


def hostile_rows_change_nobody(folder: Path, name: str, hostile: bytes, *, first: bool, skip: bool) -> None:
    """Reads the log with the hostile bytes as rows of their own, first or in the middle."""
    suffix, header, _, declared = FORMATS[name]
    options = {key: value for key, value in declared.items() if skip or key == "quotes" or name == "headerless"}
    reading = Reading(skip_bad_rows=skip, quotes="quotes" not in options, columns=options.get("columns"))
    whole = log_of(name)
    clean: dict[str, list[str]] = {}
    for user, item, _ in sorted(ROWS, key=lambda row: row[2]):
        clean.setdefault(user, []).append(item)
    place = len(header) if first else whole.index(b"\n", len(whole) // 2) + 1
    ended = hostile if hostile.endswith((b"\n", b"\r")) or not hostile else hostile + b"\n"
    dirty = _histories(folder / f"dirty{suffix}", whole[:place] + ended + whole[place:], reading)
    if dirty is None and hostile:
        return  # refused: nothing is released
    assert dirty is not None, "the log itself is readable"
    for user, items in clean.items():
        if user.encode() in hostile:
            continue  # rows of this user
        assert dirty.get(user) == items, f"{name}: the history of {user} is {dirty.get(user)}, not {items}"


def _histories(path: Path, content: bytes, reading: Reading) -> dict[str, list[str]] | None:
    path.write_bytes(content)
    try:
        return read(path, reading=reading).named()
    except DpformerError:
        return None
