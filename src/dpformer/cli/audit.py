"""`dpformer audit [RUN]`: train on canaries, report a lower bound on ε beside the claim, test all randomness."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.results import AsJson, conclude
from dpformer.errors import DpformerError


def audit(
    run: Annotated[Path | None, typer.Argument(help="Run folder whose settings to audit.", show_default=False)] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="ε of training, without RUN (default: 5).", show_default=False)
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="The noise multiplier, instead of --epsilon.", show_default=False)
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of users (default: 6040).", show_default=False)] = None,
    batch: Annotated[
        float | None, typer.Option(help="Expected batch size (default: 1024).", show_default=False)
    ] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs (default: 100).", show_default=False)] = None,
    delta: Annotated[float | None, typer.Option(help="δ (default: 1 / (10 · users)).", show_default=False)] = None,
    clipping: Annotated[str, typer.Option(help="Clip function: normalize or clip.")] = "normalize",
    clip_norm: Annotated[float, typer.Option(help="C.")] = 1.0,
    canaries: Annotated[
        int, typer.Option(help="Number of synthetic users; half of them take part in training.")
    ] = 10_000,
    confidence: Annotated[float, typer.Option(help="Confidence level of the lower bound.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Random seed, to repeat an audit.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot the result to this file (SVG or PNG).", show_default=False)
    ] = None,
    non_members: Annotated[
        Path | None,
        typer.Option(
            help="Log of users who were not in the training data: attack the released model through its answers "
            "instead of auditing with canaries. The result is for the owner of the data alone.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="With --non-members, the log of the run (default: the path in its config).", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Audit a run: train on synthetic users with its settings and measure how well members are distinguished.

    The audit uses the real sampler, clipping, noise and optimizer, and touches no private data. The exit code is 1 if
    the result contradicts the claim. The outcome is stored in RUN as audit.json, where cards find it. Without RUN, the
    paper's settings for MovieLens-1M are audited: 6,040 users, batches of 1,024, 100 epochs, ε = 5. To audit training
    on several processes: torchrun --nproc-per-node 2 -m dpformer audit.
    """
    flags = {"--epsilon": epsilon, "--noise-multiplier": noise_multiplier, "--users": users, "--batch": batch}
    flags.update({"--epochs": epochs, "--delta": delta})
    if non_members is not None:
        from dpformer.cli import membership

        membership.refuse_others(run, [name for name, value in {**flags, "--plot": plot}.items() if value is not None])
        assert run is not None
        return membership.attack(run, non_members, data, seed, as_json)
    if data is not None:
        raise DpformerError("--data is read for --non-members alone: an audit by canaries touches no data")
    if run is not None and (given := [name for name, value in flags.items() if value is not None]):
        raise DpformerError(
            f"{given[0]} and RUN exclude each other, because a run has its own settings: give one of them"
        )
    if plot is not None and plot.suffix not in (".svg", ".png"):
        raise DpformerError(f"{plot.name}: unsupported image format; use .svg or .png")
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
    """Store the result in the run folder, where cards find it. Canaries are synthetic, so it may be published."""
    import json

    from dpformer.files import write_text
    from dpformer.runs.folder import RunFolder
    from dpformer.statement.cards.source import AUDIT
    from dpformer.statement.signature import outdated

    write_text(run / AUDIT, json.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
    if note := outdated(RunFolder(run)):
        typer.echo(note, err=True)


def settings_of(run: Path) -> dict[str, Any]:
    """What to audit of a finished run: every event in its ledger, which must match its config."""
    from dpformer.accounting.events import Event
    from dpformer.runs.planning import make_plan
    from dpformer.runs.run import finished
    from dpformer.verification.statement_check import CLOSE_VERSIONS, same

    done = finished(run)
    facts = done.statement
    if facts.get("epsilon") is None:
        raise DpformerError(f"{run} was trained without noise, so there is no claim to audit")
    events = [{name: value for name, value in event.items() if name != "epsilon_alone"} for event in facts["events"]]
    claimed = [Event.from_dict(event) for event in events]
    due = make_plan(done.config, facts["users"]).events
    if not same([event.to_dict() for event in claimed], [event.to_dict() for event in due], CLOSE_VERSIONS):
        held, asked = (", ".join(map(_described, some)) or "nothing" for some in (claimed, due))
        raise DpformerError(
            f"the ledger of {run} holds {held}, but its config asks for {asked}; run dpformer verify {run} for details"
        )
    return {"events": claimed, "facts": facts}


def _described(event: Any) -> str:
    from dpformer.format_number import plain

    return f"{event.label} (noise multiplier {plain(event.noise_multiplier, 5)})"


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
    from dpformer.verification.audit import audit as audit_training
    from dpformer.verification.audit import audit_run

    keep_freed_memory()
    team = start_team()
    if team is not None and not team.leads:
        team.follow()
        raise typer.Exit
    console = Console(stderr=True)
    try:
        return (audit_run if "events" in settings else audit_training)(
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

    from dpformer.format_number import small

    console, several = Console(), len(result.parts) > 1
    table = Table(
        *(["of"] if several else []), "check", "measured", "claimed", "p-value", "", title="Audit", title_justify="left"
    )
    for check in result.checks:
        mark = "ok" if check.passed else "FLAGGED"
        row = (check.name, check.measured, check.expected, f"{check.p_value:.2g}", mark)
        table.add_row(*([check.of or "all"] if several else []), *row)
    console.print(table)
    lines = [_mechanism(part) for part in result.parts]
    lines.append(
        f"{len(result.scores):,} canaries, {result.guesses.members:,} of them in training; δ = {small(result.delta)}; "
        f"{result.seconds:.0f} s."
    )
    lines.append(f"claimed ε for {result.of}: {result.epsilon_claimed:.3f}")
    lines.append(
        f"lower bound on ε, {result.confidence:.0%} confidence: {result.epsilon_lower:.3f}, assuming that canaries are "
        "guessed independently of one another, as under the claimed noise"
    )
    lines.append(f"lower bound for any mechanism (Steinke et al. 2023): {result.epsilon_lower_any:.3f}")
    console.print("\n".join(lines), highlight=False)
    console.print(result.verdict, style="bold" if result.passed else "bold red", highlight=False)


def _mechanism(part: Any) -> str:
    """One line about one mechanism."""
    from dpformer.format_number import plain

    m, correlated = part.mechanism, f", {part.mechanism.noise.name}" if part.mechanism.noise.correlated else ""
    how = f"{m.steps:,} steps at sample rate {plain(m.sample_rate)}{correlated}, clip norm {plain(m.clip_norm)}"
    return f"{part.of}: {how if part.of == 'training' else 'one release'}, noise multiplier {plain(m.noise_multiplier)}"
