"""`dpformer train [FILE]`: read a log, write a run folder with a private model. Its options are those of `Config`."""

import inspect
import json
import os
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.early import first_look, or_exit
from dpformer.errors import DpformerError
from dpformer.kinds.auto import AUTO
from dpformer.kinds.network import OF_NETWORKS
from dpformer.runs.config import Config, section_of

ESSENTIAL = (
    "epsilon", "delta", "model", "catalog", "user_column", "item_column", "timestamp_column", "task", "unit", "recipe",
)  # fmt: skip
TYPES: dict[str, type] = {"warm_start": str}  # of options that are not of the type of their field
UNSHOWN = ("deployment", "previous")
FLAGS = {"reattention": ["--re-attention/--no-re-attention"]}  # the other flags have the name of their option


def train(
    choices: dict[str, Any],
    out: Annotated[Path | None, typer.Option(help="Run folder to create.", rich_help_panel="Run")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with options.", rich_help_panel="Run")] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this folder.", rich_help_panel="Run")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger file for one budget over many runs (see dpformer ledger).", rich_help_panel="Run"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; no private data is touched.", rich_help_panel="Run")
    ] = False,
    items: Annotated[
        int | None, typer.Option(min=2, help="Number of items, for --dry-run.", rich_help_panel="Run")
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(help="Sign all published files with this private key (PEM, Ed25519).", rich_help_panel="Run"),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="Keep the run's secret key in this new file, for verify --replay; it is as sensitive as the data. "
            "[default: the key is deleted]",
            rich_help_panel="Run",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Run")] = False,
) -> None:
    """Train a model on private sequences and write a run folder.

    The folder holds the model, its privacy statement and its metrics. Without FILE, a synthetic data set is used.
    """
    given = {name: value for name, value in choices.items() if value is not None}
    moved = given.pop("file", None) if resume is not None else None
    if resume is not None and (given or config or out or dry_run or ledger or key_file):
        raise DpformerError(
            "--resume continues a run with its original options: give no other options, except FILE if the log has "
            "moved"
        )
    if dry_run:
        _print_plan(Config.make(config, **given), items, as_json)
        return
    if items is not None:
        raise DpformerError("--items needs --dry-run; training counts the items itself")
    if resume is None:
        with or_exit():
            first_look(given, config)
            made = Config.make(config, **given)
            say_model(made, given)
            run = run_or_exit(made, out, key=sign, key_file=key_file, ledger=ledger)
    else:
        run = run_or_exit(resume, file=moved, key=sign)
    typer.echo(json.dumps(run.statement, indent=2, ensure_ascii=False) if as_json else _summary(run))


def say_model(config: Config, given: dict[str, Any]) -> None:
    """Report that an option has changed the model."""
    causes = [name for name in OF_NETWORKS if name in given]
    if causes and given.get("model", AUTO) == AUTO and "recipe" not in given and config.task == "recommend":
        typer.echo(f"model: {config.model}, because --{causes[0].replace('_', '-')} was given", err=True)


def run_or_exit(
    what: Config | Path,
    out: Path | None = None,
    file: Path | None = None,
    key: Path | None = None,
    key_file: Path | None = None,
    ledger: Path | None = None,
) -> Any:
    """Train by a config, or resume a run folder; after Ctrl-C, report that the run can be resumed and exit with 130."""
    quiet_threads()
    from dpformer import runs as training
    from dpformer.runs.run import started_before
    from dpformer.training.allocator import keep_freed_memory
    from dpformer.training.distributed import start_team
    from dpformer.training.rendezvous import restarted

    team = start_team()
    if team is not None and not team.leads:
        keep_freed_memory()
        team.follow()
        raise typer.Exit
    if isinstance(what, Config):
        out = out or default_out(what)
        again = restarted() if team is None else team.again
        if again and started_before(what, out):
            what = out
    try:
        with or_exit():
            if isinstance(what, Path):
                return training.resume(what, team, file=file, key=key)
            return training.train(what, out or default_out(what), team, key=key, key_file=key_file, ledger=ledger)
    except training.Interrupted as stopped:
        typer.echo(f"dpformer: {stopped}", err=True)
    finally:
        if team is not None:
            team.dismiss()
    raise typer.Exit(130)


def quiet_threads() -> None:
    """Make waiting threads release their core: on a busy machine, spinning threads made a step 7 times as slow.

    This must run before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def default_out(config: Config) -> Path:
    """runs/<data>-<model>-epsilon-<ε>"""
    data = "synthetic" if config.synthetic else config.file.stem if config.file else config.table or "query"
    return Path("runs") / f"{data}-{config.model}-epsilon-{config.epsilon:g}"


def _summary(run: Any) -> str:
    from dpformer.cli.evaluate import covered_line
    from dpformer.queries.metrics import repeats_words

    released = run.statement.get("metrics")
    said = "" if released is None else repeats_words(released)
    return "\n".join(
        [
            run.statement["headline"],
            *([] if released is None else [covered_line(run.statement)]),
            *([f"repeats    {said}"] if said else []),
            f"model      {run.folder / 'model.safetensors'}",
            f"statement  {run.folder / 'privacy.json'}",
            f"next       dpformer evaluate {run.folder}",
        ]
    )


def _print_plan(config: Config, items: int | None, as_json: bool) -> None:
    quiet_threads()
    from dpformer.runs.estimate import dry_run, plan_rows
    from dpformer.training.allocator import keep_freed_memory

    keep_freed_memory()  # as in training, whose steps are timed
    facts = dry_run(config, items=items)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Plan", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in plan_rows(facts):
        table.add_row(name, value)
    Console().print(table)
    for note in facts["notes"]:
        typer.echo(f"note: {note}", err=True)


# The options are generated from `Config`, so that each is defined once.


def with_choices(
    command: Callable[..., None], names: Iterable[str] | None = None, essential: Iterable[str] = ESSENTIAL
) -> Callable[..., None]:
    """The command with one option for each field of `Config` (or for some of them), passed to it as one dict.

    Essential options come first; the others are shown by --help-all.
    """
    shown = ("file", *essential)
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "choices"]
    chosen = [name for name in Config.model_fields if name not in UNSHOWN] if names is None else list(names)
    first = [_parameter(name, essential=True) for name in shown if name in chosen]
    rest = [_parameter(name, essential=False) for name in chosen if name not in shown]

    def run(help_all: bool = False, **values: Any) -> None:
        choices = {name: values.pop(name) for name in chosen}
        command(choices, **values)

    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=p.KEYWORD_ONLY) for p in (*first, *own, _HELP_ALL, *rest)]
    )
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _parameter(name: str, *, essential: bool) -> inspect.Parameter:
    field = Config.model_fields[name]
    if name == "file":
        argument = typer.Argument(help=field.description, show_default=False)
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, argument]
        )
    flag = FLAGS.get(name, [])
    shown = False if field.default is None or isinstance(field.default, bool) else str(field.default)
    panel = "Essentials" if essential else section_of(name)
    option = typer.Option(*flag, help=_help(name), show_default=shown, rich_help_panel=panel, hidden=not essential)
    kind: Any = TYPES.get(name, _plain(field.annotation)) | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(
            "--help-all", help="Show every option and exit.", is_eager=True, callback=_show_all, rich_help_panel="Run"
        ),
    ],
)


def _help(name: str) -> str:
    field = Config.model_fields[name]
    return f"{field.description}" + (" (on)" if field.default is True else "")


def _plain(annotation: Any) -> Any:
    """The type of an option: without None, and without bounds, which `Config` checks."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        (kind,) = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        return _plain(kind)
    if origin is Annotated:
        return _plain(typing.get_args(annotation)[0])
    return str if origin is typing.Literal else annotation
