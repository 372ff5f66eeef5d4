"""`dpformer doctor`: private training on this machine's device: checks, calls, speed, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dpformer.cli.results import AsJson, conclude

if TYPE_CHECKING:
    from dpformer.training.device_report import DeviceReport, Step


def doctor(
    device: Annotated[str | None, typer.Option(help="cpu or cuda.  \\[default: a GPU if there is one]")] = None,
    steps: Annotated[int, typer.Option(help="Steps to time, of each kind.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Check private training on a device against the CPU, and show what a step costs there.

    Takes seconds and needs no data. Paste the output of --json into a report about a GPU.
    """
    from dpformer.training.device import device_of
    from dpformer.training.device_report import examine, refuse_steps

    refuse_steps(steps)
    conclude(examine(device_of(device), steps), _print, as_json)


def _print(report: DeviceReport) -> None:
    typer.echo(f"device        {report.device}")
    typer.echo("versions      " + ", ".join(f"{name} {number}" for name, number in report.versions.items()))
    typer.echo(
        "kernels       " + ", ".join(f"{name}: {'yes' if has else 'no'}" for name, has in report.kernels.items())
    )
    for check in report.checks:
        typer.echo(f"{check.name:<13} {'right' if check.passed else 'WRONG'}: {check.seen}")
    typer.echo("\nper step                calls   synchronisations   copies to the device")
    for kind, step in (("plain", report.plain), ("private", report.private)):
        for phase, counts in step.phases.items():
            typer.echo(
                f"{kind + ' ' + phase:<18} {counts.calls:>10,} {counts.synchronisations:>18} {counts.copies:>22}"
            )
    if report.device.startswith("cpu"):
        typer.echo("Compiled code is not counted.")
    typer.echo(f"\nplain step    {_cost(report.plain)}")
    typer.echo(f"private step  {_cost(report.private)}, {report.speed:.2f} of the plain speed")
    typer.echo("All checks passed." if report.passed else "Do not train privately on this device: a check failed.")


def _cost(step: Step) -> str:
    memory = "" if step.peak_mib is None else f", at most {step.peak_mib:,.0f} MiB"
    return f"{1000 * step.seconds:,.1f} ms{memory}"
