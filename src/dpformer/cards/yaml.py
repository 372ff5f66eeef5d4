"""The little YAML that cards need: mappings, lists, and strings that any reader takes for strings."""

from __future__ import annotations

import json
import re
from typing import Any

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}  # which YAML takes for something else


def dump(value: dict[str, Any], indent: int = 0) -> str:
    """A mapping as lines of YAML; None is left out. Text of several lines is a block, all other text is quoted."""
    return "".join(_entry(name, item, indent) for name, item in value.items() if item is not None)


def _entry(name: str, item: Any, indent: int) -> str:
    space = "  " * indent
    key = name if KEY.fullmatch(name) and name.lower() not in WORDS else _quoted(name)
    if isinstance(item, dict):
        return f"{space}{key}:\n{dump(item, indent + 1)}" if item else f"{space}{key}: {{}}\n"
    if isinstance(item, list):
        return f"{space}{key}:\n" + "".join(_listed(one, indent) for one in item) if item else f"{space}{key}: []\n"
    return f"{space}{key}: {scalar(item, indent)}\n"


def _listed(item: Any, indent: int) -> str:
    space = "  " * indent
    if not isinstance(item, dict):
        return f"{space}- {scalar(item, indent)}\n"
    inner = dump(item, indent + 1)
    return f"{space}- {inner[len(space) + 2 :]}"


def scalar(item: Any, indent: int) -> str:
    """One value, as it stands after a key."""
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, int | float):
        digits, e, power = repr(item).partition("e")  # YAML 1.1 takes 1e-05 for text, and 1.0e-05 for a number
        return f"{digits}.0e{power}" if e and "." not in digits else repr(item)
    text = str(item)
    if "\n" in text and not re.search(r"[^\n\x20-\x7e\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd]|^[ \n]|\n$", text):
        lines = ["  " * (indent + 1) + line if line else "" for line in text.split("\n")]
        return "|-\n" + "\n".join(lines)
    return text if PLAIN.fullmatch(text) and text.lower() not in WORDS else _quoted(text)


def _quoted(text: str) -> str:
    """JSON's quotes are YAML's, once nothing is left that a YAML reader refuses raw."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(
        r"[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", quoted
    )
