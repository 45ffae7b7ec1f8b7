"""Tensors in JSON: what is read is what was written, and nothing else is read."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from normserve.codec import json_tensors
from normserve.codec.json_tensors import MAX_ELEMENTS, decode, encode
from normserve.errors import MalformedPayloadError, NotAcceptableError, TooLargeError
from normserve.memory.tensors import DType, HostTensor

STORED = {
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}


def array_of(tensor: HostTensor) -> np.ndarray:
    return np.frombuffer(tensor.data, STORED[tensor.dtype]).reshape(tensor.shape)


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
def test_what_is_written_is_read_as_it_was(array):
    for dtype, stored in STORED.items():
        with np.errstate(over="ignore"):
            original = array.astype(stored)
        tensor = HostTensor(dtype, array.shape, memoryview(original.tobytes()))
        if not np.isfinite(original.astype(np.float32)).all():
            with pytest.raises(NotAcceptableError, match="NaN or infinity"):
                encode("y", tensor)
            continue
        text = json.dumps(encode("y", tensor)).encode()
        again = decode("y", dtype, array.shape, text)
        assert bytes(again.data) == original.tobytes()
        assert not again.data.readonly


@given(st.lists(st.floats(-3e38, 3e38, width=64), max_size=20))
def test_numbers_are_rounded_as_numpy_rounds_them(values):
    wanted = np.array(values, np.float64).astype(np.float32)
    tensor = decode("x", DType.BFLOAT16, [len(values)], json.dumps(values).encode())
    assert np.array_equal(array_of(tensor), wanted.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("text", ["[1,2,3,4,5,6]", "[[1,2,3],[4,5,6]]", " [ [1.0, 2e0, 3], [4,5,6] ] "])
def test_flat_and_nested_are_the_same(text):
    tensor = decode("x", DType.FLOAT32, [2, 3], text.encode())
    assert np.array_equal(array_of(tensor), np.arange(1, 7, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize(
    "text",
    [
        *("[1,2,3,4,5]", "[1,2,3,4,5,6,7]", "[[1,2],[3,4],[5,6]]", "[[1,2,3],[4,5]]", "[[[1,2,3],[4,5,6]]]", "[]"),
        *('"abcdef"', "{}", "6", "null", "[null,1,2,3,4,5]", "[true,1,2,3,4,5]", '["1",1,2,3,4,5]', "[[1,2,3],4]"),
        *("[1,2,3,4,5,1e39]", "[1,2,3,4,5,-1e400]", "[1,2,3,4,5,NaN]", "[1,2,3,4,5,Infinity]"),
        "[" * 5000 + "]" * 5000,
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(MalformedPayloadError, match="x "):
        decode("x", DType.FLOAT32, [2, 3], text.encode())


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ([1, 4], "[[],[],[],[],[],[],[]]"),
        ([1, 4], "[0,0,0,0,0]"),
        ([1, 4], "[[0,0,0,0,0]]"),
        ([1, 4], "[[[0],[0],[0],[0]]]"),
        ([], "[[]]"),
        ([2, 0], "[[],[],[]]"),
        ([0, 2], "[[],[]]"),
    ],
)
def test_more_than_the_shape_declares_is_not_decoded(monkeypatch, shape, text):
    monkeypatch.setattr(json_tensors, "_FLAT", None)
    monkeypatch.setattr(json_tensors, "_make_nested_decoder", None)
    with pytest.raises(MalformedPayloadError, match="x must"):
        decode("x", DType.FLOAT32, shape, text.encode())


def test_more_arrays_than_a_tensor_may_have_elements_are_refused_unread():
    with pytest.raises(TooLargeError, match="flat"):
        decode("x", DType.FLOAT32, [MAX_ELEMENTS, 1, 1], b"[" * (2 * MAX_ELEMENTS + 1))


@pytest.mark.parametrize("shape", [[0], [2, 0], [0, 2], [0, 0], [1], [1, 1, 1], [3, 1], [1, 3]])
def test_flat_and_nested_are_read_of_every_shape(shape):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for nested in (array.tolist(), array.ravel().tolist()):
        tensor = decode("x", DType.FLOAT32, shape, json.dumps(nested).encode())
        assert np.array_equal(array_of(tensor), array)


def test_what_a_narrower_type_cannot_hold_is_refused():
    decode("x", DType.FLOAT16, [1], b"[65504]")
    for dtype, text in ((DType.FLOAT16, b"[65520]"), (DType.BFLOAT16, b"[3.4e38]")):
        with pytest.raises(MalformedPayloadError, match=dtype.value):
            decode("x", dtype, [1], text)


def test_many_elements_are_refused_unread():
    with pytest.raises(TooLargeError, match="binary data"):
        decode("x", DType.FLOAT32, [MAX_ELEMENTS + 1], b"no JSON at all")
    with pytest.raises(TooLargeError, match="binary data"):
        json_tensors.require_json_size("y", MAX_ELEMENTS + 1)
    with pytest.raises(MalformedPayloadError, match="2\\^63"):
        decode("x", DType.FLOAT32, [2**62, 4, 0], b"[]")
