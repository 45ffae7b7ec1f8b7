"""Logging: one format, to stderr."""

import logging

_FORMAT = "%(asctime)s %(levelname)-8s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Log the server's own words from `level` on; of the HTTP library's only errors.

    It warns of each malformed request, and strangers shall not fill the log.
    """
    logging.basicConfig(format=_FORMAT, level=level.upper())
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
