"""The parent span of a request, from the header `traceparent` of W3C Trace Context."""

import re
from collections.abc import Mapping
from typing import NamedTuple

# The version, trace id, span id and flags; later versions append fields after another hyphen.
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_SAMPLED = 0x01
_LONGEST_STATE = 512


class ParentSpan(NamedTuple):
    """The client's span that a request belongs to, from the headers traceparent and tracestate.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 of them.
        is_sampled: the sender records its own spans of this trace.
        state: the header `tracestate`, or an empty string.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str


def make_log_fields(request_id: str, trace_id: str | None, headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the log fields that identify a request: its id and, if it has one, its trace id.

    Args:
        trace_id: the id of the request's trace if it is traced here; if None, that of its headers is used.
    """
    if trace_id is None and (parent := parse_parent(headers)) is not None:
        trace_id = parent.trace_id
    return {"request_id": request_id} if trace_id is None else {"request_id": request_id, "trace_id": trace_id}


def parse_parent(headers: Mapping[bytes, bytes]) -> ParentSpan | None:
    """Parse the client's span from a request's headers; return None if traceparent is missing or invalid.
    Header names are in lower case.
    """
    given = headers.get(b"traceparent")
    found = None if given is None else _TRACEPARENT.fullmatch(given.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    is_known = version == b"00" and more is None
    if not (is_known or b"00" < version < b"ff") or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = headers.get(b"tracestate", b"")
    return ParentSpan(
        trace_id.decode(),
        span_id.decode(),
        bool(int(flags, 16) & _SAMPLED),
        state.decode("latin-1") if len(state) <= _LONGEST_STATE else "",
    )
