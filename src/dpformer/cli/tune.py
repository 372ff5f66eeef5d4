"""`dpformer tune FILE --try NAME=A,B`: the best of a random number of private runs, at a stated total ε."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.errors import DpformerError
from dpformer.runs.config import Config


def tune(
    choices: dict[str, Any],
    tries: Annotated[
        list[str] | None,
        typer.Option("--try", help="NAME=A,B,…: candidate values; may be repeated.", rich_help_panel="Tuning"),
    ] = None,
    mean_runs: Annotated[float, typer.Option(help="Expected number of runs.", rich_help_panel="Tuning")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Run folder to create.", rich_help_panel="Run")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with options.", rich_help_panel="Run")] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger file for one budget over many runs (see dpformer ledger).", rich_help_panel="Run"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the total cost; needs --users.", rich_help_panel="Run")
    ] = False,
    sign: Annotated[
        Path | None,
        typer.Option(help="Sign all published files with this private key (PEM, Ed25519).", rich_help_panel="Run"),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="Keep the secret key of the best run in this new file, for verify --replay.", rich_help_panel="Run"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Run")] = False,
) -> None:
    """Tune settings within a privacy budget: --epsilon applies to each run; the ε of the whole search is stated.

    Makes a random number of runs, scores each with noise on validation items, and keeps only the best one.
    """
    from dpformer.cli.train import default_out, quiet_threads

    quiet_threads()
    from dpformer.runs import tuning

    values = dict(_parse(text) for text in tries or [])
    # Tunable settings belong to a network, so the model is one.
    first = {name: tried[0] for name, tried in values.items() if name in tuning.TUNABLE}
    chosen = Config.make(config, **{**{name: v for name, v in choices.items() if v is not None}, **first})
    if dry_run:
        if chosen.users is None:
            raise DpformerError("--dry-run reads no data: give --users")
        _print(tuning.plan_tuning(chosen, values, mean_runs, chosen.users), as_json)
        return
    target = out or default_out(chosen).with_name(f"{default_out(chosen).name}-tuned")
    facts = tuning.tune(
        chosen,
        values,
        target,
        mean_runs=mean_runs,
        announce=lambda plan: None if as_json else _print(plan, False),
        key=sign,
        key_file=key_file,
        ledger=ledger,
    )
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        typer.echo(f"{facts['headline']}\nmodel      {target / 'model.safetensors'}")


def _parse(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise DpformerError(f"--try is {text!r}; it must be NAME=A,B, such as learning_rate=1e-3,3e-3")
    return name.replace("-", "_"), [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _print(plan: Any, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2, ensure_ascii=False))
        return
    from dpformer.format_number import round_up, small

    typer.echo(
        f"{len(plan.candidates)} candidates, {plan.mean_runs:g} runs on average; the whole search costs ε = "
        f"{round_up(plan.epsilon)} at δ = {small(plan.delta)}"
    )
