"""What is known of a payload's header changes nothing but the time that it takes."""

import gc
import io
import weakref

import numpy as np
import pytest
from normserve.codec import safetensors
from normserve.codec.media_types import NPY, SAFETENSORS
from normserve.errors import InvalidShapeError, NormserveError
from normserve.http.routes import payloads
from normserve.http.routes.negotiation import Accepted
from normserve.http.routes.operations import Head
from normserve.jobs.job import NormSpec, Op, Pass
from normserve.memory.host_tensors import DType, HostTensor

from tests.service.jobs.fake_jobs import layer, tensor

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def npy(array=X, version=(1, 0)) -> bytearray:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return bytearray(file.getvalue())


def packed(**tensors: HostTensor) -> bytearray:
    return bytearray().join(safetensors.encode(tensors))


def head(body_format: str | None = None, **asked: object) -> Head:
    spec = NormSpec(**{"op": Op.LAYER_NORM, "direction": Pass.FORWARD, "eps": 1e-5} | asked)
    return Head(spec, None, body_format, Accepted(""), None, is_form=False)


def no_copy(nbytes: int) -> None:
    raise AssertionError(nbytes)


def outcome(asked: Head, body: bytearray, of_layer=None) -> tuple:
    """All that is made of a body, or what is wrong with it."""
    try:
        job, cost, told = asked.with_body(memoryview(body), of_layer, no_copy)
    except NormserveError as error:
        return type(error), error.detail
    tensors = {
        name: (each.dtype, each.shape, each.fortran_order, bytes(each.data)) for name, each in job.tensors.items()
    }
    return job.spec, tensors, job.layer, job.may_overwrite, job.nbytes, job.rows, job.heads, cost, told


VALID = [
    npy(),
    npy(version=(2, 0)),
    npy(np.asfortranarray(X)),
    npy(np.zeros((0, 4), np.float32)),
    packed(x=tensor(3, 4)),
    packed(x=tensor(3, 4), weight=tensor(4), bias=tensor(4)),
    packed(x=tensor(3, 4, dtype=DType.BFLOAT16)),
]


def changed(body: bytearray):
    """A body with each byte of its header changed, and with less and more data."""
    yield from (body, body, body[:-1], body + b"\0", body[:7], bytearray())
    for place in range(min(len(body), 160)):
        for change in (1, 32):
            yield body[:place] + bytes([body[place] ^ change]) + body[place + 1 :]
    yield body


@pytest.mark.parametrize("declared", [None, NPY, SAFETENSORS])
@pytest.mark.parametrize("number", range(len(VALID)))
def test_a_payload_is_the_same_whether_known_or_not(number, declared):
    kept = head(declared)
    for body in changed(VALID[number]):
        assert outcome(kept, body) == outcome(head(declared), body)


def test_the_next_data_are_its_own():
    asked = head()
    outcome(asked, npy())
    job, _, _ = asked.with_body(memoryview(npy(X + 1)), None, no_copy)
    np.testing.assert_array_equal(np.frombuffer(job.x.data, np.float32).reshape(3, 4), X + 1)


def test_it_is_not_parsed_again(monkeypatch):
    asked = head()
    first = outcome(asked, npy())
    monkeypatch.setattr("normserve.http.routes.operations.entries_of", no_copy)
    assert outcome(asked, npy()) == first


def test_memory_that_may_not_be_written_over_is_not():
    asked = head()
    outcome(asked, npy())
    job, _, _ = asked.with_body(memoryview(bytes(npy())), None, no_copy)
    assert not job.may_overwrite


def test_a_layer_that_took_anothers_place_is_checked_anew():
    asked, body = head(), npy()
    assert outcome(asked, body, layer("a", 4))[0] == asked.spec
    assert outcome(asked, body, layer("a", 4, eps=0.5))[0].eps == 0.5
    assert outcome(asked, body, layer("a", 5))[0] is InvalidShapeError
    assert outcome(asked, body, layer("a", 4))[0] == asked.spec


def test_a_layer_that_is_gone_is_not_held():
    asked, of_layer = head(), layer("a", 4)
    outcome(asked, npy(), of_layer)
    gone = weakref.ref(of_layer)
    del of_layer
    gc.collect()
    assert gone() is None


def test_several_tensors_are_joined_each_time():
    asked, charged = head(), []
    body = packed(**{"x.0": tensor(1, 4), "x.1": tensor(2, 4)})
    for _ in range(2):
        job, _, told = asked.with_body(memoryview(body), None, charged.append)
        assert (job.x.shape, told.several.counts) == ((3, 4), (1, 2))


def test_no_more_is_kept_than_so_much():
    known, body = payloads.KnownPayloads(), memoryview(npy())
    entries = payloads.entries_of(body, NPY)
    made = head().with_body(body, None, no_copy)
    for number in range(3000):
        known.keep(number, body, entries, *made)
        assert known.job(number, body, None) is not None
        assert len(known._known) <= 1024
    long = packed(x=tensor(1, 4), **{f"scale{number}": tensor(1) for number in range(20)})
    assert payloads.payload_header(memoryview(long)) == b""
