"""Requests that failed because of an error in the server: one line each, with the id of the response."""

import logging
from collections.abc import Mapping

_log = logging.getLogger("normserve.failures")


def log_failure(detail: str, fields: Mapping[str, object]) -> None:
    """Log that a request was answered with an internal error.

    Args:
        detail: the text that the client gets.
        fields: identify the request.
    """
    _log.error("a request failed: %s", detail, extra={"fields": fields})
