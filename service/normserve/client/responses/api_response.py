"""A response to a call, over any transport, and the timing in its headers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normserve.client.errors import UnexpectedAnswerError
from normserve.client.quoting import sanitise_text
from normserve.client.responses.api_errors import parse_strict_json
from normserve.client.results import Timing
from normserve.codec import safetensors
from normserve.codec.media_types import CANONICAL, SAFETENSORS
from normserve.codec.safetensors import SafetensorsEntry
from normserve.errors import NormserveError
from normserve.memory.tensors import HostTensor

# Types that a message may name: those of servers that are none of ours.
_FAMILIAR = ("text/html", "text/plain", "application/json", "application/problem+json", "application/x-npy")


@dataclass(frozen=True, slots=True)
class ApiResponse:
    """A completely received response to a call, over any transport.

    Attributes:
        status: as in HTTP, for every transport.
        headers: values by header name in lower case.
        body: a buffer of its own; tensors that are read from the body are views.
    """

    status: int
    headers: Mapping[str, str]
    body: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of the body."""
        return len(self.body)

    def list_payload_buffers(self) -> list[memoryview]:
        """Return the buffers that hold the body."""
        return [self.body]

    def parse_json(self) -> Any:
        """Parse the body as JSON.

        Raises:
            UnexpectedAnswerError: it is not.
        """
        try:
            return parse_strict_json(bytes(self.body))
        except ValueError:
            raise UnexpectedAnswerError("the answer must be JSON, it is not") from None

    def parse_object(self) -> dict[str, Any]:
        """Parse the body as a JSON object.

        Raises:
            UnexpectedAnswerError: it is not.
        """
        found = self.parse_json()
        if not isinstance(found, dict):
            raise UnexpectedAnswerError("the answer must be a JSON object, it is not")
        return found

    def read_tensors(self) -> dict[str, HostTensor]:
        """Return the tensors in the body, as views of the body.

        Raises:
            UnexpectedAnswerError: it holds none that the codec can read.
        """
        media_type = _parse_media_type(self.headers.get("content-type", ""))
        if CANONICAL.get(media_type) != SAFETENSORS:
            got = media_type if media_type in _FAMILIAR else "something else"
            raise UnexpectedAnswerError(f"the answer must be {SAFETENSORS}, got {got}")
        try:
            return {entry.name: entry.view_result(self.body) for entry in _read_entries(self.body)}
        except NormserveError as error:
            raise UnexpectedAnswerError(f"the answer is not well-formed safetensors: {error.detail}") from error

    def read_timing(self) -> Timing:
        """Return the timing that the headers describe; a header with an invalid value counts as absent."""
        get_header = self.headers.get
        return Timing.later(
            _parse_timing,
            (
                get_header("server-timing", ""),
                get_header("x-kernel-bytes"),
                get_header("x-kernel-bandwidth"),
                get_header("x-batch-size"),
                get_header("x-request-id"),
            ),
        )


def _parse_timing(
    stages: str, kernel_bytes: str | None, bandwidth: str | None, batch_size: str | None, request_id: str | None
) -> tuple[dict[str, float], int, float, int, str]:
    """Parse the timing headers to the fields of `Timing`, in order; invalid values become defaults."""
    return (
        _parse_server_timing(stages),
        _parse_whole(kernel_bytes, 0),
        _parse_nonnegative(bandwidth) or 0.0,
        max(1, _parse_whole(batch_size, 1)),
        sanitise_text(request_id, 128),
    )


def _parse_media_type(content_type: str) -> str:
    """Return the media type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


# Identical requests have responses with identical safetensors headers.
_MAX_CACHED, _MAX_CACHED_BYTES = 256, 1024


def _read_entries(body: memoryview) -> Sequence[SafetensorsEntry]:
    """Validate the safetensors header of a body and return its entries, one for each tensor.

    Entries of short headers are cached, because identical requests have responses with identical headers.

    Raises:
        NormserveError: it is no well-formed safetensors.
    """
    end = 8 + int.from_bytes(body[:8], "little")
    if end > min(len(body), _MAX_CACHED_BYTES):
        return safetensors.read_entries(body)
    key = bytes(body[:end]), len(body)
    entries = _cached_entries.get(key)
    if entries is None:
        entries = safetensors.read_entries(body)
        if len(_cached_entries) >= _MAX_CACHED:
            _cached_entries.clear()
        _cached_entries[key] = entries
    return entries


_cached_entries: dict[tuple[bytes, int], Sequence[SafetensorsEntry]] = {}

# The form in which normserve writes the header; other forms take longer to parse.
_STAGES = ("recv", "queue", "copy_in", "kernel", "copy_out")
_DURATIONS = re.compile(", ".join([rf"{stage};dur=([0-9]{{1,15}}\.[0-9]{{1,15}})" for stage in _STAGES]))


def _parse_server_timing(server_timing: str) -> dict[str, float]:
    """Parse a Server-Timing header to milliseconds by stage; entries without a valid duration are left out."""
    if found := _DURATIONS.fullmatch(server_timing):
        return dict(zip(_STAGES, map(float, found.groups()), strict=True))
    stages = {}
    for metric in server_timing.split(","):
        name, *parameters = (part.strip() for part in metric.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key == "dur" and (duration_ms := _parse_nonnegative(value)) is not None:
                stages[sanitise_text(name, 64)] = duration_ms
    return stages


def _parse_whole(text: str | None, default: int) -> int:
    """Parse a whole number of at most 18 digits; return the default for anything else."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 19 else default


def _parse_nonnegative(text: str | None) -> float | None:
    """Parse a finite number that is not negative; return None for anything else."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
