"""`dpformer serve RUN`: a released model over HTTP, with a page to try it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.terminal import visible
from dpformer.errors import DpformerError, MissingExtra

NEEDED = ("uvicorn", "fastapi", "prometheus_client")


def serve(
    run: Annotated[Path, typer.Argument(help="The run folder, or its model.safetensors alone.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes, which share one model in memory.")] = 1,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the new model when RUN changes (or send SIGHUP).")
    ] = False,
    catalog: Annotated[Path | None, typer.Option(help="File of items with titles.  [those of training]")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one answer by a network.")] = 1,
    token_file: Annotated[
        Path | None, typer.Option(help="File of bearer tokens, one per line, of which a request needs one.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Name of this service in requests, besides localhost and addresses: shop.example."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Web page whose scripts may ask (CORS): https://shop.example."),
    ] = None,
    access_log: Annotated[
        str | None, typer.Option(help="File for one JSON line per request, or - for standard output.")
    ] = None,
) -> None:
    """Serve recommendations: JSON endpoints, a page at /, probes, Prometheus metrics at /metrics.

    Only the released model and its statement are read. Histories are answered and forgotten: nothing of them is logged.
    Put a proxy in front for encryption and rate limits.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise MissingExtra(name, "serve")
    if not run.exists():
        raise DpformerError(f"{run} does not exist")
    from dpformer.serving.access import Access
    from dpformer.serving.http import listening
    from dpformer.serving.supervisor import Service, Supervisor

    named = [*(allow_host or []), *([host] if _is_name(host) else [])]
    access = Access.of(named, allow_origin or [], token_file)
    service = Service(run, catalog, workers, threads, access=access, access_log=access_log, watch=watch)
    with listening(host, port) as socket:
        Supervisor(service, socket, lambda facts: _announce(facts, socket), _say).run()


def _is_name(host: str) -> bool:
    """Whether an address to listen on is a name, under which the service may then be asked."""
    return any(letter.isalpha() for letter in host) and ":" not in host


def _announce(facts: dict[str, Any], socket: Any) -> None:
    address, number = socket.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    typer.echo(f"{facts['headline']}\nhttp://{shown}:{number}  (Ctrl-C stops it)")


def _say(text: str) -> None:
    typer.echo(f"dpformer: {visible(text)}", err=True)
