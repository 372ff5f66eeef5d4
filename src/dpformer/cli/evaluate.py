"""`dpformer evaluate RUN [DATA]`: measure recommendations on items held out from training."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.reading import Unfiltered, reading_of
from dpformer.cli.results import AsJson, print_json
from dpformer.errors import DpformerError


def evaluate(
    choices: dict[str, Any],
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    data: Annotated[
        Path | None, typer.Argument(help="Log to evaluate on.  [default: the run's log, if the run is your own]")
    ] = None,
    k: Annotated[
        list[int] | None, typer.Option("-k", help="Cut-off of the ranking; may be repeated.  [default: 10]")
    ] = None,
    split: Annotated[str, typer.Option(help="Held-out items to use: test or validation.")] = "test",
    allow_seen: Annotated[
        bool,
        typer.Option(
            "--allow-seen", help="Measure as `recommend --allow-seen`: items of the history may be recommended."
        ),
    ] = False,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="Metric to show; may be repeated.  [default: NDCG, HIT, MRR]")
    ] = None,
    unfiltered: Unfiltered = False,
    samples: Annotated[int, typer.Option(help="Bootstrap samples of the confidence intervals.")] = 1000,
    private_metrics: Annotated[
        bool, typer.Option("--private-metrics", help="Show only the noisy metrics that the run released under ε.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rank each user's held-out item among all items: NDCG@k, HIT@k, MRR and others, with popularity for comparison.

    By default this measures what `recommend` returns: items of the history are excluded, or kept with --allow-seen.
    Papers usually rank the held-out item even if it is in the history; where that differs, it is shown separately.

    The log is read with the options of training; reading options (--help-all) override them.

    These numbers are exact and not covered by ε. A run trained with --private-metrics also has noisy ones, which are
    covered; they are shown first, or alone with --private-metrics.
    """
    ks = sorted(set(k or [10]))
    if ks[0] < 1:
        raise DpformerError(f"k is {ks[0]}; it must be 1 or more")
    if samples < 1:
        raise DpformerError(f"samples is {samples}; it must be 1 or more")
    if split not in ("test", "validation"):
        raise DpformerError(f"split is {split!r}; it must be test or validation")
    from dpformer.evaluation.metrics import shown
    from dpformer.runs import finished

    try:
        shown(metric)
    except ValueError as error:
        raise DpformerError(str(error)) from None
    opened = finished(run)
    if private_metrics:
        if allow_seen and opened.config.filter_seen:
            raise DpformerError("private metrics were released with seen items excluded: omit --allow-seen")
        _covered(opened, run, data, as_json)
        return
    from dpformer.report.accuracy import measure

    measured = measure(opened, data, split=split, filter_seen=not allow_seen, reading=reading_of(choices, unfiltered))
    facts = measured.to_dict(tuple(ks), samples=samples, names=metric)
    facts = {"run": str(run), "headline": opened.statement["headline"], **facts}
    if "metrics" in opened.statement:
        facts["private_metrics"] = opened.statement["metrics"]
    if as_json:
        print_json(facts)
    else:
        {"ranking": _print, "language": _print_language}[measured.kind](facts, opened.statement)


def _covered(run: Any, path: Path, data: Path | None, as_json: bool) -> None:
    """Metrics released with noise: nothing is measured again, because that would spend budget again."""
    from dpformer.queries.metrics import repeats_words

    released = run.statement.get("metrics")
    if data is not None:
        raise DpformerError("private metrics were released once, for the run's own data: give no other log")
    if released is None:
        raise DpformerError(f"{path} has no private metrics and no budget for any: train with --private-metrics")
    if as_json:
        facts = {"headline": run.statement["headline"], "covered": run.statement["private"], "metrics": released}
        print_json(facts)
        return
    typer.echo(run.statement["headline"])
    typer.echo(covered_line(run.statement))
    if said := repeats_words(released):
        typer.echo(f"{said}.")


def covered_line(statement: dict[str, Any]) -> str:
    """One line with the private metrics of a statement that has them."""
    from dpformer.evaluation.metrics import released

    found = statement["metrics"]
    values = "  ".join(f"{label} {found[label]:.4f}" for label in (metric.label() for metric in released()))
    return (
        f"{values}  ± {found['deviation']:.4f} noise ({'covered by ε' if statement['private'] else 'NOT PRIVATE'}); "
        f"{found['of']}"
    )


def _print_language(facts: dict[str, Any], statement: dict[str, Any]) -> None:
    found = facts["metrics"]
    typer.echo(facts["headline"])
    typer.echo(f"loss                {found['loss']:.4f} nats per token")
    typer.echo(f"bits per character  {found['bits_per_character']:.4f}")
    typer.echo(f"perplexity          {found['perplexity']:.3f}")
    typer.echo(f"{found['tokens']:,} tokens of held-out text. {facts['note']}")


def _print(facts: dict[str, Any], statement: dict[str, Any]) -> None:
    from rich.console import Console

    from dpformer.evaluation.metrics import LIST_METRICS

    console = Console()
    console.print(facts["headline"], style="bold", highlight=False, markup=False)
    if "metrics" in statement:
        console.print(covered_line(statement), highlight=False, markup=False)
    for policy in _told(facts):
        _print_policy(console, facts, policy)
    if "by_time" in facts:
        title = f"Held-out items from {facts['by_time']['until']}, by whether user and item occur in training"
        _print_parts(console, facts["by_time"]["parts"], title)
    title = "By popularity of the held-out item (thirds of all interactions, most popular first)"
    _print_parts(console, facts["by_popularity"], title)
    for of_lists in LIST_METRICS.values():
        console.print(of_lists.words(facts[of_lists.label]), highlight=False)
    console.print(f"Repeats: {facts['repeats']:.1%} of the held-out items are in the history.", highlight=False)
    console.print(f"{facts['users']:,} users, {facts['split']} items, {facts['ranking']}.", highlight=False)
    if facts["interactions_left_out"]:
        left_out = f"{facts['interactions_left_out']:,} interactions with items unknown to the model were ignored."
        console.print(left_out, highlight=False)
    for warning in facts["warnings"]:
        console.print(f"Warning: {warning}", style="bold red", highlight=False, markup=False)
    console.print(facts["note"], style="yellow", highlight=False)


def _told(facts: dict[str, Any]) -> list[str]:
    """The policies, the headline policy first; without repeats, the papers' policy equals the served one."""
    same = facts["repeats"] == 0
    return [policy for policy in facts["metrics"]["model"] if not (policy == "masked" and same)]


def _print_policy(console: Any, facts: dict[str, Any], policy: str) -> None:
    from rich.table import Table

    from dpformer.kinds.popularity import BASELINE

    also = "; without repeats the same as in papers" if policy == "served" and facts["repeats"] == 0 else ""
    title = f"{policy}: {facts['policies'][policy]}{also}"
    console.print(title, style="italic", highlight=False)
    table = Table("metric", "model", "95% interval", BASELINE.name, "95% interval")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, of_model in facts["metrics"]["model"][policy].items():
        table.add_row(name, *_cells(of_model), *_cells(facts["metrics"][BASELINE.name][policy][name]))
    console.print(table)


def _print_parts(console: Any, parts: list[dict[str, Any]], title: str) -> None:
    from rich.table import Table

    from dpformer.evaluation.metrics import hit
    from dpformer.kinds.popularity import BASELINE

    (metric,) = (label for label in parts[0]["model"] if label.startswith(f"{hit.name}@"))
    console.print(f"{title} ({metric})", style="italic", highlight=False)
    of_items = ["items"] if "items" in parts[0] else []
    table = Table("part", *of_items, "users", "model", BASELINE.name)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in parts:
        values = [f"{row[who][metric]:.4f}" for who in ("model", BASELINE.name)]
        table.add_row(row["part"], *(f"{row[name]:,}" for name in (*of_items, "users")), *values)
    console.print(table)


def _cells(metric: dict[str, float]) -> tuple[str, str]:
    return f"{metric['value']:.4f}", f"{metric['low']:.4f} … {metric['high']:.4f}"
