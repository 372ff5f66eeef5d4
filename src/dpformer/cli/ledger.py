"""`dpformer ledger`: one budget for a data set over many runs: create it, plan it, see what is spent and what fits."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dpformer.cli.results import AsJson, print_json
from dpformer.errors import DpformerError

SHOW = "show"
LATEST = 3  # kinds of runs for which the number of further runs is shown

File = Annotated[Path, typer.Argument(help="Ledger file.")]
Delta = Annotated[float | None, typer.Option(help="Total δ of all runs.", show_default=False)]


class _ShowUnlessNamed(TyperGroup):
    """`dpformer ledger FILE` is `dpformer ledger show FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [SHOW, *args]
        return super().parse_args(ctx, args)


ledger = typer.Typer(
    cls=_ShowUnlessNamed,
    no_args_is_help=True,
    help="One budget over many runs: dpformer ledger FILE shows it, or creates it with --epsilon and --delta.",
)


@ledger.command(SHOW)
def show(
    file: File,
    epsilon: Annotated[
        float | None, typer.Option(help="Total ε of all runs; creates the ledger.", show_default=False)
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Total δ of all runs; creates the ledger.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the budget, the runs that spent it, and how many more fit; with --epsilon and --delta, create a ledger.

    `dpformer train --ledger FILE` records each run before it releases anything, or refuses it. Several people may share
    one file; processes wait for each other.
    """
    from dpformer.runs import ledger_file

    if (epsilon is None) != (delta is None):
        raise DpformerError("a budget needs both --epsilon and --delta")
    made = None if epsilon is None or delta is None else ledger_file.create(file, epsilon, delta)
    _show(made or ledger_file.read(file), as_json)


@ledger.command()
def plan(
    file: Annotated[Path | None, typer.Argument(help="Ledger file to create or to add the plan to.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Number of planned runs, such as 52.")] = 52,
    epsilon: Annotated[float | None, typer.Option(help="Total ε of all runs.", show_default=False)] = None,
    delta: Delta = None,
    users: Annotated[
        int | None, typer.Option(help="Number of users, for the default δ = 1 / (10 · users).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute each run's share of a budget by composition, which is more than ε divided by the number of runs.

    With FILE the plan is stored: `dpformer train --ledger FILE` without --epsilon takes its share, and a run that needs
    more than its share is refused.

    For example: dpformer ledger plan weekly.db --runs 52 --epsilon 8 --users 100000
    """
    from dpformer.runs import ledger_file
    from dpformer.runs.budget import Budget

    if file is not None and file.exists():
        if epsilon is not None or delta is not None or users is not None:
            raise DpformerError(f"{file} exists, and its budget cannot be changed: give --runs only")
        budget = ledger_file.set_plan(file, runs)
    else:
        if epsilon is None or (delta is None and users is None):
            raise DpformerError("a plan needs --epsilon, and --delta or --users")
        delta = delta if delta is not None else 1 / (10 * _some(users))
        if file is None:
            budget = Budget(epsilon, delta, plan=runs)
        else:
            budget = ledger_file.create(file, epsilon, delta, plan=runs)
    facts = _share(budget, runs)
    if as_json:
        print_json(facts)
        return
    _print_plan(facts, file)


@ledger.command()
def convert(file: File) -> None:
    """Convert a ledger of an older version (JSON) to the current format; the old file is kept."""
    from dpformer.runs import ledger_file

    _show(ledger_file.convert(file), as_json=False)


@ledger.command()
def check(
    file: File,
    runs: Annotated[list[Path], typer.Argument(help="Finished run folders that the ledger counts.")],
    as_json: AsJson = False,
) -> None:
    """Check that the ledger still holds the entries of these runs as they were written; exit code 1 if not.

    Every command checks the hash chain, which reveals an edited or dropped entry. A ledger that was rewritten from
    beginning to end is revealed here, by comparison with the statements of the runs.
    """
    from dpformer.runs import ledger_file

    found = ledger_file.check_runs(file, runs)
    if as_json:
        print_json([{"run": str(run), "problem": wrong or None} for run, wrong in found])
    else:
        for run, wrong in found:
            typer.echo(f"{run}: {wrong or 'its entry is unchanged'}")
    if any(wrong for _, wrong in found):
        raise typer.Exit(1)


def _some(users: int | None) -> int:
    if users is None or users < 2:
        raise DpformerError(f"users is {users}; it must be 2 or more")
    return users


def _show(budget: Any, as_json: bool) -> None:
    from dpformer.format_number import plain, round_up

    spent, runs = budget.spent, [{**run, "epsilon_alone": budget.alone(run)} for run in budget.runs]
    kinds = _kinds(budget)
    if as_json:
        facts = {"epsilon": budget.epsilon, "delta": budget.delta, "spent": spent, "left": budget.left, "runs": runs}
        print_json({**facts, "plan": budget.plan, "fits": kinds, "entry": budget.number, "hash": budget.hash})
        return
    typer.echo(f"ε {round_up(spent)} of {plain(budget.epsilon)} is spent, at δ = {budget.delta:g}")
    for run in runs:
        search = f", a search with {plain(run['mean_runs'])} runs on average" if "mean_runs" in run else ""
        typer.echo(f"{run['started']}  ε {round_up(run['epsilon_alone'])} on its own{search}  {run['run']}")
    for folder, more in kinds.items():
        typer.echo(f"{more} more runs like {folder} would fit")
    if budget.plan is not None:
        typer.echo(f"plan: {budget.left} of {budget.plan} runs are left; train without --epsilon to use one share")
    typer.echo(f"entry {budget.number}, {budget.hash[:16]}…: hash chain intact")


def _kinds(budget: Any) -> dict[str, int]:
    """The latest runs of different kinds, each with the number of further ones that fit."""
    latest: dict[str, Any] = {}
    for run in reversed(budget.runs):
        events = [{name: value for name, value in event.items() if name != "label"} for event in run["events"]]
        latest.setdefault(repr((events, run.get("mean_runs"))), run)
    return {run["run"]: budget.fits(run) for run in list(latest.values())[:LATEST]}


def _share(budget: Any, runs: int) -> dict[str, Any]:
    """The share of a run that makes one Gaussian release, as counts do; other kinds compute theirs at training."""
    from dpformer.accounting import Gaussian, attack_rates, calibrate

    delta = budget.delta / runs

    def planned(epsilon: float) -> list[Any]:
        return [Gaussian(calibrate(epsilon=epsilon, delta=delta, sample_rate=1.0, steps=1))]

    share = budget.share(planned)
    (event,) = planned(share)
    left = budget.left
    everything = [event for run in budget.runs for event in _events(run)] + [event] * left
    return {
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "runs": left,
        "share": {"epsilon": share, "delta": delta, "noise_multiplier": event.noise_multiplier},
        "divided": budget.epsilon / runs,
        "all_runs": budget.spent_with([event], times=left),
        "members_found": {
            "one_run": attack_rates([event], budget.delta).true_positive_rate,
            "all_runs": attack_rates(everything, budget.delta).true_positive_rate,
        },
    }


def _events(run: dict[str, Any]) -> Any:
    from dpformer.runs.budget import events_of

    return events_of(run)


def _print_plan(facts: dict[str, Any], file: Path | None) -> None:
    from dpformer.format_number import percent, plain, round_up, small

    share, found = facts["share"], facts["members_found"]
    for line in (
        f"{facts['runs']} runs, in total ε = {round_up(facts['all_runs'])} of {plain(facts['epsilon'])} at δ = "
        f"{small(facts['delta'])}",
        f"share of each: ε = {plain(share['epsilon'])} at δ = {small(share['delta'])}, noise multiplier "
        f"{plain(share['noise_multiplier'], 5)} (counts; the share of a network is computed at training)",
        f"dividing ε instead would give each run only ε = {plain(facts['divided'], 3)}",
        f"members found at a false positive rate of 1%, at most: {percent(found['one_run'])} from one run, "
        f"{percent(found['all_runs'])} from all runs together",
        *([f"each week: dpformer train LOG --ledger {file} --out runs/WEEK"] if file is not None else []),
    ):
        typer.echo(line)
