"""The OpenAPI schema as a readable page: endpoints, parameters, results. Nothing is loaded from elsewhere."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined


def reference_page(schema: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("dpformer.serving", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    endpoints = [
        {"path": path, "method": method.upper(), **_endpoint(path, facts, schema)}
        for path, methods in schema["paths"].items()
        for method, facts in methods.items()
    ]
    return environment.get_template("reference.html").render(info=schema["info"], endpoints=endpoints)


def with_examples(schema: dict[str, Any], ids: Sequence[str]) -> None:
    """Put ids of a model into the examples of a schema, in place."""
    first, *more = ids
    history = more or [first]
    shapes = schema["components"]["schemas"]
    shapes["RecommendRequest"]["examples"] = [{"history": history, "k": 10}]
    shapes["ExplainRequest"]["examples"] = [{"history": history, "item_id": first}]
    for path, name, value in (("/similar/{item_id}", "item_id", first), ("/items", "q", first)):
        for parameter in schema["paths"][path]["get"]["parameters"]:
            if parameter["name"] == name:
                parameter["example"] = value


def _endpoint(path: str, facts: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    body = facts.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    answer = facts["responses"]["200"].get("content", {}).get("application/json", {}).get("schema")
    shape = _resolved(body, schema)
    given = [(p["name"], _kind(p["schema"]), p.get("description", "")) for p in facts.get("parameters", [])]
    given += [(n, _kind(s), s.get("description", "")) for n, s in shape.get("properties", {}).items()]
    gives = [
        (n, _kind(s), s.get("description", "")) for n, s in _resolved(answer, schema).get("properties", {}).items()
    ]
    example = (shape.get("examples") or [None])[0]
    return {
        "summary": facts.get("description", ""),
        "given": given,
        "gives": gives,
        "example": None if example is None else shlex.quote(json.dumps(example)),
        "address": _example_address(path, facts.get("parameters", [])),
    }


def _example_address(path: str, parameters: list[dict[str, Any]]) -> str | None:
    """A path with a query made from the examples of its parameters; None if there are none."""
    given = {p["name"]: (p["in"], quote(str(p["example"]), safe="")) for p in parameters if "example" in p}
    if not given:
        return None
    for name, (place, value) in given.items():
        path = path.replace(f"{{{name}}}", value) if place == "path" else f"{path}?{name}={value}"
    return path


def _resolved(shape: dict[str, Any] | None, schema: dict[str, Any]) -> dict[str, Any]:
    if shape is None:
        return {}
    name = shape.get("$ref", "").rpartition("/")[2]
    return dict(schema["components"]["schemas"][name]) if name else shape


def _kind(shape: dict[str, Any]) -> str:
    """A type in one or two words, with its bounds."""
    if "anyOf" in shape:
        return " or ".join(_kind(part) for part in shape["anyOf"])
    if "$ref" in shape:
        return str(shape["$ref"].rpartition("/")[2])
    kind = str(shape.get("type", "any"))
    if kind == "array":
        most = f", at most {shape['maxItems']:,}" if "maxItems" in shape else ""
        return f"list of {_kind(shape.get('items', {}))}{most}"
    bounds = [f"{word} {shape[key]:g}" for key, word in (("minimum", "from"), ("maximum", "to")) if key in shape]
    return " ".join([kind, *bounds])
