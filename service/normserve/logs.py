"""Logging: one format, to stderr."""

import logging

_FORMAT = "%(asctime)s %(levelname)-8s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log the server's own words from `level` on, and the HTTP library's from warning on."""
    logging.basicConfig(format=_FORMAT, level=level.upper())
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
