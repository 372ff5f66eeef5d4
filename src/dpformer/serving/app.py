"""The service: a released model behind JSON endpoints, with a page, its privacy statement and Prometheus metrics.

Histories arrive in request bodies and are neither stored nor logged. An application serves one model;
`serving.supervisor` runs it in several workers and replaces it by the next model. A proxy in front adds encryption
and rate limits.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.middleware.cors import CORSMiddleware

import dpformer
from dpformer.errors import DpformerError
from dpformer.serving import shapes
from dpformer.serving.access import Access
from dpformer.serving.access_log import AccessLog
from dpformer.serving.admission import Admission
from dpformer.serving.guard import App, Guard, Meters
from dpformer.serving.limits import Limits
from dpformer.serving.reference import reference_page, with_examples
from dpformer.serving.rules import BoundRules, Rules
from dpformer.serving.served import Served

FOUND = {"page.css": "text/css", "page.js": "text/javascript"}


def create_app(
    served: Served,
    limits: Limits | None = None,
    access: Access | None = None,
    access_log: AccessLog | None = None,
    *,
    retiring: Callable[[], bool] = lambda: False,
) -> Guard:
    """The ASGI application for a model; `uvicorn.run(create_app(Served.open("runs/mine")))`.

    Args:
        served: the model.
        limits: limits of requests.
        access: hosts, origins and tokens; by default localhost and IP addresses, no other origins, no token.
        access_log: log of requests; by default none.
        retiring: returns True once this process is about to stop and no longer ready.
    """
    app = FastAPI(
        title="dpformer",
        version=dpformer.__version__,
        description=f"Recommendations from a released model. {served.statement['headline']}",
        docs_url=None,  # FastAPI's own pages load their code from a CDN
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # it could send request contents elsewhere
    )
    meters, access = Meters(served), access or Access()
    _add_model(app, served, meters)
    _add_facts(app, served, meters)
    _add_probes(app, served, retiring)
    _add_pages(app)
    app.add_exception_handler(RequestValidationError, _bad_request)
    with_examples(app.openapi(), served.examples())  # FastAPI caches the schema
    admitted: App = Admission(app, limits or shapes.LIMITS, access)
    return Guard(_with_origins(admitted, access) if access.origins else admitted, meters, access_log)


def _with_origins(app: App, access: Access) -> App:
    """Let scripts of these origins send requests and read answers."""
    headers = ["authorization", "content-type", "x-request-id"]
    return CORSMiddleware(
        app, allow_origins=access.origins, allow_methods=["GET", "POST"], allow_headers=headers, max_age=600
    )


def _add_model(app: FastAPI, served: Served, meters: Meters) -> None:
    async def run(function: Any, *given: Any, **named: Any) -> Any:
        """Run directly if it takes microseconds; run a network in a thread, so that other requests proceed."""
        if served.ranker.quick:
            return function(*given, **named)
        return await run_in_threadpool(function, *given, **named)

    @app.post("/recommend", response_model=shapes.Recommendations, tags=["model"])
    async def recommend(asked: shapes.RecommendRequest) -> Response:
        """The k best next items after a history, which may be empty and need not belong to a user in the data.

        Rules (items, exclude, where, max_per) are applied before the choice of the k best.
        """
        _check_history(served, asked)
        rules = _bound(served, asked)
        answer = await run(
            served.recommend, asked.history, asked.k, filter_seen=asked.filter_seen, why=asked.why, rules=rules
        )
        meters.unknown.inc(answer["unknown"])
        return JSONResponse(answer)

    @app.post("/explain", response_model=shapes.Explanation, tags=["model"])
    async def explain(asked: shapes.ExplainRequest) -> Response:
        """How much each item of a history contributes to an item."""
        _check_history(served, asked)
        answer = await run(served.explain, asked.history, _known(served, asked.item_id))
        meters.unknown.inc(answer["unknown"])
        return JSONResponse(answer)

    @app.get("/similar/{item_id}", response_model=shapes.SimilarItems, tags=["model"])
    async def similar(item_id: Annotated[shapes.Id, Path()], k: Annotated[shapes.K, Query()] = 10) -> Response:
        """Similar items: followed by the same items or, for a network, with similar embeddings."""
        return JSONResponse({"items": await run(served.similar, _known(served, item_id), k)})

    @app.get("/items", response_model=shapes.Items, tags=["model"])
    async def items(
        q: Annotated[str, Query(max_length=shapes.LIMITS.search_characters, description="Prefixes of words.")] = "",
        limit: Annotated[shapes.K, Query()] = 10,
    ) -> Response:
        """Items by title or id, most popular first."""
        return JSONResponse({"items": served.find(q, limit)})


def _add_facts(app: FastAPI, served: Served, meters: Meters) -> None:
    @app.get("/statement", response_model=shapes.Statement, tags=["facts"])
    async def statement() -> Response:
        """The privacy statement of the model: what is promised, how, and what is not covered."""
        return JSONResponse(served.statement)

    @app.get("/health", response_model=shapes.Health, tags=["facts"])
    async def health() -> Response:
        """Whether the service is up, and with which model."""
        facts = {"model": type(served.release.model).__name__, "items": served.ranker.num_items}
        private = bool(served.statement["private"])
        return JSONResponse({"status": "ok", **facts, "private": private, "version": dpformer.__version__})

    @app.get("/metrics", response_class=Response, tags=["facts"])
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(meters.text(), media_type=CONTENT_TYPE_LATEST)


def _add_probes(app: FastAPI, served: Served, retiring: Callable[[], bool]) -> None:
    @app.get("/healthz", response_model=shapes.Alive, tags=["facts"])
    async def healthz() -> Response:
        """Liveness: whether the process answers; if not, restart it."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready", response_model=shapes.Ready, tags=["facts"])
    async def ready() -> Response:
        """Readiness: whether to send requests here, and which model answers; 503 while this worker is about to stop."""
        opened = served.opened.isoformat(timespec="seconds")
        facts = {"ready": not retiring(), "model": served.model_sha256, "opened": opened}
        return JSONResponse(facts, status_code=200 if facts["ready"] else 503)


def _add_pages(app: FastAPI) -> None:
    folder = files("dpformer.serving").joinpath("page")
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    parts = {name: folder.joinpath(name).read_bytes() for name in FOUND}

    @app.get("/", include_in_schema=False)
    async def front() -> Response:
        return HTMLResponse(page)

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in parts:
            raise HTTPException(404, "not found")
        return Response(parts[name], media_type=FOUND[name])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference_page(app.openapi()))


def _bound(served: Served, asked: shapes.RecommendRequest) -> BoundRules | None:
    """The rules of a request in item numbers; None if there are none."""
    where = {
        column: condition.model_dump(exclude_none=True) if isinstance(condition, shapes.Bounds) else condition
        for column, condition in asked.where.items()
    }
    try:
        rules = Rules(asked.items, asked.exclude, where, asked.max_per)
        return served.book.bind(rules) if rules else None
    except DpformerError as error:
        raise HTTPException(422, str(error)) from None


def _check_history(served: Served, asked: shapes.RecommendRequest | shapes.ExplainRequest) -> None:
    """Refuse ids unknown to the model if the request asks for that; otherwise the answer counts them."""
    if asked.unknown == "error" and (unknown := served.numbers(asked.history)[1]):
        raise HTTPException(422, f"the model does not know {unknown} of the {len(asked.history)} items of the history")


def _known(served: Served, name: str | int) -> int:
    number = served.number(str(name))
    if number is None:
        raise HTTPException(404, f"the model does not know this item; it has {served.ranker.num_items:,} others")
    return number


async def _bad_request(_: Request, error: Exception) -> Response:
    """What is wrong and where, without the input itself."""
    assert isinstance(error, RequestValidationError)
    detail = [{"where": [str(part) for part in one["loc"]], "what": one["msg"]} for one in error.errors()]
    return JSONResponse({"detail": detail[:10]}, status_code=422)
