"""`dpformer recommend RUN --history a,b,c`: the next items for a history, in the log's own ids; or for a file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.early import first_look
from dpformer.cli.reading import Unfiltered, reading_of
from dpformer.cli.rules import Exclude, Items, ItemWhere, MaxPer, parse_rules, split_ids
from dpformer.errors import DpformerError


def recommend(
    choices: dict[str, Any],
    run: Annotated[Path, typer.Argument(help="Run folder, or a model.safetensors file.")],
    history: Annotated[str | None, typer.Option(help="Comma-separated item ids, oldest first.")] = None,
    histories: Annotated[
        Path | None,
        typer.Option(help='Many histories: a log (user_id, item_id, …), or JSON lines {"user_id": …, "history": […]}.'),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --histories: output file (.parquet, .csv, .tsv or .jsonl).")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Number of items to recommend.")] = 10,
    allow_seen: Annotated[bool, typer.Option("--allow-seen", help="Recommend items of the history too.")] = False,
    catalog: Annotated[
        Path | None, typer.Option(help="Catalogue with titles.  [default: the one given at training]")
    ] = None,
    unknown: Annotated[
        str, typer.Option(help="Items unknown to the model: report (ignore and count), ignore, or error.")
    ] = "report",
    unfiltered: Unfiltered = False,
    items: Items = None,
    exclude: Exclude = None,
    item_where: ItemWhere = None,
    max_per: MaxPer = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one per history.")] = False,
) -> None:
    """Recommend items for histories; the users need not be in the training data.

    A log is read with the options of training; reading options (--help-all) override them.
    """
    if k < 1:
        raise DpformerError(f"k is {k}; it must be 1 or more")
    if (history is None) == (histories is None):
        raise DpformerError("give either --history a,b,c or --histories FILE")
    if out is not None and (histories is None or as_json):
        raise DpformerError("--out needs --histories and excludes --json")
    asked = parse_rules(items, exclude, item_where, max_per)
    given = reading_of(choices, unfiltered)
    if history is not None and given:
        name = next(iter(given))
        fix = "for items of the catalogue give --item-where category=Toys" if name == "where" else "omit it"
        raise DpformerError(f"--{name.replace('_', '-')} needs --histories: {fix}")
    if out is not None:
        from dpformer.serving.batch import format_of

        format_of(out)  # refuse an unknown format before anything is read
    if histories is not None and histories.suffix.lower() in (".csv", ".tsv", ".parquet") and not unfiltered:
        settings = run / "config.toml"
        needless = {"event_weights": None, "session_gap": None}  # of training alone
        first_look({**needless, **given, "file": histories}, settings if settings.is_file() else None)
    ranker = _ranker(run, catalog)
    rules = None if asked is None else _bound(asked, ranker, run, catalog)
    packed = _packed(ranker, run, history, histories, unknown, given)
    if out is not None:
        _write(ranker, packed, out, k, not allow_seen, rules)
        return
    lines = _answers(ranker, packed, k, not allow_seen, rules)
    if history is not None:
        lines = (_of_one(ranker, packed, line) for line in lines)
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


def _bound(rules: Any, ranker: Any, run: Path, catalog: Path | None) -> Any:
    from dpformer.serving.rules import rule_book

    return rule_book(ranker.release, run, catalog).bind(rules)


def _packed(
    ranker: Any, run: Path, history: str | None, histories: Path | None, unknown: str, given: dict[str, Any]
) -> Any:
    """Pack the histories as item numbers; items unknown to the model are reported."""
    from dpformer.serving.histories import histories_of, read_histories
    from dpformer.serving.packed import Packed

    if history is not None:
        found = histories_of([("", split_ids(history))])
    else:
        assert histories is not None
        found = read_histories(histories, run, **given)
    packed = Packed.of(found, ranker.release, unknown)
    if packed.note:
        typer.echo(f"dpformer: {packed.note}", err=True)
    return packed


def _answers(ranker: Any, packed: Any, k: int, filter_seen: bool, rules: Any) -> Iterator[dict[str, Any]]:
    for top, users in ranker.blocks(packed.items, packed.offsets, k, filter_seen=filter_seen, rules=rules):
        for row, user in enumerate(range(users.start, users.stop)):
            best = ranker.release.entries(top.items[row], top.scores[row])
            yield {"user_id": packed.user_ids[user], "recommendations": best}


def _of_one(ranker: Any, packed: Any, line: dict[str, Any]) -> dict[str, Any]:
    """The answer to --history, with the items that were used instead of a user."""
    named = [ranker.release.vocabulary[number] for number in packed.items.tolist()]
    return {"history": named, "recommendations": line["recommendations"]}


def _write(ranker: Any, packed: Any, out: Path, k: int, filter_seen: bool, rules: Any) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from dpformer.serving.batch import write_recommendations

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("users", total=len(packed))
        write_recommendations(
            ranker,
            packed,
            out,
            k=k,
            filter_seen=filter_seen,
            rules=rules,
            done=lambda users: progress.update(task, completed=users),
        )
    typer.echo(f"{out}: recommendations for {len(packed):,} users")


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
