"""Validation of a request's header fields before anything else uses them."""

from collections.abc import Mapping

from normserve.errors import MalformedHttpError, NormserveError, UnsupportedTransferEncodingError

SINGULAR = frozenset({b"authorization", b"content-length", b"host", b"transfer-encoding"})
"""Fields that must not be repeated, as two parsers of one header could see different requests."""


def find_head_fault(version: str, singular: Mapping[bytes, bytes]) -> NormserveError | None:
    """Return the error of a request that the parser accepts but the server refuses; None if it is valid.

    Args:
        version: the HTTP version, as in "1.1".
        singular: the request's fields that may appear once, by lower-case name.
    """
    if version != "1.1" and version != "1.0":
        return MalformedHttpError("this server speaks HTTP/1.1 and HTTP/1.0")
    if b"host" not in singular and version == "1.1":
        return MalformedHttpError("an HTTP/1.1 request must have a Host field")
    coding = singular.get(b"transfer-encoding")
    if coding is None:
        return None
    if version == "1.0" or b"content-length" in singular:
        return MalformedHttpError("Transfer-Encoding is allowed in HTTP/1.1 only, and not with Content-Length")
    coding = coding.lower()
    if coding.rpartition(b",")[2].strip(b" \t") != b"chunked":
        return MalformedHttpError("the last transfer coding must be chunked, which marks the end of the body")
    if coding != b"chunked":
        return UnsupportedTransferEncodingError("the only supported transfer coding is chunked")
    return None


def parse_body_length(singular: Mapping[bytes, bytes]) -> int | None:
    """Return the announced body length of a valid request, in bytes; None if the body is chunked."""
    if b"transfer-encoding" in singular:
        return None
    return int(singular.get(b"content-length", 0))
