"""What fuzzing runs on each input: whatever a stranger sends is understood as others understand it, or refused.

A harness takes the input's bytes.  It may raise nothing: errors of `normserve.errors` are refusals, which is what
hostile input should meet; any other exception is a fault.
"""

import contextlib
import io
import warnings
from collections.abc import Callable
from types import MappingProxyType

import numpy as np
import safetensors
from normserve.codec import npy as npy_codec
from normserve.codec import safetensors as safetensors_codec
from normserve.errors import InvalidParameterError, NormserveError
from normserve.http.routes.format_negotiation import AcceptHeader, detect_format, parse_declared_format
from normserve.jobs.job import Op, PassDirection
from normserve.requests.request_parameters import list_operation_parameters, make_spec, parse_query

from tests.fuzz.local_frames import local_frames
from tests.fuzz.local_replies import local_replies
from tests.fuzz.sibling_frames import sibling_frames
from tests.fuzz.streams import cut, run
from tests.service.http.transport.drive import Answer, drive

_NUMPY_HEADER_BYTES = 10_000


def safetensors_payload(data: bytes) -> None:
    """What the strict parser accepts, the usual library reads as the same tensors, and it survives a round trip."""
    try:
        tensors = safetensors_codec.decode(memoryview(data))
    except NormserveError:
        return
    expected = dict(safetensors.deserialize(data))
    assert expected.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert tuple(expected[name]["shape"]) == tensor.shape
        assert bytes(expected[name]["data"]) == bytes(tensor.data)
        assert tensor.data.nbytes == tensor.nbytes
    again = safetensors_codec.decode(memoryview(b"".join(safetensors_codec.encode(tensors))))
    assert {name: (each.shape, bytes(each.data)) for name, each in again.items()} == {
        name: (each.shape, bytes(each.data)) for name, each in tensors.items()
    }


def npy_payload(data: bytes) -> None:
    """What the grammar accepts, numpy reads as the same array, and it survives a round trip."""
    try:
        tensor = npy_codec.decode(memoryview(data))
    except NormserveError:
        return
    if len(data) - tensor.nbytes <= _NUMPY_HEADER_BYTES:
        with warnings.catch_warnings():
            # Of sizes such as 4L.
            warnings.filterwarnings("ignore", message=".*created on Python 2")
            expected = np.load(io.BytesIO(data), allow_pickle=False)
        assert expected.shape == tensor.shape
        assert expected.tobytes("F" if tensor.fortran_order else "C") == bytes(tensor.data)
    if not tensor.fortran_order:
        again = npy_codec.decode(memoryview(b"".join(npy_codec.encode(tensor))))
        assert (again.shape, bytes(again.data)) == (tensor.shape, bytes(tensor.data))


def query(data: bytes) -> None:
    """A query string is an operation or is refused; the same one is the same operation."""
    op = list(Op)[data[0] % len(Op)] if data else Op.LAYER_NORM
    direction = op.passes[-1] if data[:1] and data[0] & 128 else PassDirection.FORWARD
    parameters = list_operation_parameters(op, direction)
    with contextlib.suppress(InvalidParameterError):
        spec = make_spec(op, direction, parse_query(data[1:], parameters))
        assert hash(spec) == hash(make_spec(op, direction, parse_query(data[1:], parameters)))
        assert spec.eps > 0
        assert 0 <= spec.dropout < 1
        assert spec.num_groups >= 0


def headers(data: bytes) -> None:
    """Content-Type, Content-Encoding and Accept, one a line, and a body's first bytes."""
    content_type, _, rest = data.partition(b"\n")
    content_encoding, _, rest = rest.partition(b"\n")
    accept, _, body = rest.partition(b"\n")
    with contextlib.suppress(NormserveError):
        declared = parse_declared_format(content_type.decode("latin-1"), content_encoding.decode("latin-1"))
        request_format = declared or detect_format(memoryview(body))
        assert AcceptHeader(accept.decode("latin-1")).choose_format(request_format) in (
            "application/x-safetensors",
            "application/x-npy",
        )


def http(data: bytes) -> None:
    """A connection's bytes become the same requests and answers however they are cut; no answer is a 500."""
    pieces, stream, options = cut(data)
    ends = bool(options & 2)
    whole = run(drive([stream], ends=ends))
    assert not any(isinstance(each, Answer) and each.status == 500 for each in whole)
    assert run(drive(pieces, settles=bool(options & 1), ends=ends)) == whole


_ALL = (safetensors_payload, npy_payload, query, headers, http, sibling_frames, local_frames, local_replies)


HARNESSES: MappingProxyType[str, Callable[[bytes], None]] = MappingProxyType({each.__name__: each for each in _ALL})
