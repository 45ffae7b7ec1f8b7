"""What was found out about a payload, for those that follow with the same header."""

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, Protocol

from normserve.codec import npy, safetensors
from normserve.codec.media_types import NPY
from normserve.jobs.job import Layer, NormJob, NormSpec
from normserve.jobs.memory_cost import MemoryCost
from normserve.memory.host_tensors import HostTensor
from normserve.requests.several import Several

# Payloads that are known, and the bytes of their headers.
_MOST_KNOWN, _LONGEST_KNOWN = 1024, 512

_NPY_START = b"\x93NUMPY\x01\x00"
_NPY_LENGTH_END, _SAFETENSORS_LENGTH_END = 10, 8


class Entry(Protocol):
    """One tensor as the payload's header describes it, its place checked."""

    def tensor(self, body: memoryview) -> HostTensor:
        """The tensor as a view of the body."""


class Told(NamedTuple):
    """The form of a response.

    Attributes:
        media_type: of the response.
        several: how results are divided if x was sent as several tensors.
    """

    media_type: str
    several: Several | None


class _Known(NamedTuple):
    """What a payload's header leads to, with this layer."""

    entries: Mapping[str, Entry]
    layer: Callable[[], Layer | None]
    spec: NormSpec
    cost: MemoryCost
    told: Told


class KnownPayloads:
    """Payloads by all that decides what is made of them, beside the tensors' data and the layer's parameters."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, bytes, int], _Known] = {}

    def job(self, head: Hashable, body: memoryview, layer: Layer | None) -> tuple[NormJob, MemoryCost, Told] | None:
        """What parsing and checking this body would give; None where the like of it is not known.

        Args: head: says the rest of the request.
        """
        known = self._known.get((head, payload_header(body), len(body)))
        if known is None or known.layer() is not layer:
            return None
        tensors = {name: entry.tensor(body) for name, entry in known.entries.items()}
        job = NormJob(known.spec, tensors, layer, may_overwrite=not body.readonly)
        return job, known.cost, known.told

    def keep(
        self,
        head: Hashable,
        body: memoryview,
        entries: Mapping[str, Entry],
        job: NormJob,
        cost: MemoryCost,
        told: Told,
    ) -> None:
        """Know this body, of which these were made, from now on."""
        header = payload_header(body)
        # Several tensors may have been copied.
        if not header or told.several is not None:
            return
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        # A layer that was removed gives its memory back.
        layer = _nothing if job.layer is None else weakref.ref(job.layer)
        self._known[head, header, len(body)] = _Known(entries, layer, job.spec, cost, told)


def entries_of(body: memoryview, body_format: str) -> Mapping[str, Entry]:
    """The tensors of a body.

    Raises:
        MalformedPayloadError, TooLargeError: as the formats' readers do.
    """
    if body_format == NPY:
        return {"x": npy.read_entry(body)}
    return {entry.name: entry for entry in safetensors.read_entries(body)}


def payload_header(body: memoryview) -> bytes:
    """A body up to its tensors' data; empty where that is long, or not clear without more parsing."""
    start = bytes(body[:_NPY_LENGTH_END])
    if start.startswith(_NPY_START):
        end = _NPY_LENGTH_END + int.from_bytes(start[_SAFETENSORS_LENGTH_END:], "little")
    else:
        end = _SAFETENSORS_LENGTH_END + int.from_bytes(start[:_SAFETENSORS_LENGTH_END], "little")
    return bytes(body[:end]) if end <= _LONGEST_KNOWN else b""


def _nothing() -> None:
    return None
