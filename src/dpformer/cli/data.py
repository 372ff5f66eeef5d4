"""`dpformer data FILE`: show a log as training would see it."""

import json
import time
from typing import Annotated, Any

import typer

from dpformer.data.options import READING, WEIGHING
from dpformer.errors import DpformerError
from dpformer.runs.config import Config

CHOICES = ("file", *READING, *WEIGHING, "catalog", "drop_unknown_items", "max_length", "validation", "split")
NOT_PRIVATE = "These numbers are exact: no privacy guarantee covers them."


def data(
    choices: dict[str, Any],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Describe a log: users, items, lengths, split, times. Nothing is trained."""
    from dpformer.data import prepare, read_catalog
    from dpformer.data.owner_notes import hints
    from dpformer.statement.data import data_statement

    config = Config.make(**{name: value for name, value in choices.items() if value is not None})
    if config.file is None:
        raise DpformerError("give a log: a file, a folder, a glob, or - for standard input")
    dataset = prepare(
        config.file,
        columns=config.log_columns(),
        reading=config.reading(),
        vocabulary=None if config.catalog is None else read_catalog(config.catalog),
        drop_unknown_items=config.drop_unknown_items,
        filters=config.filters(),
        max_length=config.max_length or 200,
        validation=config.validation,
        split_at=config.split_at,
    )
    facts = {**dataset.description, "hash": dataset.hash, "head": _head(dataset.item_counts())}
    sentences, odd = data_statement(dataset.description), hints(dataset, config.user_column, config.item_column)
    if as_json:
        typer.echo(json.dumps({**facts, "statement": sentences, "hints": odd, "note": NOT_PRIVATE}, indent=2))
    else:
        _print(facts, sentences)
        for hint in odd:
            typer.echo(hint)


def _head(counts: Any) -> float:
    """The share of interactions that belong to the most popular tenth of the items."""
    counts = sorted(counts.tolist(), reverse=True)
    return round(sum(counts[: max(1, len(counts) // 10)]) / max(1, sum(counts)), 4)


def _print(facts: dict[str, Any], sentences: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{facts['source']} ({facts['format']})"), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in _rows(facts):
        table.add_row(name, value)
    console = Console()
    console.print(table)
    console.print("For the privacy statement:", style="bold")
    for sentence in sentences:
        console.print(f"- {sentence}", markup=False, highlight=False)
    console.print(f"\n{NOT_PRIVATE}", style="yellow", highlight=False)


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    read, lengths, split, filters = facts["read"], facts["lengths"], facts["split"], facts["filters"]
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in filters.items() if value}
    chosen = [f"{name.replace('_', ' ')} {value}" for name, value in shown.items()]
    spread = f"{lengths['min']:,} … {lengths['max']:,}, median {lengths['median']:g}, mean {lengths['mean']:g}"
    which = "last item" if split["rule"] != "time" else f"first item from {split['until']}"
    tested = f"{split['test_users']:,} users tested on their {which}, {split['train_only_users']:,} in training only"
    tested += f", {split['cold_users']:,} first appear later" if "cold_users" in split else ""
    return [
        ("log", f"{read['users']:,} users, {read['items']:,} items, {read['interactions']:,} interactions"),
        ("filters", ", ".join(chosen) or "none"),
        ("users", f"{facts['users']:,}"),
        ("items", f"{facts['items']:,} ({facts['vocabulary']['policy']})"),
        ("interactions", f"{facts['interactions']:,}"),
        ("items per user", spread),
        ("top tenth of the items", f"{facts['head']:.1%} of the interactions"),
        ("order", _order(facts)),
        ("exact duplicates", "not counted" if facts["duplicates"] is None else f"{facts['duplicates']:,} rows"),
        ("rows skipped", ", ".join(f"{count:,} ({why})" for why, count in facts["skipped"].items()) or "none"),
        ("split", tested + (", validation on the item before it" if split["validation"] else "")),
        ("hash of the split", facts["hash"][:16] + "…"),
    ]


def _order(facts: dict[str, Any]) -> str:
    if facts["order"] == "file":
        return "file order"
    first, last = (_instant(number) for number in facts["time_range"])
    tied = f"{facts['tied_share']:.1%} tied within their user (kept in file order)"
    return f"by {facts['time_column']}, {first} … {last}; {tied}"


def _instant(number: float) -> str:
    """A timestamp as a date if it can be seconds since 1970, else the number."""
    if not 1e8 <= number < 1e10:
        return f"{number:,}"
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(number))
