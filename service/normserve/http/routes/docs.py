"""The OpenAPI description of the application, as Swagger UI 4 reads it."""

import re
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from normserve.errors import InvalidShapeError
from normserve.http.routes.scopes import RouteScopes
from normserve.problems import document

# Swagger UI 4 refuses 3.1, of which nothing here makes use.
OPENAPI_VERSION = "3.0.3"

_EXAMPLE = document(InvalidShapeError("x [2, 1024] needs weight [1024], got [768]"), "6f1c…")
_TYPES = {str: "string", int: "integer"}
_PROBLEM = {
    "type": "object",
    "properties": {name: {"type": _TYPES[type(value)]} for name, value in _EXAMPLE.items()},
    "required": list(_EXAMPLE),
}

_KEY_SCHEME = {"type": "http", "scheme": "bearer", "description": "The API key."}


def describe(app: FastAPI, scopes: RouteScopes | None) -> Callable[[], dict[str, Any]]:
    """What makes the application's description, once.

    Args:
        scopes: what asks for an API key; None where nothing does.
    """
    app.openapi_version = OPENAPI_VERSION
    make = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            description = make()
            _complete(description)
            if scopes is not None:
                _ask_for_key(description, scopes)
        return make()

    return described


def _complete(description: dict[str, Any]) -> None:
    """Name each operation once, and say what errors look like."""
    description.setdefault("components", {}).setdefault("schemas", {})["Problem"] = _PROBLEM
    answer = {"$ref": "#/components/schemas/Problem"}
    content = {"application/problem+json": {"schema": answer, "example": _EXAMPLE}}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            words = [word for word in re.split(r"[^A-Za-z0-9]+", path) if word]
            operation["operationId"] = "_".join([method, *words])
            responses = operation.setdefault("responses", {})
            # What FastAPI says of parameters that it checks itself, of which there are none.
            responses.pop("422", None)
            responses["default"] = {"description": "An error, as RFC 9457 describes it.", "content": content}


def _ask_for_key(description: dict[str, Any], scopes: RouteScopes) -> None:
    description.setdefault("components", {})["securitySchemes"] = {"key": _KEY_SCHEME}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            if scopes.ask_for_key(method.upper(), path):
                operation["security"] = [{"key": []}]
