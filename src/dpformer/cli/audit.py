"""`dpformer audit [RUN]`: canaries through training, a lower bound on ε beside the claim, checks of all chance."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.results import AsJson, conclude
from dpformer.errors import DpformerError


def audit(
    run: Annotated[Path | None, typer.Argument(help="Run folder whose settings to audit.", show_default=False)] = None,
    epsilon: Annotated[float | None, typer.Option(help="Without RUN: ε of training (5).", show_default=False)] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Instead of --epsilon: the noise multiplier.", show_default=False)
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of users (6040).", show_default=False)] = None,
    batch: Annotated[float | None, typer.Option(help="Expected batch size (1024).", show_default=False)] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs (100).", show_default=False)] = None,
    delta: Annotated[float | None, typer.Option(help="δ (a tenth of 1 / users).", show_default=False)] = None,
    clipping: Annotated[str, typer.Option(help="normalize or clip.")] = "normalize",
    clip_norm: Annotated[float, typer.Option(help="C.")] = 1.0,
    canaries: Annotated[int, typer.Option(help="Made-up users; half of them take part.")] = 10_000,
    confidence: Annotated[float, typer.Option(help="Of the lower bound.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="To repeat an audit.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result, SVG or PNG.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Audit: train on made-up users with the settings of a run, and see how well they can be told apart.

    The real sampler, clipping, noise and optimizer are used; no private data is touched. Exit code 1 if something
    speaks against the claim. The outcome is kept in RUN as audit.json, for cards. Without RUN, the paper's settings on
    MovieLens-1M are audited: 6,040 users, batches of 1,024, 100 epochs, ε = 5. Several processes are audited together:
    torchrun --nproc-per-node 2 -m dpformer audit.
    """
    flags = {"--epsilon": epsilon, "--noise-multiplier": noise_multiplier, "--users": users, "--batch": batch}
    flags.update({"--epochs": epochs, "--delta": delta})
    if run is not None and (given := [name for name, value in flags.items() if value is not None]):
        raise DpformerError(f"{given[0]} contradicts RUN, which has its own settings: give one or the other")
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise DpformerError(f"{plot.name} is no picture that can be drawn: give a name ending in .svg or .png")
    try:
        if run is not None:
            settings = settings_of(run)
        else:
            settings = _settings(epsilon, noise_multiplier, users or 6040, batch or 1024, epochs or 100, delta)
            settings.update(clipping=clipping, clip_norm=clip_norm)
        result = _audit(settings, canaries, confidence, seed)
    except ValueError as error:
        raise DpformerError(str(error)) from None
    if plot is not None:
        result.plot(plot)
    if run is not None:
        _keep(run, result)
    conclude(result, _print, as_json)


def _keep(run: Path, result: Any) -> None:
    """Beside the run, where cards find it; canaries are made up, so it may be published."""
    import json

    from dpformer.files import write_text
    from dpformer.statement.cards.source import AUDIT

    write_text(run / AUDIT, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")


def settings_of(run: Path) -> dict[str, Any]:
    """The arguments of an audit of a finished run, as its statement claims them."""
    from dpformer.noise.mechanisms import noise_of
    from dpformer.runs.run import finished

    done = finished(run)
    facts, query = done.statement, done.config.kind.release
    paid = [event for event in facts["events"] if query is not None and event["label"] == query.label]
    if paid:
        return {"query": query, "noise_multiplier": paid[0]["noise_multiplier"], "delta": facts["delta"]}
    if facts.get("epsilon") is None or not facts.get("noise_multiplier"):
        raise DpformerError(f"{run} was trained without noise: there is no claim to audit")
    names = ("noise_multiplier", "sample_rate", "steps", "delta", "clipping", "clip_norm")
    try:
        return {**{name: facts[name] for name in names}, "noise": noise_of(facts)}
    except KeyError as error:
        raise DpformerError(f"{run}/privacy.json has no {error}: look at it with dpformer verify {run}") from None


def _settings(
    epsilon: float | None, noise: float | None, users: int, batch: float, epochs: float, delta: float | None
) -> dict[str, Any]:
    from dpformer.accounting import calibrate

    if epsilon is not None and noise is not None:
        raise DpformerError("give --epsilon or --noise-multiplier, not both")
    if not 0 < batch <= users:
        raise DpformerError(f"batch is {batch:g}; it must be above 0 and at most the number of users, {users}")
    if not (epochs > 0 and math.isfinite(epochs)):
        raise DpformerError(f"epochs is {epochs:g}; it must be above 0")
    rate, steps = batch / users, math.ceil(epochs * users / batch * (1 - 1e-12))
    delta = 1 / (10 * users) if delta is None else delta
    if noise is None:
        noise = calibrate(epsilon=epsilon or 5.0, delta=delta, sample_rate=rate, steps=steps)
    return {"noise_multiplier": noise, "sample_rate": rate, "steps": steps, "delta": delta}


def _audit(settings: dict[str, Any], canaries: int, confidence: float, seed: int | None) -> Any:
    from dpformer.cli.train import quiet_threads

    quiet_threads()
    from rich.console import Console
    from rich.progress import track

    from dpformer.training.allocator import keep_freed_memory
    from dpformer.training.distributed import start_team
    from dpformer.verification.audit import audit as run_audit
    from dpformer.verification.audit import audit_query

    if "query" in settings:
        return audit_query(**settings, canaries=canaries, confidence=confidence, seed=seed)
    keep_freed_memory()
    team = start_team()
    if team is not None and not team.leads:
        team.follow()
        raise typer.Exit
    console = Console(stderr=True)
    try:
        return run_audit(
            **settings,
            canaries=canaries,
            confidence=confidence,
            seed=seed,
            watch=lambda steps: track(steps, "training on canaries", console=console, disable=not console.is_terminal),
            team=team,
        )
    finally:
        if team is not None:
            team.dismiss()


def _print(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpformer.format_number import plain

    m, console = result.mechanism, Console()
    table = Table("check", "measured", "claimed", "p-value", "", title="Audit", title_justify="left")
    for check in result.checks:
        mark = "ok" if check.passed else "FLAGGED"
        table.add_row(check.name, check.measured, check.expected, f"{check.p_value:.2g}", mark)
    console.print(table)
    correlated = f", {m.noise.name}" if m.noise.correlated else ""
    steps = f"{m.steps:,} steps at sample rate {plain(m.sample_rate)}{correlated}, clip norm {plain(m.clip_norm)}"
    console.print(
        f"{steps if result.of == 'training' else 'One release'}, noise multiplier {plain(m.noise_multiplier)}; "
        f"{len(result.scores):,} canaries, of which {result.guesses.members:,} took part; "
        f"δ = {plain(result.delta, 3, up=True)}; {result.seconds:.0f} s.\n"
        f"ε claimed for {result.of:<20}{result.epsilon_claimed:.3f}\n"
        f"ε shown, {result.confidence:.0%} confidence{'':11}{result.epsilon_lower:.3f}  (for this kind of mechanism; "
        f"without that assumption {result.epsilon_lower_any:.3f})",
        highlight=False,
    )
    console.print(result.verdict, style="bold" if result.passed else "bold red", highlight=False)
