"""The access log of clients that share memory: the same line as over HTTP, for each completed message."""

import logging

from normserve.admission.callers import Caller
from normserve.metrics.requests import NONE, RequestRecord
from normserve.traces.parent import log_fields

_log = logging.getLogger("normserve.access")


def note(record: RequestRecord, caller: Caller, request_id: str) -> None:
    """Log a message that has ended and been observed, by what it asked for."""
    fields = {
        "method": record.transport,
        "path": record.op if record.direction == NONE else f"{record.op}/{record.direction}",
        "status": record.status,
        "key": caller.key or "-",
        "address": caller.address,
        "received_bytes": record.received,
        "sent_bytes": record.sent,
        "ms": round(record.seconds * 1000, 3),
        **log_fields(request_id, record.trace_id, {}),
    }
    _log.info("request", extra={"fields": fields})
