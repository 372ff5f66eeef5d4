"""`dpformer serve RUN`: a released model over HTTP, with a page to try it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dpformer.errors import DpformerError, MissingExtra


def serve(
    run: Annotated[Path, typer.Argument(help="The run folder, or its model.safetensors alone.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    catalog: Annotated[Path | None, typer.Option(help="File of items with titles.  [those of training]")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one answer by a network.")] = 1,
) -> None:
    """Serve recommendations: JSON endpoints, a page at /, Prometheus metrics at /metrics.

    Only the released model and its statement are read. Histories are answered and forgotten: nothing of them is logged.
    Put a proxy in front for encryption, access control and rate limits.
    """
    try:
        import uvicorn

        from dpformer.serving.app import create_app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "dpformer":
            raise
        raise MissingExtra(str(error.name), "serve") from None
    import torch

    from dpformer.serving.served import Served

    torch.set_num_threads(threads)
    served = Served.open(run, catalog)
    with listening(host, port) as socket:
        address, number = socket.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        typer.echo(f"{served.statement['headline']}\nhttp://{shown}:{number}  (Ctrl-C stops it)")
        uvicorn.Server(uvicorn.Config(create_app(served), **settings())).run([socket])


def settings() -> dict[str, Any]:
    """Of uvicorn: no access log, for paths hold items."""
    return {"access_log": False, "log_level": "warning", "timeout_keep_alive": 30, "server_header": False}


def listening(host: str, port: int) -> Any:
    """A socket that is bound, so that a taken port is one sentence and port 0 has a number."""
    import socket

    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(address, family=family, backlog=1024)
    except OSError as error:
        raise DpformerError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
