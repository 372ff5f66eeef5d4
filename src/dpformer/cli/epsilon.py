"""`dpformer epsilon`: what a value of ε means, before any data is touched."""

from typing import Annotated, Any

import typer

from dpformer.cli.results import AsJson, print_json
from dpformer.errors import DpformerError


def epsilon(
    users: Annotated[int | None, typer.Option(help="Number of users.", show_default=False)] = None,
    epsilon: Annotated[
        list[float] | None, typer.Option("--epsilon", help="ε to show; may be repeated.  [default: 0.5, 1, 2, 4, 8]")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="δ.  [default: 1 / (10 · users)]", show_default=False)] = None,
    items_per_user: Annotated[
        int, typer.Option(help="Maximum number of items per user, for the noise on counts.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show what ε means: how many members an attack can find, the noise on a count, and the accuracy that remains.

    The first two hold for every data set; accuracy was measured on public ones.

    For example: dpformer epsilon --users 100000
    """
    if users is None and delta is None:
        raise DpformerError("give --users, for the default δ = 1 / (10 · users), or --delta")
    if users is not None and users < 2:
        raise DpformerError(f"users is {users}; it must be 2 or more")
    from dpformer.accounting.choosing import ADVICE, EPSILONS, choice, measured

    chosen = 1 / (10 * users) if delta is None and users is not None else delta
    assert chosen is not None
    try:
        choices = [choice(value, chosen, items_per_user) for value in epsilon or EPSILONS]
    except ValueError as error:
        raise DpformerError(str(error)) from None
    if as_json:
        facts = {"users": users, "delta": chosen, "items_per_user": items_per_user, "advice": ADVICE}
        print_json({**facts, "choices": [one.to_dict() for one in choices], "measured": measured()})
        return
    _print(choices, chosen, users)


def _print(choices: list[Any], delta: float, users: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from dpformer.accounting.choosing import ADVICE, ALARMS, measured
    from dpformer.format_number import percent, plain, power_of_e, small

    data = measured()["data"]
    table = Table("ε", "factor", *(f"found at {percent(alarms)}" for alarms in ALARMS), "noise", *data)
    for column in table.columns:
        column.justify = "right"
    for one in choices:
        kept = one.kept()
        table.add_row(
            plain(one.epsilon),
            power_of_e(one.epsilon),
            *(percent(share) for share in one.found.values()),
            f"± {plain(one.count_noise, 3)}",
            *(f"{kept[name]:.0%}" if name in kept else "–" for name in data),
        )
    console = Console()
    console.print(table)
    of = "" if users is None else f"{users:,} users, "
    sets = ", ".join(f"{name} ({facts['users']:,} users)" for name, facts in data.items())
    items = choices[0].items_per_user
    for line in (
        f"{of}δ = {small(delta)}; adding or removing one user changes no probability by more than the factor e^ε.",
        f"found: the largest share of members that any attack finds while accusing {percent(ALARMS[0])} or "
        f"{percent(ALARMS[1])} of the non-members; random accusations find as many.",
        "noise: standard deviation, in users, of the number of users who have an item, if the whole budget is spent "
        f"on these counts and a user has at most {items} items.",
        f"{sets}: measured {measured()['metric'].upper()} of counts relative to training without noise "
        "(docs/privacy/choosing-epsilon.md).",
        ADVICE,
    ):
        console.print(line, highlight=False)
