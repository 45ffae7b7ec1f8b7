"""The access log: one line for each completed request of any transport, with the logger `normserve.access`."""

import logging
from collections.abc import Mapping

from normserve.admission.client_identity import ClientIdentity
from normserve.metrics.request_metrics import RequestRecord

_log = logging.getLogger("normserve.access")


def log_request(
    method: str, path: str, record: RequestRecord, caller: ClientIdentity, named: Mapping[str, str]
) -> None:
    """Log a request that has ended and been observed.

    Args:
        path: a template or an operation, because clients can send any path.
        named: the log fields that identify the request.
    """
    fields = {
        "method": method,
        "path": path,
        "status": record.status,
        "key": caller.key or "-",
        "address": caller.address,
        "received_bytes": record.received_bytes,
        "sent_bytes": record.sent_bytes,
        "ms": round(record.duration_s * 1000, 3),
        **named,
    }
    _log.info("request", extra={"fields": fields})
