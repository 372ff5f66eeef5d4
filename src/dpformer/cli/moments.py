"""`dpformer moments`: the paper's table of variances through ReLU and GELU, with exact GELU for comparison."""

import json
from typing import Annotated

import typer

from dpformer.errors import DpformerError

DEVIATIONS = (0.01, 0.1, 1.0)  # the paper's N(0, 0.01) etc. are standard deviations
SEED = 0


def moments(
    samples: Annotated[int, typer.Option(help="Number of samples to compare with.")] = 1_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Variance after ReLU and GELU of a Gaussian input: sampled, exact, and the paper's approximation."""
    if samples < 2:
        raise DpformerError(f"samples is {samples}; it must be 2 or more")
    rows = [variances(deviation, samples) for deviation in DEVIATIONS]
    if as_json:
        typer.echo(json.dumps({"samples": samples, "rows": rows}, indent=2))
    else:
        _print(rows, samples)


def variances(deviation: float, samples: int) -> dict[str, float]:
    """Variances after ReLU and GELU of N(0, deviation²): sampled, exact, and the paper's approximation of GELU."""
    import torch
    from torch.nn import functional as F

    from dpformer.reattention import Gaussian, gelu, relu

    noise = torch.randn(samples, generator=torch.Generator().manual_seed(SEED)) * deviation
    x = Gaussian(torch.zeros(1, dtype=torch.float64), torch.full((1,), deviation**2, dtype=torch.float64))
    return {
        "deviation": deviation,
        "relu_sampled": F.relu(noise).double().var().item(),
        "relu_exact": relu(x).var.item(),
        "gelu_sampled": F.gelu(noise).double().var().item(),
        "gelu_exact": gelu(x).var.item(),
        "gelu_paper": gelu(x, approximation="relu").var.item(),
    }


def _print(rows: list[dict[str, float]], samples: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Variance of an activation of N(0, σ²), {samples:,} samples", title_justify="left")
    titles = ("deviation", "ReLU, sampled", "ReLU, exact", "GELU, sampled", "GELU, exact", "GELU as ReLU (paper)")
    for title in titles:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(f"{row['deviation']:g}", *(f"{value:.3g}" for name, value in row.items() if name != "deviation"))
    Console().print(table)
