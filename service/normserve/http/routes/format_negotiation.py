"""The format of a request and of its response: npy or safetensors."""

from normserve.codec.media_types import (
    CANONICAL,
    NPY,
    SAFETENSORS,
    UNTYPED,
    detect_binary_media_type,
    suggest_media_type,
    suggest_supported_format,
)
from normserve.errors import (
    MalformedPayloadError,
    NormserveError,
    NotAcceptableError,
    UnsupportedMediaTypeError,
)
from normserve.http.body_reader import require_uncompressed
from normserve.http.curl import add_curl_hint

# A safetensors file begins with the length of its header in 8 bytes, the most significant last.
_LENGTH_END = 8


def parse_declared_format(content_type: str, content_encoding: str) -> str | None:
    """Return the format that the headers declare; None if the body's first bytes decide.

    Raises:
        UnsupportedMediaTypeError: the format is not supported, or the body is compressed.
    """
    require_uncompressed(content_encoding)
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in UNTYPED:
        return None
    if media_type not in CANONICAL:
        raise UnsupportedMediaTypeError(
            f"the body must be {SAFETENSORS} or {NPY}, got {media_type[:100]!r}; {suggest_media_type(media_type)}"
        )
    return CANONICAL[media_type]


def detect_format(body: memoryview) -> str:
    """Detect the format of an undeclared body from its first bytes.

    Raises:
        MalformedPayloadError: there is no body.
        UnsupportedMediaTypeError: the body has neither format.
    """
    if not body:
        raise MalformedPayloadError("the body must be safetensors or npy, got none")
    media_type = detect_binary_media_type(body)
    if media_type is None:
        what = suggest_supported_format(body) or "neither"
        raise UnsupportedMediaTypeError(f"the body must be {SAFETENSORS} or {NPY}, its first bytes show {what}")
    return media_type


def add_hints(error: NormserveError, body: memoryview, declared: str | None, *, is_form: bool) -> NormserveError:
    """Add hints to an error about an unreadable body, from the body's first bytes; return the new error.

    Args:
        declared: the format of Content-Type; None if it has none.
        is_form: whether Content-Type is that of a form, which is curl's default.
    """
    found = detect_binary_media_type(body)
    if found == SAFETENSORS and body[_LENGTH_END - 1]:
        # Probably text: as the length of a header these bytes would be more than 2^56.
        found = None
    what = "" if found else suggest_supported_format(body)
    detail = error.detail
    # A reader's own error comes last: it says little of a body in another format.
    if what and isinstance(error, MalformedPayloadError):
        detail = f"the body's first bytes show {what}; {detail}"
    if declared and found and found != declared:
        detail = f"Content-Type says {declared}, the body's first bytes show {found}; {detail}"
    return add_curl_hint(type(error)(detail), body) if is_form and not what else type(error)(detail)


class AcceptHeader:
    """The media types that a client accepts, with their weights, from its Accept header."""

    def __init__(self, accept: str) -> None:
        self._weights: dict[str, float] = {}
        for item in accept.split(","):
            media_range, *arguments = (part.strip().lower() for part in item.split(";"))
            if media_range:
                self._weights[CANONICAL.get(media_range, media_range)] = _parse_weight(arguments)

    def choose_format(self, request_format: str) -> str:
        """Choose the format of the response to a request in `request_format`, which is preferred in a tie.

        Raises:
            NotAcceptableError: the client accepts neither format.
        """
        if not self._weights:
            return request_format
        other = NPY if request_format == SAFETENSORS else SAFETENSORS
        best = max((request_format, other), key=self._find_weight)
        if self._find_weight(best) <= 0:
            raise NotAcceptableError(f"answers are {SAFETENSORS} or {NPY}, the Accept header takes neither")
        return best

    def _find_weight(self, media_type: str) -> float:
        """Return the weight of a media type, by the most specific range that matches; 0 if none does."""
        for candidate in (media_type, "application/*", "*/*"):
            if candidate in self._weights:
                return self._weights[candidate]
        return 0.0


def is_preferred(header_value: str, media_type: str, default: str) -> bool:
    """Return whether an Accept or Accept-Encoding header prefers `media_type` to `default`.

    The header must name it, with at least the weight of `default`.
    """
    weights = {media_type: 0.0, default: 0.0}
    for item in header_value.split(","):
        named, *arguments = (part.strip().lower() for part in item.split(";"))
        if named in weights:
            # Of several versions, the highest weight counts.
            weights[named] = max(weights[named], _parse_weight(arguments))
    return weights[media_type] > 0 and weights[media_type] >= weights[default]


def _parse_weight(arguments: list[str]) -> float:
    """Return the weight `q` among a media range's parameters: 1 without one, 0 for an invalid one."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name.strip() == "q":
            try:
                return min(1.0, max(0.0, float(value)))
            except ValueError:
                return 0.0
    return 1.0
