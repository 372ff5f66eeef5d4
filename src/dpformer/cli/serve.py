"""`dpformer serve RUN`: serve a released model over HTTP, with a page to try it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.cli.terminal import visible
from dpformer.errors import MissingExtra

NEEDED = ("uvicorn", "fastapi", "prometheus_client")


def serve(
    run: Annotated[Path, typer.Argument(help="Run folder, or a model.safetensors file.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 chooses a free one.")] = 8000,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Number of worker processes; they share one model in memory.")
    ] = 1,
    watch: Annotated[
        bool, typer.Option("--watch", help="Reload the model when RUN changes (SIGHUP reloads too).")
    ] = False,
    catalog: Annotated[
        Path | None, typer.Option(help="Catalogue with titles.  [default: the one given at training]")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads per request for a network.")] = 1,
    token_file: Annotated[
        Path | None, typer.Option(help="File of accepted bearer tokens, one per line; requests need one of them.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional accepted Host name, such as shop.example (localhost and IP addresses are always accepted)."
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin allowed to send requests (CORS), such as https://shop.example."),
    ] = None,
    access_log: Annotated[
        str | None, typer.Option(help="Access log: a file for one JSON line per request, or - for standard output.")
    ] = None,
) -> None:
    """Serve recommendations over HTTP: JSON endpoints, a page at /, health probes, Prometheus metrics at /metrics.

    Only the released model and its statement are read. Histories are neither stored nor logged. Put a reverse proxy in
    front for encryption and rate limits.
    """
    for name in NEEDED:
        if find_spec(name) is None:
            raise MissingExtra(name, "serve")
    from dpformer.serving.access import Access
    from dpformer.serving.http import listening
    from dpformer.serving.service import Service
    from dpformer.serving.supervisor import Supervisor

    named = [*(allow_host or []), *([host] if _is_name(host) else [])]
    access = Access.of(named, allow_origin or [], token_file)
    service = Service(run, catalog, workers, threads, access=access, access_log=access_log, watch=watch)
    with listening(host, port) as socket:
        Supervisor(service, socket, lambda facts: _announce(facts, socket), _say).run()


def _is_name(host: str) -> bool:
    """Whether the address to listen on is a name, which requests may then use as their Host."""
    return any(letter.isalpha() for letter in host) and ":" not in host


def _announce(facts: dict[str, Any], socket: Any) -> None:
    address, number = socket.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    typer.echo(f"{facts['headline']}\nhttp://{shown}:{number}  (press Ctrl-C to stop)")


def _say(text: str) -> None:
    typer.echo(f"dpformer: {visible(text)}", err=True)
