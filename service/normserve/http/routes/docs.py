"""The OpenAPI description of the application, as Swagger UI 4 reads it."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from normserve.http.routes.scopes import RouteScopes

# Swagger UI 4 refuses 3.1, of which nothing here makes use.
OPENAPI_VERSION = "3.0.3"

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
            if scopes is not None:
                _ask_for_key(description, scopes)
        return make()

    return described


def _ask_for_key(description: dict[str, Any], scopes: RouteScopes) -> None:
    description.setdefault("components", {})["securitySchemes"] = {"key": _KEY_SCHEME}
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            if scopes.ask_for_key(method.upper(), path):
                operation["security"] = [{"key": []}]
