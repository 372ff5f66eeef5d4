"""`dpformer recommend RUN --history a,b,c`: what comes next after a history, in the users' own ids; or for a file."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.errors import DpformerError


def recommend(
    run: Annotated[Path, typer.Argument(help="The run folder, or its model.safetensors alone.")],
    history: Annotated[str | None, typer.Option(help="Item ids with commas between, oldest first.")] = None,
    histories: Annotated[
        Path | None,
        typer.Option(help='Many: a log (user_id, item_id, …), or JSON lines {"user_id": …, "history": […]}.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --histories: the file to write, .parquet, .csv, .tsv or .jsonl.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Items to recommend.")] = 10,
    allow_seen: Annotated[bool, typer.Option("--allow-seen", help="Recommend items of the history too.")] = False,
    catalog: Annotated[
        Path | None, typer.Option(help="File of items with titles.  [default: those of training]")
    ] = None,
    order: Annotated[str, typer.Option(help="Of a log: time, or file if its rows are in order.")] = "time",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one a history.")] = False,
) -> None:
    """Recommend items for histories, none of which needs to be in the training data.

    Items of a file that the model does not know are skipped and counted.
    """
    if k < 1:
        raise DpformerError(f"k is {k}; it must be 1 or more")
    if (history is None) == (histories is None):
        raise DpformerError("give one of --history a,b,c and --histories FILE")
    if out is not None and (histories is None or as_json):
        raise DpformerError("--out is for --histories, and instead of --json")
    ranker = _ranker(run, catalog)
    if history is not None:
        lines = iter([_answer(ranker, split_ids(history), k, not allow_seen)])
    else:
        assert histories is not None
        from dpformer.serving.batch import Packed

        found = _read(histories, order)
        if out is not None:
            _write(ranker, found, out, k, not allow_seen)
            return
        packed = Packed.of(found, ranker.release)
        _tell_unknown(packed)
        lines = _answers(ranker, found, packed, k, not allow_seen)
    if as_json:
        for line in lines:
            typer.echo(json.dumps(line, ensure_ascii=False))
    else:
        _print(list(lines), titles=ranker.release.titles is not None)


def _ranker(run: Path, catalog: Path | None) -> Any:
    from dpformer.data import read_catalog
    from dpformer.runs.model_file import load_release, model_file
    from dpformer.serving.ranking import Ranker

    release = load_release(model_file(run))
    if "text" in release.metadata:
        raise DpformerError(f"{run} is a language model: use dpformer generate")
    return Ranker(release if catalog is None else release.titled(read_catalog(catalog)))


def _answer(ranker: Any, ids: list[str], k: int, filter_seen: bool) -> dict[str, Any]:
    """To one history, every item of which must be known."""
    import numpy as np

    release = ranker.release
    numbers = release.index(ids)
    top = ranker.top(numbers, np.array([0, len(numbers)]), k, filter_seen=filter_seen)
    named = [release.vocabulary[number] for number in numbers]
    return {"history": named, "recommendations": release.entries(top.items[0], top.scores[0])}


def _answers(ranker: Any, found: Any, packed: Any, k: int, filter_seen: bool) -> Iterator[dict[str, Any]]:
    for top, users in ranker.blocks(packed.items, packed.offsets, k, filter_seen=filter_seen):
        for row, user in enumerate(range(users.start, users.stop)):
            best = ranker.release.entries(top.items[row], top.scores[row])
            yield {"user_id": found.user_ids[user], "recommendations": best}


def _write(ranker: Any, found: Any, out: Path, k: int, filter_seen: bool) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from dpformer.serving.batch import write_recommendations

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("users", total=len(found))
        packed = write_recommendations(
            ranker, found, out, k=k, filter_seen=filter_seen, done=lambda users: progress.update(task, completed=users)
        )
    _tell_unknown(packed)
    typer.echo(f"{out}: recommendations for {len(packed):,} users")


def _tell_unknown(packed: Any) -> None:
    if packed.unknown:
        said = f"{packed.unknown:,} interactions with {packed.unknown_items:,} items the model does not know"
        typer.echo(f"dpformer: skipped {said}", err=True)


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


def _read(path: Path, order: str = "time") -> Any:
    """Users and their histories, oldest first."""
    from dpformer.data import Reading, read
    from dpformer.serving.batch import histories_of

    if path.suffix.lower() in (".json", ".jsonl", ".ndjson") and (found := _json_histories(path)):
        return histories_of(found)
    return read(path, reading=Reading(order=order))


def _json_histories(path: Path) -> list[tuple[str, list[Any]]]:
    """JSON lines of histories; none if the first line is an interaction."""
    found: list[tuple[str, list[Any]]] = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DpformerError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise DpformerError(f"{path} cannot be read: {error.strerror}") from None
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
