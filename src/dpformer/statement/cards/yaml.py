"""YAML for cards: keys in the given order, None omitted, multi-line text as a block."""

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Safe, and easy to read: lists are indented under their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dump(value: dict[str, Any]) -> str:
    """A mapping as lines of YAML."""
    text = yaml.dump(_said(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    return str(text)


def _said(value: Any) -> Any:
    """The value without missing entries."""
    if isinstance(value, dict):
        return {name: _said(item) for name, item in value.items() if item is not None}
    return [_said(item) for item in value] if isinstance(value, list) else value
