"""Names of objects in a store: what a path means (one, all below a folder, a glob), and which belong to a table."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dpformer.data.sources.files import no_table
from dpformer.data.sources.urls import Url
from dpformer.errors import DpformerError

GLOB = re.compile(r"[*?\[]")
# Of each table format: the folder beside the data that says it is one, and what a key in it looks like.
MARKS = {
    "Delta Lake": ("_delta_log", r"(^|/)_delta_log/"),
    "Apache Hudi": (".hoodie", r"(^|/)\.hoodie/"),
    "Apache Iceberg": ("metadata", r"(^|/)metadata/[^/]*\.metadata\.json$"),
}


def root(path: str) -> str:
    """The folder that names of objects are relative to here; folders such as `day=7` below it are columns."""
    found = GLOB.search(path)
    return path if found is None else path[: found.start()].rpartition("/")[0]


def chosen(path: str, keys: Iterable[str]) -> list[str]:
    """The keys that a folder or glob means, in order; hidden ones and `_SUCCESS` are none."""
    pattern, folder = re.compile(_regex(path) if GLOB.search(path) else ".*", re.DOTALL), root(path)
    return sorted(key for key in keys if pattern.fullmatch(key) and not _hidden(key, folder))


def refuse_tables(url: Url, keys: Iterable[str]) -> None:
    """Files of a table are not read one by one: rows that were deleted from it are still in them."""
    for key in keys:
        for kind, (_, mark) in MARKS.items():
            if re.search(mark, key):
                raise DpformerError(f"{url} {no_table(kind)}")


def _hidden(key: str, below: str) -> bool:
    return any(part[0] in "._" for part in key[len(below) :].split("/") if part)


def _regex(path: str) -> str:
    """Of a glob, in which `*` and `?` do not match a slash, and `**` does."""
    if "[" in path:
        raise DpformerError(f"the glob {path!r} has brackets: give one with * and ? only")
    words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(words.get(part) or re.escape(part) for part in re.split(r"(\*\*|\*|\?)", path))
