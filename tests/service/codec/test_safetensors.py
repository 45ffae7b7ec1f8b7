import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from normserve.codec import safetensors as codec
from normserve.errors import MalformedPayloadError, NormserveError, TooLargeError, UnsupportedDtypeError
from normserve.memory.tensors import DType, HostTensor

from .safetensors_payloads import entry, payload

DTYPES = {"float32": DType.FLOAT32, "float16": DType.FLOAT16}


def host_tensor(array):
    return HostTensor(DTYPES[array.dtype.name], array.shape, memoryview(array.tobytes()))


def as_array(tensor):
    return np.frombuffer(tensor.data, tensor.dtype.value).reshape(tensor.shape)


arrays = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    hnp.arrays(st.sampled_from(["<f4", "<f2"]), hnp.array_shapes(min_dims=0, min_side=0, max_side=5)),
    max_size=6,
)
few = settings(max_examples=30)


@few
@given(arrays)
def test_reads_what_the_library_writes(tensors):
    decoded = codec.decode(memoryview(safetensors.numpy.save(tensors)))
    assert decoded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert decoded[name].shape == array.shape
        assert bytes(decoded[name].data) == array.tobytes()


@few
@given(arrays)
def test_the_library_reads_what_we_write(tensors):
    body = b"".join(codec.encode({name: host_tensor(array) for name, array in tensors.items()}))
    loaded = safetensors.numpy.load(body)
    assert loaded.keys() == tensors.keys()
    for name, array in tensors.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()


@few
@given(arrays)
def test_what_we_write_we_read(tensors):
    described = {name: host_tensor(array) for name, array in tensors.items()}
    assert codec.decode(memoryview(b"".join(codec.encode(described)))) == described


def test_bfloat16_passes_through_the_library():
    x = torch.randn(3, 5).bfloat16()
    decoded = codec.decode(memoryview(safetensors.torch.save({"x": x})))["x"]
    assert decoded.dtype is DType.BFLOAT16
    again = safetensors.torch.load(b"".join(codec.encode({"x": decoded})))["x"]
    assert torch.equal(again, x)


def test_data_are_views_of_the_body():
    body = bytearray(safetensors.numpy.save({"x": np.zeros(4, np.float32)}))
    tensor = codec.decode(memoryview(body))["x"]
    body[-4:] = struct.pack("<f", 7.0)
    assert as_array(tensor)[-1] == 7.0


def test_a_header_that_was_read_before_is_of_the_body_that_has_it():
    first, second = (memoryview(safetensors.numpy.save({"x": np.full(4, n, np.float32)})) for n in (1, 2))
    assert as_array(codec.decode(first)["x"]).tolist() == [1] * 4
    assert as_array(codec.decode(second)["x"]).tolist() == [2] * 4
    with pytest.raises(MalformedPayloadError, match="must end where the body does"):
        codec.decode(memoryview(bytes(second) + b"more"))
    with pytest.raises(MalformedPayloadError, match="must end where the body does"):
        codec.decode(second[:-4])
    with pytest.raises(TooLargeError, match="at most 0 tensors"):
        codec.decode(second, codec.HeaderLimits(max_header_bytes=1024, max_tensors=0))


def test_encode_sends_the_tensors_own_buffers():
    tensor = host_tensor(np.ones((2, 3), np.float32))
    header, data = codec.encode({"y": tensor})
    assert data is tensor.data
    assert len(header) % codec.DATA_ALIGNMENT == 0


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path):
    tensors = {"y": host_tensor(np.ones(3, np.float16)), "rstd": host_tensor(np.ones(3, np.float32))}
    body = b"".join(codec.encode(tensors))
    for read in codec.read_entries(memoryview(body)):
        assert read.start % tensors[read.name].dtype.itemsize == 0
    assert codec.sort_by_element_size({"a": (DType.FLOAT16, (1,)), "b": (DType.FLOAT32, (1,))}) == ["b", "a"]
    path = tmp_path / "answer.safetensors"
    path.write_bytes(body)
    assert safetensors.torch.load_file(path)["y"].tolist() == [1, 1, 1]


def test_metadata_is_checked_and_left_out():
    body = safetensors.numpy.save({"x": np.zeros(2, np.float32)}, metadata={"made by": "hand"})
    assert list(codec.decode(memoryview(body))) == ["x"]


@pytest.mark.parametrize(
    "header",
    [
        {"__metadata__": None, "x": entry()},
        {"x": {**entry(), "strides": [1], "made by": "hand", "more": None}},
        " \n\r\t" + json.dumps({"x": entry()}),
        json.dumps({"x": entry()}) + " \n\r\t",
    ],
)
def test_headers_that_the_reference_reads_are_read(header):
    body = payload(header, bytes(range(8)))
    (expected,) = safetensors.deserialize(bytes(body))
    (name, tensor), *more = codec.decode(body).items()
    assert (name, bytes(tensor.data), more) == (expected[0], bytes(expected[1]["data"]), [])


def test_an_empty_set_of_tensors_is_well_formed():
    assert codec.decode(payload({})) == {}


def test_a_checkpoint_may_hold_more_tensors_and_types_than_a_request():
    many = {f"layer.{i}": np.zeros(2, np.float32) for i in range(100)}
    many["position_ids"] = np.arange(3)
    body = memoryview(safetensors.numpy.save(many))
    entries = {read.name: read for read in codec.read_entries(body, codec.CHECKPOINT_LIMITS)}
    assert entries["layer.7"].view_tensor(body).shape == (2,)
    with pytest.raises(UnsupportedDtypeError, match="position_ids"):
        entries["position_ids"].view_tensor(body)


DEEP = 20_000
LIES = {
    "nothing": memoryview(b""),
    "seven bytes": memoryview(bytes(7)),
    "no header": memoryview(bytes(8)),
    "header beyond the body": memoryview(struct.pack("<Q", 100) + b"{}"),
    "header beyond the cap": payload(b"{" + b" " * (64 * 1024) + b"}"),
    "header length of 2^63": memoryview(struct.pack("<Q", 2**63) + b"{}"),
    "header length of 2^64 - 1": memoryview(struct.pack("<Q", 2**64 - 1) + b"{}"),
    "a byte order mark": payload(b"\xef\xbb\xbf{}"),
    "a space that JSON does not have": payload(b"\x0b{}"),
    "header is an array": payload([]),
    "header is a string": payload(b'"{}"'),
    "half an object": payload(b'{"x":'),
    "two objects": payload(b"{}{}"),
    "invalid utf-8": payload(b'{"\xff": 1}'),
    "a lone surrogate": payload(b'{"\\ud800": {"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    "deep arrays": payload('{"x":' + "[" * DEEP + "]" * DEEP + "}"),
    "deep objects": payload('{"x":' * 9_000 + "1" + "}" * 9_000),
    "deep and never closed": payload("{" + "[" * DEEP),
    "depth hidden behind a quote": payload('{"\\"' + "[" * DEEP),
    "control character in a name": payload(b'{"a\nb": 1}'),
    "duplicate name": payload(
        '{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        bytes(8),
    ),
    "duplicate field": payload('{"x":{"dtype":"F16","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "nan": payload('{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
    "infinity": payload('{"x":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,8]}}', bytes(8)),
    "1e999": payload('{"x":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', bytes(8)),
    "a number of a thousand digits": payload(
        '{"x":{"dtype":"F32","shape":[' + "9" * 1000 + '],"data_offsets":[0,8]}}', bytes(8)
    ),
    "negative size": payload({"x": entry(shape=[-2])}, bytes(8)),
    "minus zero": payload('{"x":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}'),
    "two negative sizes": payload({"x": entry(shape=[-1, -2])}, bytes(8)),
    "float size": payload({"x": entry(shape=[2.0])}, bytes(8)),
    "bool size": payload({"x": entry(shape=[True, 2])}, bytes(8)),
    "string size": payload({"x": entry(shape=["2"])}, bytes(8)),
    "null size": payload({"x": entry(shape=[None])}, bytes(8)),
    "shape is a number": payload({"x": entry(shape=2)}, bytes(8)),
    "shape is an object": payload({"x": entry(shape={})}, bytes(8)),
    "rank of 5000": payload({"x": entry(shape=[1] * 5000, offsets=[0, 4])}, bytes(4)),
    "product overflows": payload({"x": entry(shape=[2**40, 2**40], offsets=[0, 0])}),
    "product overflows beside a zero": payload({"x": entry(shape=[2**40, 2**40, 0], offsets=[0, 0])}),
    "product wraps to the right size": payload({"x": entry(shape=[2**62 + 1, 2], offsets=[0, 8])}, bytes(8)),
    "too few bytes for the shape": payload({"x": entry(shape=[3])}, bytes(8)),
    "too many bytes for the shape": payload({"x": entry(shape=[1])}, bytes(8)),
    "bits that fill no byte": payload({"x": entry("F4", [3], [0, 1])}, bytes(1)),
    "terabytes": payload({"x": entry(shape=[2**40], offsets=[0, 2**42])}, bytes(8)),
    "reversed offsets": payload({"x": entry(offsets=[8, 0])}, bytes(8)),
    "three offsets": payload({"x": entry(offsets=[0, 4, 8])}, bytes(8)),
    "bool offsets": payload({"x": entry(shape=[0], offsets=[False, False])}),
    "offsets beyond the body": payload({"x": entry(offsets=[8, 16])}, bytes(8)),
    "trailing bytes": payload({"x": entry()}, bytes(9)),
    "data without a tensor": payload({}, bytes(1)),
    "hole in front": payload({"x": entry(offsets=[4, 12])}, bytes(12)),
    "hole between": payload({"x": entry(), "y": entry(offsets=[12, 20])}, bytes(20)),
    "overlap": payload({"x": entry(), "y": entry(offsets=[4, 12])}, bytes(12)),
    "the same bytes twice": payload({"x": entry(), "y": entry()}, bytes(8)),
    "empty tensor inside another": payload({"x": entry(), "y": entry(shape=[0], offsets=[4, 4])}, bytes(8)),
    "missing field": payload({"x": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an unknown field of any depth": payload({"x": {**entry(), "more": [[1]]}}, bytes(8)),
    "an unknown field twice": payload(
        '{"x":{"a":1,"a":1,"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)
    ),
    "tensor is a number": payload({"x": 1}),
    "dtype is a number": payload({"x": entry(dtype=1)}, bytes(8)),
    "dtype of no format": payload({"x": entry(dtype="float32")}, bytes(8)),
    "metadata is a string": payload({"__metadata__": "x"}),
    "metadata holds a number": payload({"__metadata__": {"a": 1}}),
    "metadata holds an object": payload({"__metadata__": {"a": {"b": "c"}}}),
    "integers of a wrong size": payload({"x": entry("I64", [2], [0, 8])}, bytes(8)),
    "integers with a trailing byte": payload({"x": entry("I64", [1], [0, 8])}, bytes(9)),
}


@pytest.mark.parametrize("body", LIES.values(), ids=LIES.keys())
def test_a_lie_is_malformed(body):
    with pytest.raises(MalformedPayloadError):
        codec.decode(body)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("F64", [1], 8),
        ("I64", [1], 8),
        ("U8", [8], 8),
        ("BOOL", [8], 8),
        ("C64", [1], 8),
        ("F4", [16], 8),
        ("F6_E2M3", [4], 3),
        ("F8_E4M3", [3], 3),
        ("C128", [1], 16),
        ("I4", [2], 1),
    ],
)
def test_other_element_types_are_unsupported_when_all_else_is_well_formed(dtype, shape, size):
    with pytest.raises(UnsupportedDtypeError, match=f"F32, F16, BF16, got {dtype}"):
        codec.decode(payload({"x": entry(dtype, shape, [0, size])}, bytes(size)))


def test_more_tensors_than_a_request_may_hold_are_too_many():
    empty = {f"t{i}": entry(shape=[0], offsets=[0, 0]) for i in range(65)}
    with pytest.raises(TooLargeError, match="at most 64 tensors, got 65"):
        codec.decode(payload(empty))
    empty.popitem()
    assert len(codec.decode(payload(empty))) == 64


def test_a_header_bomb_is_refused_before_its_header_is_read(monkeypatch):
    bomb = json.dumps({f"t{i}": entry(shape=[0], offsets=[0, 0]) for i in range(20_000)})
    monkeypatch.setattr(codec.strict_json, "parse_object", lambda *_: pytest.fail("the header was parsed"))
    with pytest.raises(MalformedPayloadError, match="at most 65536 bytes"):
        codec.decode(payload(bomb))


def test_messages_never_echo_a_name_that_could_be_anything():
    name = "<script>" + "x" * 1000
    with pytest.raises(MalformedPayloadError) as caught:
        codec.decode(payload({name: entry(shape=[3])}, bytes(8)))
    assert "script" not in caught.value.detail
    assert len(caught.value.detail) < 200


@pytest.mark.parametrize("fault", ["order", "size", "name"])
def test_encode_refuses_what_the_format_cannot_say(fault):
    tensor = host_tensor(np.ones((2, 3), np.float32))
    wrong = {
        "order": {"y": HostTensor(tensor.dtype, tensor.shape, tensor.data, fortran_order=True)},
        "size": {"y": HostTensor(tensor.dtype, (2, 4), tensor.data)},
        "name": {"__metadata__": tensor},
    }
    with pytest.raises(ValueError, match=r"row-major|bytes|__metadata__"):
        codec.encode(wrong[fault])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
near_entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I64", "F4", "f32"]) | json_values,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 16), min_size=2, max_size=2) | json_values,
    },
)


@given(
    st.binary(max_size=200)
    | st.builds(
        lambda header, data: bytes(payload(header, data)),
        st.dictionaries(st.text(max_size=3), near_entries | json_values, max_size=3) | json_values | st.text(),
        st.binary(max_size=16),
    )
)
def test_any_bytes_decode_or_raise_our_error(body):
    try:
        tensors = codec.decode(memoryview(body))
    except NormserveError:
        return
    assert sum(tensor.nbytes for tensor in tensors.values()) <= len(body)
    assert safetensors.deserialize(body) is not None
