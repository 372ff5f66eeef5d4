"""`dpformer calibrate`: the noise that a budget needs, or the budget that some noise costs."""

import json
import math
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpformer.errors import DpformerError

if TYPE_CHECKING:
    from dpformer.noise import Noise


def calibrate(
    epsilon: Annotated[list[float] | None, typer.Option(help="Target ε; may be repeated.")] = None,
    noise_multiplier: Annotated[
        list[float] | None,
        typer.Option(help="Noise multiplier whose ε to compute, instead of --epsilon; may be repeated."),
    ] = None,
    users: Annotated[int | None, typer.Option(help="Number of users.")] = None,
    batch: Annotated[list[float] | None, typer.Option(help="Expected batch size; may be repeated.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs (default: 100, unless --steps is given).")] = None,
    sample_rate: Annotated[
        list[float] | None, typer.Option(help="Sampling rate, instead of --users and --batch; may be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Number of steps, instead of --epochs.")] = None,
    delta: Annotated[float | None, typer.Option(help="δ (default: 1 / (10 · users)).")] = None,
    frequency_noise: Annotated[
        float | None, typer.Option(help="Noise multiplier of a frequency query within the same budget.")
    ] = None,
    bands: Annotated[int, typer.Option(help="Number of steps over which the noise is correlated.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compute the noise multiplier that a budget (ε, δ) needs, or the ε of a noise multiplier.

    Assumes training on Poisson-sampled batches of users, all steps composed, under adding or removing one user's entire
    history.

    For example: dpformer calibrate --users 6040 --batch 256 --batch 1024 --epsilon 5 --epsilon 8
    """
    if bool(epsilon) == bool(noise_multiplier):
        raise DpformerError("give --epsilon to compute the noise, or --noise-multiplier to compute ε")
    if delta is None and users is None:
        raise DpformerError("give --delta, or --users for the default δ = 1 / (10 · users)")
    if delta is None:
        delta = 1 / (10 * _at_least_one("users", users))
    from dpformer.accounting import Gaussian
    from dpformer.noise.mechanisms import noise_of

    try:
        others = [] if frequency_noise is None else [Gaussian(frequency_noise, label="frequencies")]
        noise = noise_of({"bands": bands})
        rates = [_rate_and_steps(rate, epochs, steps) for rate in _rates(users, batch, sample_rate)]
        budgets = [(value, None) for value in epsilon or []]
        noises = [(None, value) for value in noise_multiplier or []]
        rows = [_row(*asked, *rate, noise, delta, others) for rate, asked in product(rates, [*budgets, *noises])]
    except ValueError as error:
        raise DpformerError(str(error)) from None
    if as_json:
        facts = {
            "adjacency": "zero-out-one-user",
            "frequency_noise": frequency_noise,
            **noise.settings(),
            "rows": rows,
        }
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(rows, frequency_noise, noise)


def _row(
    wanted: float | None, sigma: float | None, rate: float, steps: int, noise: "Noise", delta: float, others: list[Any]
) -> dict[str, Any]:
    from dpformer.accounting import Ledger
    from dpformer.accounting import calibrate as least_noise

    if sigma is None:
        assert wanted is not None
        sigma = least_noise(epsilon=wanted, delta=delta, sample_rate=rate, steps=steps, others=others, noise=noise)
    ledger = Ledger([*others, noise.event(sigma, rate, steps, label="training")])
    spent, renyi = ledger.epsilon(delta), ledger.epsilon(delta, "rdp")
    return {
        "sample_rate": rate,
        "steps": steps,
        "delta": delta,
        "noise_multiplier": sigma,
        "sum_noise": sigma * noise.sum_deviation(steps),  # of all steps, in clip norms
        "epsilon": spent if math.isfinite(spent) else None,  # JSON has no infinity; None: no guarantee
        "epsilon_rdp": renyi if math.isfinite(renyi) else None,
    }


def _rates(users: int | None, batch: list[float] | None, sample_rate: list[float] | None) -> list[float]:
    if sample_rate:
        if batch:
            raise DpformerError("give --sample-rate or --batch, not both")
        return sample_rate
    if not batch or users is None:
        raise DpformerError("give --users and --batch, or --sample-rate")
    for size in batch:
        if not 0 < size <= users:
            raise DpformerError(f"batch is {size:g}; it must be above 0 and at most the number of users, {users}")
    return [size / users for size in batch]


def _rate_and_steps(rate: float, epochs: float | None, steps: int | None) -> tuple[float, int]:
    """q and T; an epoch is 1/q steps in expectation, so T = ceil(epochs / q)."""
    if steps is not None:
        if epochs is not None:
            raise DpformerError("give --steps or --epochs, not both")
        return rate, steps
    epochs = 100.0 if epochs is None else epochs
    if not (rate > 0 and epochs > 0 and math.isfinite(epochs)):
        raise DpformerError(f"sample rate is {rate:g} and epochs is {epochs:g}; both must be above 0")
    return rate, math.ceil(epochs / rate * (1 - 1e-12))  # 100/(B/N) may exceed 100·N/B by a rounding error


def _at_least_one(name: str, value: int | None) -> int:
    if value is None or value < 1:
        raise DpformerError(f"{name} is {value}; it must be 1 or more")
    return value


def _print(rows: list[dict[str, Any]], frequency_noise: float | None, noise: "Noise") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("sample rate", "steps", "δ", "noise multiplier", "noise in the sum", "ε", "ε by RDP")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(
            f"{row['sample_rate']:.4g}",
            f"{row['steps']:,}",
            f"{row['delta']:.3g}",
            f"{row['noise_multiplier']:g}",
            f"{row['sum_noise']:.4g}",
            _epsilon(row["epsilon"]),
            _epsilon(row["epsilon_rdp"]),
        )
    console = Console()
    console.print(table)
    over = f" with {noise.name}" if noise.correlated else ""
    with_ = f" and one frequency query with noise multiplier {frequency_noise:g}" if frequency_noise else ""
    console.print(
        f"Adding or removing one user's entire history; Poisson-sampled training{over}{with_}; ε by privacy loss "
        "distributions (RDP for comparison: looser).",
        highlight=False,
    )


def _epsilon(value: float | None) -> str:
    return "∞" if value is None else f"{math.ceil(value * 1e4 * (1 - 1e-12)) / 1e4:.4f}"  # rounded up
