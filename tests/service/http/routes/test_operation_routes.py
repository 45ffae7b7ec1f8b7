"""What is known of a payload's header changes nothing but the time that it takes."""

import gc
import io
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from normserve.admission.client_identity import ClientIdentity
from normserve.codec import safetensors
from normserve.codec.media_types import NPY, SAFETENSORS
from normserve.errors import InvalidShapeError, NormserveError, OverloadedError
from normserve.http.routes import operation_routes
from normserve.http.routes.format_negotiation import AcceptHeader
from normserve.http.routes.operation_routes import OperationEndpoint, OperationHead
from normserve.jobs.job import NormSpec, Op, PassDirection
from normserve.memory.tensors import DType, HostTensor
from normserve.metrics.metrics import Metrics
from normserve.requests.prepared_calls import PreparedCallCache

from tests.service.jobs.fake_jobs import layer, tensor

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def npy(array=X, version=(1, 0)) -> bytearray:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return bytearray(file.getvalue())


def packed(**tensors: HostTensor) -> bytearray:
    return bytearray().join(safetensors.encode(tensors))


def head(body_format: str | None = None, **asked: object) -> OperationHead:
    spec = NormSpec(**{"op": Op.LAYER_NORM, "direction": PassDirection.FORWARD, "eps": 1e-5} | asked)
    return OperationHead(spec, None, body_format, AcceptHeader(""), None, is_form=False)


def no_copy(nbytes: int) -> None:
    raise AssertionError(nbytes)


def operation(max_bytes: int = 2**20) -> OperationEndpoint:
    prepared = PreparedCallCache(max_bytes, Metrics().get_prepared_call_counters("process"))
    return OperationEndpoint(None, None, prepared, Op.LAYER_NORM, PassDirection.FORWARD)


OPERATION = operation()


def sender(charge_copy=no_copy, address: str = "here") -> SimpleNamespace:
    return SimpleNamespace(client_identity=ClientIdentity(address), charge_body_copy=charge_copy)


def made(asked: OperationHead, body, of_layer=None, charge_copy=no_copy) -> tuple:
    return OPERATION.make_job(asked, memoryview(body), of_layer, sender(charge_copy))


def outcome(asked: OperationHead, body: bytearray, of_layer=None) -> tuple:
    """All that is made of a body, or what is wrong with it."""
    try:
        job, cost, told = made(asked, body, of_layer)
    except NormserveError as error:
        return type(error), error.detail
    tensors = {
        name: (each.dtype, each.shape, each.fortran_order, bytes(each.data)) for name, each in job.tensors.items()
    }
    return job.spec, tensors, job.layer, job.may_overwrite, job.nbytes, job.rows, job.unit_rows, cost, told


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
    job, _, _ = made(asked, npy(X + 1))
    np.testing.assert_array_equal(np.frombuffer(job.x.data, np.float32).reshape(3, 4), X + 1)


def test_it_is_not_parsed_again(monkeypatch):
    asked = head()
    first = outcome(asked, npy())
    monkeypatch.setattr("normserve.http.routes.operation_routes.parse_payload", no_copy)
    assert outcome(asked, npy()) == first


def test_memory_that_may_not_be_written_over_is_not():
    asked = head()
    outcome(asked, npy())
    job, _, _ = made(asked, bytes(npy()))
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


@pytest.mark.parametrize("has_residual", [True, False])
def test_several_tensors_are_joined_and_charged_each_time(has_residual):
    """Where another tensor lies between them, they are copied."""
    asked, charged = head(), []
    between = {"residual.0": tensor(1, 4), "residual.1": tensor(2, 4)} if has_residual else {}
    ordered = sorted({"x.0": tensor(1, 4), "x.1": tensor(2, 4), **between}.items(), key=lambda each: each[0][-1])
    body = packed(**dict(ordered))
    for _ in range(2):
        job, _, told = made(asked, body, charge_copy=charged.append)
        assert (job.x.shape, told.tensor_split.counts) == ((3, 4), (1, 2))
    assert charged == ([48, 48] * 2 if has_residual else [])


def test_a_copy_is_refused_each_time():
    asked = head()
    body = packed(
        **{"x.0": tensor(1, 4), "residual.0": tensor(1, 4), "x.1": tensor(2, 4), "residual.1": tensor(2, 4)}
    )
    made(asked, body, charge_copy=lambda nbytes: None)

    def refuse(nbytes: int) -> None:
        raise OverloadedError("not now")

    with pytest.raises(OverloadedError):
        made(asked, body, charge_copy=refuse)


def test_payloads_with_long_headers_are_kept_within_their_bytes(monkeypatch):
    here, parsed = operation(2**20), []
    parse_payload = operation_routes.parse_payload
    monkeypatch.setattr(operation_routes, "parse_payload", lambda *given: parsed.append(1) or parse_payload(*given))
    asked = head()

    def ask(number: int, address: str) -> None:
        metadata = {"__metadata__": {"number": f"{number:04}" + "x" * 5000}}
        text = json.dumps(metadata | {"x": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}).encode()
        body = len(text).to_bytes(8, "little") + text + bytes(48)
        here.make_job(asked, memoryview(bytearray(body)), None, sender(address=address))
        assert here.prepared_calls.nbytes <= 2**20

    ask(0, "mine")
    for number in range(1, 200):
        ask(number, "hostile")
    assert here.prepared_calls.nbytes > 2**19
    assert len(parsed) == 200
    ask(0, "mine")
    ask(199, "hostile")
    assert len(parsed) == 200
    ask(1, "hostile")
    assert len(parsed) == 201


def test_heads_are_kept_for_each_tenant(monkeypatch):
    here, parsed = operation(2**20), []
    parse_query = operation_routes.parse_query
    monkeypatch.setattr(operation_routes, "parse_query", lambda *given: parsed.append(1) or parse_query(*given))
    headers = {b"content-type": NPY.encode()}
    mine = here.prepare_head(b"eps=1", headers, "mine")
    for number in range(1000):
        here.prepare_head(b"eps=%d" % (number + 2), headers, "hostile")
    assert here.prepared_calls.nbytes <= 2**20
    assert len(parsed) == 1001
    assert here.prepare_head(b"eps=1", headers, "mine") is mine
    assert here.prepare_head(b"eps=1", {}, "mine") is not mine
    assert len(parsed) == 1002


def test_a_header_that_is_longer_than_the_codec_reads_is_no_key():
    text = b" " * 2**16
    assert operation_routes.get_cacheable_header(memoryview(len(text).to_bytes(8, "little") + text)) == b""
