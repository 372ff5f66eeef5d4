"""`dpformer recommend RUN --history a,b,c`: what comes next after a history, in the users' own ids."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.errors import DpformerError

AT_ONCE = 256  # histories scored together


def recommend(
    run: Annotated[Path, typer.Argument(help="The run folder, or its model.safetensors alone.")],
    file: Annotated[
        Path | None,
        typer.Argument(
            help='Many histories: a log (user_id, item_id, …), or JSON lines {"user_id": …, "history": […]}.'
        ),
    ] = None,
    history: Annotated[str | None, typer.Option(help="Item ids with commas between, oldest first.")] = None,
    k: Annotated[int, typer.Option("-k", help="Items to recommend.")] = 10,
    catalog: Annotated[
        Path | None, typer.Option(help="File of items with titles.  [default: those of training]")
    ] = None,
    order: Annotated[str, typer.Option(help="Of a log in FILE: time, or file if its rows are in order.")] = "time",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one a history.")] = False,
) -> None:
    """Recommend items for histories, none of which needs to be in the training data; seen items are left out."""
    if k < 1:
        raise DpformerError(f"k is {k}; it must be 1 or more")
    if (history is None) == (file is None):
        raise DpformerError("give one of --history a,b,c and a file of histories")
    from dpformer.data import read_catalog
    from dpformer.runs.model_file import load_release, model_file

    release = load_release(model_file(run))
    if "text" in release.metadata:
        raise DpformerError(f"{run} is a language model: use dpformer generate")
    if catalog is not None:
        release = release.titled(read_catalog(catalog))
    histories = [("", split_ids(history))] if history is not None else _read(file, order)
    numbers = [(name, release.index(items)) for name, items in histories]  # all known, before any is answered
    lines = _answers(release, numbers, k)
    if as_json:
        for line in lines:
            typer.echo(json.dumps(line, ensure_ascii=False))
    else:
        _print(list(lines), titles=release.titles is not None)


def _answers(release: Any, histories: list[tuple[str, Any]], k: int) -> Iterator[dict[str, Any]]:
    for start in range(0, len(histories), AT_ONCE):
        part = histories[start : start + AT_ONCE]
        found = release.recommend([items for _, items in part], k)
        for (name, items), best in zip(part, found, strict=True):
            user = {"user_id": name} if name else {"history": [release.vocabulary[item] for item in items]}
            yield {**user, "recommendations": best}


def _print(lines: list[dict[str, Any]], titles: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    many = "user_id" in lines[0]
    table = Table(*(["user"] if many else []), "rank", "item", *(["title"] if titles else []), "score")
    for line in lines:
        for rank, found in enumerate(line["recommendations"], start=1):
            user = [line["user_id"] if rank == 1 else ""] if many else []
            title = [found["title"]] if titles else []
            table.add_row(*user, str(rank), str(found["item_id"]), *title, f"{found['score']:.3f}")
        table.add_section()
    Console().print(table, markup=False)


def split_ids(text: str) -> list[str]:
    """Ids between commas; quotes keep a comma inside an id."""
    if not text.strip():
        return []
    try:
        (fields,) = csv.reader([text], skipinitialspace=True)
    except (csv.Error, ValueError) as error:
        raise DpformerError(f"{text!r} is not a list of ids with commas between: {error}") from None
    return fields


def _read(path: Path | None, order: str = "time") -> list[tuple[str, list[Any]]]:
    """Users and their histories, oldest first."""
    from dpformer.data import Reading, read

    assert path is not None
    if path.suffix.lower() in (".json", ".jsonl", ".ndjson") and (found := _json_histories(path)):
        return found
    return list(read(path, reading=Reading(order=order)).named().items())


def _json_histories(path: Path) -> list[tuple[str, list[Any]]]:
    """JSON lines of histories; none if the first line is an interaction."""
    found: list[tuple[str, list[Any]]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DpformerError(f"{path} is not UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _json(line, path, number)
        if not found and isinstance(row, dict) and "history" not in row:
            return []
        items = row.get("history") if isinstance(row, dict) else row
        if not isinstance(items, list):
            raise DpformerError(f'{path}, line {number} has no list of items under "history"')
        name = row.get("user_id") if isinstance(row, dict) else None
        found.append((str(number if name is None else name), items))
    return found


def _json(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DpformerError(f"{path}, line {number} is not JSON: {error}") from None
