"""Definitions that both clients share."""

import inspect
from collections.abc import Callable
from typing import Any, get_args

DEFAULT_URL = "http://127.0.0.1:8000"


def copy_signature(method: Callable[..., Any], build: Callable[..., Any]) -> None:
    """Give a client's method the name, docstring and signature of the function that builds its call."""
    signature = inspect.signature(build)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__name__ = build.__name__
    method.__doc__ = build.__doc__
    (result,) = get_args(signature.return_annotation)
    vars(method)["__signature__"] = signature.replace(
        parameters=[itself, *signature.parameters.values()], return_annotation=result
    )
