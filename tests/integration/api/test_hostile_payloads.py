"""Payloads that lie: answered below 500, quickly, and the next plain request succeeds."""

import io
import json
import pickle
import struct
import zipfile
from urllib.parse import quote

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.harness.wire import NPY, SAFETENSORS, X, assert_alive, assert_problem, npy, packed, post


@pytest.fixture(autouse=True)
def alive_afterwards(api):
    yield
    assert_alive(api)


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def x_of(shape: object, begin: int, end: int, dtype: str = "F32") -> dict:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


BOMB = {f"t{index}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for index in range(65)}


def huge_bomb() -> bytes:
    """Made by the test that sends it: half a second that every collection would take."""
    entries = (b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % index for index in range(500_000))
    return safetensors(b"{" + b",".join(entries) + b"}")


LYING_SAFETENSORS = {
    "short": b"1234567",
    "length beyond the body": safetensors(x_of([1], 0, 4), b"1234", length=10_000),
    "length beyond the cap": safetensors(b"{" + b" " * 70_000, length=70_001),
    "length over 2^63": safetensors(x_of([1], 0, 4), b"1234", length=2**63 + 5),
    "more than 64 tensors": safetensors(BOMB),
    "half a million tensors": huge_bomb,
    "hole": safetensors(x_of([1], 4, 8), b"12345678"),
    "reversed": safetensors(x_of([1], 4, 0), b"1234"),
    "size": safetensors(x_of([2], 0, 4), b"1234"),
    "trailing": safetensors(x_of([1], 0, 4), b"12345"),
    "overflow": safetensors(x_of([2**40, 2**40], 0, 4), b"1234"),
    "overflow behind a zero": safetensors(x_of([2**40, 2**40, 0], 0, 0)),
    "negative": safetensors(x_of([-1], 0, 4), b"1234"),
    "float size": safetensors(x_of([1.0], 0, 4), b"1234"),
    "bool size": safetensors(x_of([True], 0, 4), b"1234"),
    "string size": safetensors(x_of(["1"], 0, 4), b"1234"),
    "rank 5000": safetensors(x_of([1] * 5000, 0, 4), b"1234"),
    "duplicate": safetensors(b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' * 2 + b"}"),
    "no brace": safetensors(b"\xef\xbb\xbf" + json.dumps(x_of([1], 0, 4)).encode(), b"1234"),
    "deep": safetensors(b'{"a":' * 10_000 + b"}" * 10_000),
    "bad utf-8": safetensors(b'{"\xff":1}'),
    "nan": safetensors(b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', b"1234"),
    "1e999": safetensors(b'{"x":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}', b"1234"),
}


@pytest.mark.parametrize("payload", LYING_SAFETENSORS.values(), ids=LYING_SAFETENSORS)
def test_lying_safetensors(api, payload):
    content = payload() if callable(payload) else payload
    response = post(api, content=content, content_type=SAFETENSORS)
    if response.status_code == 413:
        assert_problem(response, 413, "too_large")
    else:
        assert_problem(response, 400, "malformed_payload")


@pytest.mark.parametrize("dtype", ["F4", "F8_E4M3", "C64", "I32", "F64", "BOOL"])
def test_other_safetensors_dtypes(api, dtype):
    bits = {"F4": 4, "F8_E4M3": 8, "C64": 64, "I32": 32, "F64": 64, "BOOL": 8}[dtype]
    payload = safetensors(x_of([2, 4], 0, bits, dtype), bytes(bits))
    assert_problem(post(api, content=payload, content_type=SAFETENSORS), 422, "unsupported_dtype")


def npy_of(header: str, data: bytes = b"", version: bytes = b"\x01\x00", length: int | None = None) -> bytes:
    text = header.encode("latin-1")
    packing = "<H" if version == b"\x01\x00" else "<I"
    return b"\x93NUMPY" + version + struct.pack(packing, len(text) if length is None else length) + text + data


def header(shape: str, descr: str = "'<f4'", order: str = "False") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


LYING_NPY = {
    "objects": npy_of(header("(1,)", "'|O'"), pickle.dumps([1])),
    "structure": npy_of(header("(1,)", "[('a', '<f4')]"), b"1234"),
    "subarray": npy_of(header("(1,)", "('<f4', (2,))"), b"12345678"),
    "V0": npy_of(header("(1,)", "'|V0'")),
    "version 9": npy_of(header("(1,)"), b"1234", version=b"\x09\x00"),
    "long header": npy_of(header("(1,)"), b"1234", version=b"\x02\x00", length=0xFFFFFFF0),
    "nested parentheses": npy_of(header("(" * 5000 + ")" * 5000), b"1234"),
    "list": npy_of(header("[1]"), b"1234"),
    "terabytes": npy_of(header("(1000000, 1000000)"), b"1234"),
    "wraps to zero": npy_of(header("(4294967296, 4294967296)"), b""),
    "bools": npy_of(header("(True,)"), b"1234"),
    "too few": npy_of(header("(2,)"), b"1234"),
    "too many": npy_of(header("(1,)"), b"12345"),
    "code": npy_of("__import__('os').system('false')", b"1234"),
}


@pytest.mark.parametrize("payload", LYING_NPY.values(), ids=LYING_NPY)
def test_lying_npy(api, payload):
    assert_problem(post(api, content=payload, content_type=NPY), 400, "malformed_payload")


def test_big_endian_npy_is_not_misread(api):
    assert_problem(post(api, content=npy(X.astype(">f4"))), 422, "unsupported_dtype")


def archives() -> dict[str, bytes]:
    npz, saved, zipped = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.savez(npz, x=X)
    torch.save({"x": torch.from_numpy(X)}, saved)
    with zipfile.ZipFile(zipped, "w") as file:
        file.writestr("x", "y")
    return {
        "npz": npz.getvalue(),
        "torch.save": saved.getvalue(),
        "zip": zipped.getvalue(),
        "pickle": pickle.dumps({"x": [1.0]}),
    }


@pytest.mark.parametrize("kind", ["npz", "torch.save", "zip", "pickle"])
def test_archives_are_no_tensors(api, kind):
    assert_problem(post(api, content=archives()[kind], content_type="application/octet-stream"), 415)


def test_empty_body(api):
    assert_problem(post(api, content=b""), 400, "malformed_payload")
    assert_problem(post(api, content=b"", content_type="application/octet-stream"), 400)


def test_details_never_echo_the_payload(api):
    marker = b"s3cr3t-payload"
    for payload, declared in (
        (
            safetensors({marker.decode() + "!": {"dtype": "F32", "shape": 3, "data_offsets": [0, 0]}}),
            SAFETENSORS,
        ),
        (npy_of("{'" + marker.decode() + "': 1}"), NPY),
        (marker * 3, "application/octet-stream"),
    ):
        assert marker.decode() not in post(api, content=payload, content_type=declared).text


MUTANTS = st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=4))
GENUINE = (npy(X), packed(x=torch.from_numpy(X), weight=torch.ones(12)))
LAYER_NAMES = st.text(st.characters(codec="utf-8"), max_size=40)
DECLARED = (NPY, SAFETENSORS, "application/octet-stream")
QUICK = settings(max_examples=150)


@pytest.mark.slow
@QUICK
@given(content=st.binary(max_size=400), declared=st.sampled_from([NPY, SAFETENSORS, "application/octet-stream"]))
def test_any_bytes_get_an_answer_below_500(api, content, declared):
    assert post(api, content=content, content_type=declared).status_code < 500


@pytest.mark.slow
@QUICK
@given(genuine=st.sampled_from(GENUINE), mutants=st.lists(MUTANTS, max_size=4), cut=st.integers(0, 40))
def test_almost_genuine_payloads_get_an_answer_below_500(api, genuine, mutants, cut):
    content = bytearray(genuine[: len(genuine) - cut])
    for position, replacement in mutants:
        content[position : position + len(replacement)] = replacement
    response = post(api, content=bytes(content), content_type="application/octet-stream")
    assert response.status_code < 500


@pytest.mark.slow
@QUICK
@given(query=st.text(st.characters(max_codepoint=255), max_size=60))
def test_any_query_gets_an_answer_below_500(api, query):
    response = api.post("/v1/group_norm", params=query, content=npy(X))
    assert response.status_code in (200, 422)


@pytest.mark.slow
@QUICK
@given(
    name=st.text(st.characters(codec="utf-8"), max_size=40),
    method=st.sampled_from(["GET", "PUT", "DELETE", "POST"]),
)
def test_any_layer_name_gets_an_answer_below_500(api, name, method):
    response = api.request(method, "/v1/layers/" + quote(name, safe=""), content=npy(X))
    assert response.status_code < 500
