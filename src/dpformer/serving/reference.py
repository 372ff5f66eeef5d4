"""The OpenAPI schema as a page to read: endpoints, what they take, what they give. Nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def reference_page(schema: dict[str, Any]) -> str:
    environment = Environment(
        loader=PackageLoader("dpformer.serving", "page"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    endpoints = [
        {"path": path, "method": method.upper(), **_endpoint(facts, schema)}
        for path, methods in schema["paths"].items()
        for method, facts in methods.items()
    ]
    return environment.get_template("reference.html").render(info=schema["info"], endpoints=endpoints)


def _endpoint(facts: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
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
        "example": None if example is None else json.dumps(example),
    }


def _resolved(shape: dict[str, Any] | None, schema: dict[str, Any]) -> dict[str, Any]:
    if shape is None:
        return {}
    name = shape.get("$ref", "").rpartition("/")[2]
    return dict(schema["components"]["schemas"][name]) if name else shape


def _kind(shape: dict[str, Any]) -> str:
    """A type in a word or two, with its bounds."""
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
