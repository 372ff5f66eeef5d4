"""Options of `dpformer recommend` for rules on items, and their conversion to `serving.rules.Rules`."""

import csv
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpformer.errors import DpformerError

if TYPE_CHECKING:
    from dpformer.serving.rules import Rules

Items = Annotated[
    str | None, typer.Option("--items", help="Recommend only these items: comma-separated ids, or @FILE.")
]
Exclude = Annotated[
    str | None, typer.Option("--exclude", help="Never recommend these items: comma-separated ids, or @FILE.")
]
ItemWhere = Annotated[
    list[str] | None,
    typer.Option(
        "--item-where",
        help="Only items of the catalogue with category=Toys, category=Toys|Games (either), price<=20 or price>=5.",
    ),
]
MaxPer = Annotated[
    list[str] | None, typer.Option("--max-per", help="Maximum number of items per value among the k: category=2.")
]

CONDITION = re.compile(r"\s*(?P<column>.+?)\s*(?P<sign><=|>=|=)\s*(?P<value>.*?)\s*", re.DOTALL)


def parse_rules(
    items: str | None, exclude: str | None, item_where: list[str] | None, max_per: list[str] | None
) -> "Rules | None":
    """The rules that some options describe; None if no option was given."""
    if items is None and exclude is None and not item_where and not max_per:
        return None
    from dpformer.serving.rules import Rules

    caps = {column: _whole(text, value) for text in max_per or [] for column, value in [_equation(text)]}
    listed = None if items is None else _ids(items)
    return Rules(listed, [] if exclude is None else _ids(exclude), _where(item_where or []), caps)


def _where(texts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        match = CONDITION.fullmatch(text)
        if match is None or not match["value"]:
            raise DpformerError(f"--item-where {text!r} is not a condition: write column=value, column<=9 or column>=5")
        column, sign, value = match.groups()
        if sign == "=":
            condition: Any = [part.strip() for part in value.split("|")]
        else:
            before = found.get(column, {})
            condition = {**(before if isinstance(before, dict) else {}), "max" if sign == "<=" else "min": value}
        if column in found and not (isinstance(condition, dict) and isinstance(found[column], dict)):
            raise DpformerError(f"--item-where names {column} twice: write {column}=first|second for either value")
        found[column] = condition
    return found


def _equation(text: str) -> tuple[str, str]:
    column, sign, value = text.partition("=")
    if not sign or not column.strip() or not value.strip():
        raise DpformerError(f"--max-per {text!r} is not column=number, for example category=2")
    return column.strip(), value.strip()


def _whole(text: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal():
        raise DpformerError(f"--max-per {text!r} is not column=number, for example category=2")
    return int(value)


def _ids(text: str) -> list[str]:
    """Comma-separated ids; @FILE holds one per line."""
    if not text.startswith("@"):
        return split_ids(text)
    try:
        with open(text[1:], encoding="utf-8-sig") as file:
            return [line.strip() for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise DpformerError(f"{text[1:]} is not UTF-8: {error}") from None
    except OSError as error:
        raise DpformerError(f"{text[1:]} cannot be read: {error.strerror}") from None


def split_ids(text: str) -> list[str]:
    """Comma-separated ids; quotes keep a comma inside an id."""
    if not text.strip():
        return []
    try:
        (fields,) = csv.reader([text], skipinitialspace=True)
    except (csv.Error, ValueError) as error:
        raise DpformerError(f"{text!r} is not a comma-separated list of ids: {error}") from None
    return fields
