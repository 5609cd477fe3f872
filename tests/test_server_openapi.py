"""openapi.json against the routes that there are and the answers that they give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from deltaserve.server.app import create_app
from deltaserve.server.openapi import describe
from deltaserve.server.options import ServerOptions
from deltaserve.server.state import ServerState

OPTIONS = ServerOptions("model", ("model",), api_keys=("key",), enable_profiling=True)


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in item.keys() & {"get", "post"}:
            yield method, path, item[method]


@pytest.mark.parametrize("profiling", [False, True])
def test_the_routes_are_those_of_the_application(profiling: bool) -> None:
    options = ServerOptions("model", ("model",), enable_profiling=profiling)
    state = ServerState(engine=None, options=options, created=0)  # type: ignore[arg-type]
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in create_app(state).routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    documented = {(method, path) for method, path, _ in operations(describe(options))}
    assert documented == routes


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_reference_leads_to_a_schema_and_every_schema_is_used() -> None:
    document = describe(OPTIONS)
    names = {reference.removeprefix("#/components/schemas/") for reference in references(document)}
    assert names == set(document["components"]["schemas"])


def test_usage_has_its_details() -> None:
    schemas = describe(OPTIONS)["components"]["schemas"]
    prefix = "#/components/schemas/"
    for name, detail in (("prompt", "cached_tokens"), ("completion", "reasoning_tokens")):
        details = schemas["Usage"]["properties"][f"{name}_tokens_details"]
        assert schemas[details["$ref"].removeprefix(prefix)]["required"] == [detail]
        assert f"{name}_tokens_details" not in schemas["Usage"]["required"]


def test_every_error_has_the_one_shape() -> None:
    for _, _, operation in operations(describe(OPTIONS)):
        for status, response in operation["responses"].items():
            if status != "200":
                schema = response["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/Error"}


def test_keys_are_asked_for_where_the_server_asks() -> None:
    with_keys = {
        path for _, path, operation in operations(describe(OPTIONS)) if "security" in operation
    }
    assert with_keys == {
        path
        for _, path, operation in operations(describe(OPTIONS))
        if "401" in operation["responses"]
    }
    assert {
        path for path in with_keys if not re.match("/(v1|(de)?token|st(art|op)_)", path)
    } == set()
    without = describe(ServerOptions("model", ("model",)))
    assert not any("401" in operation["responses"] for _, _, operation in operations(without))


def test_bodies_bring_their_statuses() -> None:
    for _, _, operation in operations(describe(OPTIONS)):
        assert ("413" in operation["responses"]) == ("requestBody" in operation)
        assert ("415" in operation["responses"]) == ("requestBody" in operation)
